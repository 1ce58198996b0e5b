"""The ``modified`` ONNX file of AMCT's flow: the folded float model, with the metadata that saving needs.

It holds float weights: the integers follow exactly from them and the record, and some exports (7-bit weights) must be
rounded from the float values. Only weights with learned rounding are stored rounded. Layers, folded layers and skipped
layers are stored in the file's metadata, so that another process can save the model. If a model cannot be exported, the
file holds the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import onnx
from onnx import ModelProto
from pydantic import BaseModel, ConfigDict, ValidationError

from amct import __version__
from amct.atomic import Snapshot, read_bytes
from amct.config.plan import config_text
from amct.errors import ArgumentError, ExportError, ParseError
from amct.export.formats import save_model
from amct.export.onnx.checked import check_loops, check_nodes, check_tensors, decode_model, load_external
from amct.export.onnx.kept_weights import tensor_array
from amct.export.onnx.layer_lookup import AMCT_MARK
from amct.export.onnx.messages import check_declared_sizes
from amct.model import Skip
from amct.model.kinds import ANY_RANK, KIND_OF_OPERATOR, KIND_OF_TORCH_TYPE
from amct.pytorch.capture.layer_types import own_weight
from amct.record import RecordLayer

if TYPE_CHECKING:
    import os

    from torch import nn

    from amct.config.plan import LayerPlan
    from amct.model import LayerFacts
    from amct.numerics.qparams import LayerQParams
    from amct.pytorch.preparation import TorchPreparation

KEY = "amct"


class FileLayer(BaseModel):
    """A quantizable layer of the file."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    type: str
    enabled: bool
    cin: int | None = None
    cout: int | None = None
    gates: int = 0
    cancels_errors: bool = False
    corrects_bias: bool = False


class FileNotes(BaseModel):
    """The metadata of a modified ONNX file; later versions may add fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    version: Literal[1] = 1
    producer: str = ""
    layers: dict[str, FileLayer] = {}
    fusions: dict[str, list[str]] = {}
    skipped: dict[str, str] = {}
    config: str = ""
    failure: str = ""

    def skips(self) -> tuple[Skip, ...]:
        """What stays float, with the reason."""
        return tuple(Skip(layer, reason) for layer, reason in self.skipped.items())

    def record_layers(self) -> list[RecordLayer]:
        """The layers in the form that the record is checked against."""
        return [
            RecordLayer(
                name=name,
                type=layer.type,
                expected=layer.enabled,
                cin=layer.cin,
                cout=layer.cout,
                gates=layer.gates,
            )
            for name, layer in self.layers.items()
        ]


def file_notes(preparation: TorchPreparation, failure: str = "") -> FileNotes:
    """The metadata for the file of a prepared model."""
    modules = preparation.fused.model
    plans = {plan.name: plan for plan in preparation.layer_plans}
    quantized = preparation.weight_qparams()
    return FileNotes(
        producer=f"amct {__version__}",
        layers={
            name: _file_layer(facts, modules.get_submodule(name), plans.get(name), quantized.get(name))
            for name, facts in preparation.traced.layers.items()
        },
        fusions={layer: [norm] for layer, norm in preparation.fused.fusions.items()},
        skipped={skip.layer: skip.reason for skip in preparation.skips},
        config=config_text(preparation.plan),
        failure=failure,
    )


def _file_layer(
    facts: LayerFacts, module: nn.Module, plan: LayerPlan | None, qparams: LayerQParams | None
) -> FileLayer:
    gates = KIND_OF_TORCH_TYPE[facts.type].gates
    weight = own_weight(module)
    rows = weight.shape[0] if gates and weight is not None else facts.out_channels
    return FileLayer(
        type=facts.type,
        enabled=plan is not None,
        cin=facts.in_channels,
        cout=rows,
        gates=gates,
        cancels_errors=qparams is not None and qparams.cancels_errors,
        corrects_bias=plan is not None and plan.bias_correction,
    )


def write_modified(path: Path, model: ModelProto | None, notes: FileNotes) -> None:
    """Write the file; without a model it only holds the reason.

    Raises:
        FileError: it cannot be written.
    """
    written = ModelProto()
    if model is None:
        written.ir_version = onnx.IR_VERSION
        written.producer_name = "amct"
    else:
        written.CopyFrom(model)
    written.metadata_props.add(key=KEY, value=notes.model_dump_json(exclude_defaults=True))
    save_model(path, written)


def read_modified(path: str | os.PathLike[str]) -> tuple[ModelProto, FileNotes]:
    """Read such a file; for a file written by AMCT the notes are derived from its nodes.

    Raises:
        ArgumentError: it does not exist.
        ParseError: it is not ONNX.
        ExportError: the model could not be exported; the message has the reason.
    """
    file = Path(path)
    if not file.exists():
        raise ArgumentError(f'modfied_onnx_file: "{file}" does not exist; quantize_model writes it')
    snapshot = Snapshot(file)
    model = decode_model(read_bytes(file), f'"{file}"')
    text = next((entry.value for entry in model.metadata_props if entry.key == KEY), None)
    check_nodes(f'"{file}"', model)
    load_external(f'"{file}"', model, file.parent)
    check_tensors(f'"{file}"', model)
    check_loops(f'"{file}"', model)
    check_declared_sizes(f'"{file}"', model)
    try:
        notes = FileNotes.model_validate_json(text) if text is not None else _notes_of_nodes(model)
    except ValidationError as error:
        raise ParseError(f'"{file}": its metadata "{KEY}" cannot be read: {error.errors()[0]["msg"]}') from error
    if notes.failure:
        raise ExportError(notes.failure)
    if not model.graph.node:
        raise ParseError(f'"{file}" is not an ONNX model: it has no nodes')
    snapshot.check_unchanged()
    del model.metadata_props[:]
    _drop_marks(model)
    return model, notes


def _drop_marks(model: ModelProto) -> None:
    """Remove AMCT's marks: no runtime would load the model."""
    for node in model.graph.node:
        for place in reversed(range(len(node.attribute))):
            if node.attribute[place].name == AMCT_MARK:
                del node.attribute[place]


def _notes_of_nodes(model: ModelProto) -> FileNotes:
    """Notes for a file without metadata, from the nodes that can be layers."""
    shapes = {item.name: tuple(tensor_array(item).shape) for item in model.graph.initializer if item.dims}
    layers = {}
    for node in model.graph.node:
        kind = KIND_OF_OPERATOR.get(node.op_type)
        if kind is None or not node.name:
            continue
        weight = shapes.get(node.input[1]) if len(node.input) > 1 else None
        if kind.has_weights and weight is None:
            continue
        rows = weight[1] if kind.gates and weight else None
        known_type = kind.torch_type(len(weight) if weight else ANY_RANK) or kind.value
        layers[node.name] = FileLayer(type=known_type, enabled=False, gates=kind.gates, cout=rows)
    return FileNotes(layers=layers)
