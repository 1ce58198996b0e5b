"""The folded float model as ONNX, with each quantizable layer bound to the node that computes it.

The rules of ``lowering`` convert the captured program to a graph in which every node still refers to its module and
every initializer to its parameter. A program with an operation that has no rule is converted by torch.onnx,
unoptimized. This module then takes the weights from the folded model, removes folded batch norms, and gives nodes the
names of their layers and inputs and outputs the names that the user chose.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import helper, numpy_helper

from amct.errors import ExportError
from amct.export.binding import LayerBinding
from amct.export.onnx.messages import model_opset
from amct.export.onnx.rewrites import lower_opset, with_explicit_pool_padding, with_separate_zeros
from amct.export.onnx.writer import check_valid
from amct.export.request import check_opset
from amct.model.kinds import KIND_OF_TORCH_TYPE
from amct.pytorch.capture.functional_layers import layer_name
from amct.pytorch.capture.program import quiet_exporters
from amct.pytorch.onnx.layers import place_layers
from amct.pytorch.onnx.lowering.assembly import Lowered
from amct.pytorch.onnx.lowering.program import lower
from amct.pytorch.onnx.lowering.registry import NotLoweredError
from amct.pytorch.onnx.torch_exporter import exported_by_torch, original_names, root_cause
from amct.pytorch.user_model import as_array

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto
    from torch import nn
    from torch.export import ExportedProgram

    from amct.export.onnx.kept_weights import KeptWeights
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.folding import Fused
    from amct.pytorch.inputs import IoNames

logger = logging.getLogger(__name__)

DEFAULT_OPSET = 18
_LOWEST_WRITTEN = 18  # of our rules and of torch.onnx; lower ones are converted to


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedOnnx:
    """A float ONNX model that belongs to a traced model.

    Attributes:
        model: The ONNX model; it has the requested opset.
        bindings: The node of each quantizable layer, which has the layer's name.
        tensors: The ONNX name of each activation of the topology that exists in the file.
    """

    model: ModelProto
    bindings: tuple[LayerBinding, ...]
    tensors: Mapping[str, str]


def float_onnx(
    traced: Traced, fused: Fused, *, opset: int = DEFAULT_OPSET, kept: KeptWeights | None = None
) -> TracedOnnx:
    """Convert the folded model to ONNX, in memory.

    Args:
        traced: the model; it must have a program.
        fused: its folded copy, whose parameters go into the file.
        opset: 16 to 21. GELU is one node from 20 on, several before.
        kept: takes the large parameters, which the folded model and the ONNX model then share; None: they are copied.

    Raises:
        ArgumentError: the opset is outside 16..21.
        ExportError: the model cannot be captured (the message has the user's line), or uses an operation that ONNX or
            the opset lacks.
    """
    check_opset(opset)
    if traced.program is None:
        raise ExportError(
            f"{type(traced.model).__name__} cannot be exported to ONNX, because it cannot be captured as a program: "
            f"{traced.failure}. Calibration works without; to export, express this by operations on tensors"
        )
    stored = _stored_tensors(fused.model)
    lowered = _lowered(traced.program, traced.names, stored, max(opset, _LOWEST_WRITTEN))
    kinds = {name: KIND_OF_TORCH_TYPE[facts.type] for name, facts in traced.layers.items()}
    calls = {name: facts.calls for name, facts in traced.layers.items()}
    placed = place_layers(lowered.model, fused, kinds, calls)
    model = with_separate_zeros(with_explicit_pool_padding(lower_opset(placed.model, opset)))
    _finish(model, opset)
    _fill(model, {**stored, **placed.parameters}, kept)
    bindings = tuple(
        LayerBinding(layer=name, kind=kind, node=node) for name, kind in kinds.items() for node in placed.nodes[name]
    )
    tensors = _names_in(model, lowered.tensors, placed.replaced, placed.changed)
    return TracedOnnx(model=model, bindings=bindings, tensors=tensors)


def _lowered(program: ExportedProgram, names: IoNames, stored: Mapping[str, torch.Tensor], opset: int) -> Lowered:
    """The program as ONNX: by our own rules, or by torch.onnx if an operation has none."""
    try:
        return lower(program, names, stored, opset)
    except NotLoweredError as error:
        logger.debug("the program is traced again for its export, because of %s", error)
    try:
        return _lowered_without_writes(program, names, stored, opset)
    except NotLoweredError as error:
        logger.debug("torch.onnx exports the program, because of %s", error)
    except Exception as error:  # noqa: BLE001  torch.export raises many types
        logger.debug("torch.onnx exports the program, because it cannot be traced again: %s", root_cause(error))
    return exported_by_torch(program, names, stored, opset)


def _lowered_without_writes(
    program: ExportedProgram, names: IoNames, stored: Mapping[str, torch.Tensor], opset: int
) -> Lowered:
    """Let torch replace operations in place and functions that are no operators, then lower the program."""
    with quiet_exporters(), torch.no_grad():
        plain = program.run_decompositions({})
    lowered = lower(plain, names, stored, opset)
    origins = original_names(program, plain)
    tensors = {origins[name]: tensor for name, tensor in lowered.tensors.items() if name in origins}
    return Lowered(model=lowered.model, tensors=tensors)


def _stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers by name; those of a functional layer begin with its name."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {layer_name(name): tensor for name, tensor in named}


def _finish(model: ModelProto, opset: int) -> None:
    """Remove the exporter's notes (they name the user's files), set the versions, check the result."""
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    model.ir_version = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    if model_opset(model) != opset:
        raise ExportError(f"the exported file has opset {model_opset(model)}, expected {opset}")
    check_valid(model, f"the exported model is not valid ONNX of opset {opset}")


def _array_view(tensor: torch.Tensor) -> NDArray[Any]:
    """The values of a tensor as an array; a transposed matrix on the CPU shares its memory, too."""
    if tensor.dim() == 2 and not tensor.is_contiguous():
        return np.transpose(as_array(tensor.t()))
    return as_array(tensor)


def _fill(model: ModelProto, stored: Mapping[str, torch.Tensor], kept: KeptWeights | None) -> None:
    """Store the values of the parameters in the finished model, or refer to them."""
    for tensor in model.graph.initializer:
        if tensor.name in stored:
            array, name = _array_view(stored[tensor.name]), tensor.name
            filled = numpy_helper.from_array(array, name) if kept is None else kept.tensor(name, array)
            tensor.CopyFrom(filled)


def _names_in(
    model: ModelProto, tensors: Mapping[str, str], replaced: Mapping[str, str], changed: Collection[str]
) -> dict[str, str]:
    """The names of activations that exist in the finished model with the same values.

    ``replaced`` maps removed tensors to their replacements; ``changed`` lists tensors whose values differ.
    """
    existing = {output for node in model.graph.node for output in node.output}
    existing.update(value.name for value in model.graph.input)
    found: dict[str, str] = {}
    for origin, name in tensors.items():
        if name in changed:
            continue
        while name in replaced:
            name = replaced[name]
        if name in existing:
            found[origin] = name
    return found
