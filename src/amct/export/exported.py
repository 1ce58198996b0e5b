"""The result of an exporter: the model, a report of each layer, and the skipped layers with the reason.

Files that can be compared with the float model store in their metadata which tensor holds the output of each layer
(``amct.layer_outputs``) and which layers have rescaled outputs (``amct.rescaled``), both as JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from onnx import ModelProto

    from amct.export.onnx.kept_weights import KeptWeights
    from amct.model import Skip
    from amct.model.kinds import LayerKind

LAYER_OUTPUTS, RESCALED = "amct.layer_outputs", "amct.rescaled"


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The changes that an exporter made to one node of a layer."""

    layer: str
    node: str
    type: str
    kind: LayerKind
    operator: str
    """The ONNX operator that computes the layer in the exported file."""
    output: str
    """The tensor that holds the layer's output in the float model."""
    activation_bits: int
    weight_bits: int | None
    inserted: tuple[str, ...]
    """Names of the nodes added for the layer."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an exporter did: all that is kept of an exported file once it is written."""

    layers: tuple[LayerReport, ...] = ()
    skipped: tuple[Skip, ...] = ()
    tensors: tuple[str, ...] = ()
    """Tensors quantized in addition to, or instead of, the inputs of single layers (QDQ, placement ``fast``)."""
    rescaled: tuple[str, ...] = ()
    """Layers whose output channels are divided by the balance factors of the next layer (QDQ, placement ``fast``)."""
    notes: tuple[str, ...] = ()
    """Remarks for the user: a type that the opset lacks, a rounding that was replaced."""


@dataclass(frozen=True, kw_only=True)
class ExportedModel(ExportReport):
    """An exported ONNX model with a report."""

    model: ModelProto
    kept: KeptWeights | None = None
    """The weights to which the model refers; they exist as long as this object."""

    @property
    def report(self) -> ExportReport:
        """The report alone."""
        return ExportReport(**{each.name: getattr(self, each.name) for each in fields(ExportReport)})


def write_metadata(
    model: ModelProto, *, outputs: Mapping[str, str] | None = None, rescaled: Iterable[str] = ()
) -> None:
    """Store in a model's metadata which tensor holds the output of each layer, and which layers are rescaled."""
    for key, value in ((LAYER_OUTPUTS, outputs), (RESCALED, list(rescaled))):
        if value:
            model.metadata_props.add(key=key, value=json.dumps(value))


def layer_outputs(model: ModelProto) -> dict[str, str]:
    """By layer: the tensor with its output, if its name differs from that in the float model."""
    found = _metadata(model, LAYER_OUTPUTS)
    return {str(layer): str(tensor) for layer, tensor in found.items()} if isinstance(found, dict) else {}


def rescaled_layers(model: ModelProto) -> frozenset[str]:
    """The layers whose outputs differ from the float model by the balance factors of the next layer."""
    found = _metadata(model, RESCALED)
    return frozenset(map(str, found)) if isinstance(found, list) else frozenset()


def _metadata(model: ModelProto, key: str) -> object:
    text = next((entry.value for entry in model.metadata_props if entry.key == key), "null")
    try:
        return json.loads(text)
    except ValueError:  # metadata of another tool: tensors are compared by name
        return None
