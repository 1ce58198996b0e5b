"""The folded float model as ONNX, with each quantizable layer bound to the node that computes it.

The rules of ``lowering`` convert the captured program to a graph in which every node still refers to its module and
every initializer to its parameter. A program with an operation that has no rule is converted by torch.onnx,
unoptimized. This module then takes the weights from the folded model, removes folded batch norms, and gives nodes the
names of their layers and inputs and outputs the names that the user chose.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from amct.errors import ExportError
from amct.export.binding import LayerBinding
from amct.export.onnx.messages import model_opset
from amct.export.onnx.pool_padding import with_explicit_pool_padding, with_separate_zeros
from amct.export.writer import check_opset
from amct.model.kinds import KIND_OF_TORCH_TYPE
from amct.pytorch.capture.program import failure_of, quiet_exporters
from amct.pytorch.capture.program_reader import place_in_code
from amct.pytorch.capture.program_rewrites import plain_name
from amct.pytorch.functional.layers import layer_name
from amct.pytorch.model_copy import as_array
from amct.pytorch.onnx.layers import place_layers
from amct.pytorch.onnx.lowering.assembly import Lowered
from amct.pytorch.onnx.lowering.program import LARGEST_CONSTANT, lower
from amct.pytorch.onnx.lowering.registry import NotLoweredError
from amct.pytorch.onnx.names import ProgramTensors, name_dimensions, name_inputs_and_outputs, names_in, original_names
from amct.pytorch.onnx.opset import lower_opset
from amct.pytorch.onnx.recurrent import translations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto
    from torch import nn
    from torch.export import ExportedProgram

    from amct.export.onnx.kept_weights import KeptWeights
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.folding import Fused
    from amct.pytorch.onnx.io_names import IoNames

logger = logging.getLogger(__name__)

DEFAULT_OPSET = 18
_UNKNOWN_OPERATOR = re.compile(r"OpOverload\(op='(?P<name>[\w.]+)', overload='(?P<overload>\w+)'\)")
_LOWEST_WRITTEN = 18  # of our rules and of torch.onnx; lower ones are converted to
_FILE_VERSIONS = MappingProxyType({16: 8, 17: 8, 18: 8, 19: 9, 20: 9, 21: 10})  # ONNX's own table


@dataclass(frozen=True, kw_only=True, eq=False)
class FloatOnnx:
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
) -> FloatOnnx:
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
    tensors = names_in(model, lowered.tensors, placed.replaced, placed.changed)
    return FloatOnnx(model=model, bindings=bindings, tensors=tensors)


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
        logger.debug("torch.onnx exports the program, because it cannot be traced again: %s", _root_cause(error))
    _refuse_complex(stored)
    converted = _converted(program, opset)
    _restore_names(converted.model)
    _put_parameters(converted.model, stored)
    tensors = ProgramTensors(program, converted)
    name_inputs_and_outputs(converted.model, names)
    name_dimensions(converted.model, names)
    return Lowered(model=_simplified(converted.model), tensors=tensors.names())


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


def _refuse_complex(stored: Mapping[str, torch.Tensor]) -> None:
    """Raise an error for a complex parameter: torch.onnx writes it into a file that no runtime loads."""
    name = next((name for name, tensor in stored.items() if tensor.is_complex()), None)
    if name is not None:
        raise ExportError(
            f'"{name}" is complex, and ONNX files have real tensors only; store its real and imaginary part as real '
            "tensors and compute with both"
        )


def _converted(program: ExportedProgram, opset: int) -> Any:  # noqa: ANN401  torch.onnx.ONNXProgram, an optional import
    try:
        with quiet_exporters():
            return torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=opset,
                optimize=False,  # its optimizer would fold batch norms that the user wants to keep
                verbose=False,
                custom_translation_table=dict(translations()),
            )
    except Exception as error:
        reason = _missing_operator(program, str(error)) or _root_cause(error)
        raise ExportError(f"torch.onnx cannot export the model: {reason}") from error


def _missing_operator(program: ExportedProgram, message: str) -> str:
    """The operator that torch.onnx names as unknown, with its place in the user's code; "" if it names none."""
    named = _UNKNOWN_OPERATOR.search(message)
    if named is None:
        return ""
    operator = f"{named['name']}.{named['overload']}"
    of = " for complex numbers" if "complex-valued" in message else ""
    place = _place_of(operator, program)
    if not place:  # what the user calls consists of it
        with suppress(Exception), quiet_exporters(), torch.no_grad():
            place = _place_of(operator, program.run_decompositions())
    return (
        f"the operator {operator}{f' ({place})' if place else ''} has no form in ONNX{of}; write it by other "
        "operations on tensors, or leave it out of the exported model"
    )


def _place_of(operator: str, program: ExportedProgram) -> str:
    name = operator.split(".")[1]
    names = (name, f"special_{name}")  # aten.special_bessel_j0 is made of prims.bessel_j0
    nodes = (node for node in program.graph.nodes if f"{node.target}..".split(".")[1] in names)
    return next((where for node in nodes if (where := place_in_code(node))), "")


def _root_cause(error: BaseException) -> str:
    """The message of the innermost exception, which torch.onnx wraps in general advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return failure_of(error).reason


def _stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers by name; those of a functional layer begin with its name."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {layer_name(name): tensor for name, tensor in named}


def _restore_names(model: Any) -> None:  # noqa: ANN401  onnx_ir.Model ships partial types
    """Give the initializers the names of the user's model; names with quotes are escaped in a captured program."""
    for initializer in list(model.graph.initializers.values()):
        if initializer.name != plain_name(initializer.name):
            initializer.name = plain_name(initializer.name)


def _put_parameters(model: Any, stored: Mapping[str, torch.Tensor]) -> None:  # noqa: ANN401  onnx_ir.Model ships partial types
    """Set the initializers to the parameters and buffers of the folded model, which have the same names.

    Small ones get their values, as constants may be computed from them. Large ones get only type and shape until the
    graph is finished, because copying them repeatedly is slow.
    """
    from onnxscript import ir

    for initializer in list(model.graph.initializers.values()):
        name = layer_name(initializer.name)
        if name not in stored:
            continue
        initializer.name = name
        if stored[name].numel() <= LARGEST_CONSTANT:
            initializer.const_value = ir.tensor(as_array(stored[name]), name=name)
        else:
            initializer.const_value = ir.ExternalTensor(
                "later", None, None, initializer.dtype, shape=initializer.shape, name=name
            )


def _simplified(model: Any) -> ModelProto:  # noqa: ANN401  onnx_ir.Model ships partial types
    """Fold constants and drop unused nodes."""
    from onnxscript import ir, optimizer

    with quiet_exporters():
        optimizer.inline(model)
        optimizer.fold_constants(model, input_size_limit=LARGEST_CONSTANT)
        optimizer.remove_unused_nodes(model)
    proto: ModelProto = ir.to_proto(model)
    return proto


def _finish(model: ModelProto, opset: int) -> None:
    """Remove the exporter's notes (they name the user's files), set the versions, check the result."""
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    model.ir_version = _FILE_VERSIONS[opset]
    if model_opset(model) != opset:
        raise ExportError(f"the exported file has opset {model_opset(model)}, expected {opset}")
    try:
        onnx.checker.check_model(_without_values(model))
    except onnx.checker.ValidationError as error:
        raise ExportError(f"the exported model is not valid ONNX of opset {opset}: {error}") from error


def _without_values(model: ModelProto) -> ModelProto:
    """The same graph, with parameters that have no values yet as inputs."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    del light.graph.initializer[:]
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            light.graph.initializer.append(tensor)
    return light


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
