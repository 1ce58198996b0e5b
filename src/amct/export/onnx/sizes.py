"""Limits the memory that an ONNX model may need: each tensor, and all tensors that exist at the same time.

Shapes are those that ONNX infers. A tensor whose shape depends on values is not counted before the model runs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx
from onnx import helper

from amct.errors import ModelError
from amct.export.onnx.kept_weights import light_copy
from amct.export.onnx.messages import reads, subgraphs
from amct.memory import LiveTensors, gibibytes, machine_bytes, number_from_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from onnx import GraphProto, ModelProto, ValueInfoProto

LIMIT_VARIABLE = "AMCT_ONNX_MAX_TENSOR_BYTES"
"""Environment variable that raises the largest allowed size of a tensor between two nodes, in bytes."""
DEFAULT_LIMIT = 4 * 2**30
MODEL_LIMIT_VARIABLE = "AMCT_ONNX_MAX_MODEL_BYTES"
"""Environment variable that raises the limit of all tensors together, in bytes."""


def model_limit() -> int:
    """The largest allowed size of all tensors together: half of the memory, as every batch is copied and counted."""
    return number_from_environment(MODEL_LIMIT_VARIABLE, machine_bytes() // 2)


def check_sizes(source: str, model: ModelProto, kept: Iterable[str] = ()) -> None:
    """Check the sizes of tensors whose shapes are declared: a Concat of a tensor with itself doubles it.

    Args:
        source: The model's name in messages.
        model: The model, with the inferred shapes.
        kept: Tensors besides the outputs that are held until the end of a run.

    Raises:
        ModelError: A tensor is above its limit, or the tensors that exist at the same time are.
    """
    _check_graph(source, model.graph, {*kept, *(value.name for value in model.graph.output)}, 0)


def check_declared_sizes(source: str, model: ModelProto) -> None:
    """Check the sizes as ``check_sizes`` does, for a model without inferred shapes; a dynamic axis counts as 1.

    Raises:
        ModelError: A tensor is above its limit, or the tensors that exist at the same time are.
    """
    inputs = {value.name: tuple(_shape(value)) for value in model.graph.input}
    check_sizes_of_run(source, light_copy(model), inputs, ())


def check_sizes_of_run(
    source: str, light: ModelProto, inputs: Mapping[str, tuple[int, ...]], kept: Iterable[str]
) -> None:
    """Check the sizes as ``check_sizes`` does, for inputs of given shapes: in the file, axes may be dynamic.

    Args:
        source: The model's name in messages.
        light: A light copy of the model; its declared shapes are replaced.
        inputs: The shapes of the inputs.
        kept: Tensors besides the outputs that are held until the end of a run.

    Raises:
        ModelError: A tensor is above its limit, or the tensors that exist at the same time are.
    """
    inferred = _inferred(light, inputs)
    if inferred is not None:
        check_sizes(source, inferred, kept)


def sizes_of_run(light: ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The bytes of each tensor between nodes as far as they are known, for inputs of given shapes.

    Args:
        light: A light copy of the model; its declared shapes are replaced.
        inputs: The shapes of the inputs.

    Raises:
        ModelError: A tensor is above its limit.
    """
    inferred = _inferred(light, inputs)
    return {} if inferred is None else _tensor_sizes("the model", inferred.graph)


def _inferred(light: ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> ModelProto | None:
    for value in light.graph.input:
        if value.name in inputs:
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind, inputs[value.name]))
    del light.graph.value_info[:]
    for value in light.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        return onnx.shape_inference.infer_shapes(light)
    except Exception:  # noqa: BLE001  only a help: onnxruntime judges the model
        return None


def _check_graph(source: str, graph: GraphProto, kept: set[str], held: int) -> None:
    """Check a graph, or the body of an If, Loop or Scan, while the graphs around it hold some bytes."""
    sizes = _tensor_sizes(source, graph)
    tensors = LiveTensors(model_limit(), held)
    last = {name: index for index, node in enumerate(graph.node) for name in reads(node)}
    for index, node in enumerate(graph.node):
        tensors.make({name: sizes.get(name, 0) for name in node.output if name})
        if tensors.is_too_much:
            raise ModelError(
                f'{source}: with node "{node.name or next(iter(node.output), "")}" ({node.op_type}) the model holds '
                f"tensors of {gibibytes(tensors.bytes)} at the same time; the limit is {gibibytes(tensors.limit)}. Use "
                f"a smaller batch; or, if this size is intended, set {MODEL_LIMIT_VARIABLE} to a larger number of bytes"
            )
        for body in subgraphs(node):
            _check_graph(source, body, {value.name for value in body.output}, tensors.bytes)
        used = {*reads(node), *node.output} - kept
        tensors.free(name for name in used if last.get(name, index) <= index)


def _tensor_sizes(source: str, graph: GraphProto) -> dict[str, int]:
    """The bytes of each tensor that a graph declares, which must be below the limit of one tensor."""
    limit = number_from_environment(LIMIT_VARIABLE, DEFAULT_LIMIT)
    sizes: dict[str, int] = {}
    for value in (*graph.value_info, *graph.output):
        shape = _shape(value)
        sizes[value.name] = math.prod(shape) * _element_bytes(value.type.tensor_type.elem_type)
        if sizes[value.name] > limit:
            raise ModelError(
                f'{source}: tensor "{value.name}" would have shape {shape}, more than {gibibytes(limit)}. If this '
                f"size is intended, set {LIMIT_VARIABLE} to a larger number of bytes"
            )
    return sizes


def _shape(value: ValueInfoProto) -> list[int]:
    """The declared sizes; 1 for a dynamic axis."""
    dimensions = value.type.tensor_type.shape.dim
    return [max(each.dim_value, 0) if each.HasField("dim_value") else 1 for each in dimensions]


def _element_bytes(kind: int) -> int:
    try:
        return int(helper.tensor_dtype_to_np_dtype(kind).itemsize) or 1
    except (KeyError, TypeError, ValueError):
        return 1
