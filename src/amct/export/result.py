"""What an exporter hands back: the model, what became of each layer, and what was left out, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class Skip:
    """A layer or tensor that stays float, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What an exporter did to one layer."""

    layer: str
    kind: str
    operator: str
    """The ONNX operator that computes the layer in the exported file."""
    activation_bits: int
    weight_bits: int
    inserted: tuple[str, ...]
    """Names of the nodes added for the layer."""


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """An exported ONNX model and the story of it."""

    model: ModelProto
    layers: tuple[LayerReport, ...]
    skipped: tuple[Skip, ...] = ()
    tensors: tuple[str, ...] = ()
    """Tensors that are quantized beside or instead of single layers' inputs (QDQ, placement ``fast``)."""
    notes: tuple[str, ...] = ()
    """What a user should know: a type that the opset lacks, a rounding that replaced another."""
