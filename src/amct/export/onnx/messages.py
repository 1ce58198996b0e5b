"""Helpers for ONNX messages: attributes, arrays, the tensors that a node reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from amct.errors import ExportError
from amct.export.onnx.kept_weights import tensor_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto


def attribute_value(node: NodeProto, name: str, default: Any = None) -> Any:  # noqa: ANN401  attributes have any type
    """The decoded value of an attribute; ``default`` if the node does not have it."""
    for attribute in node.attribute:
        if attribute.name == name:
            value = helper.get_attribute_value(attribute)
            return value.decode() if isinstance(value, bytes) else value
    return default


def model_opset(model: ModelProto) -> int:
    """The opset version of the standard operators in a model."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def make_attribute(name: str, value: object) -> AttributeProto:
    """Create an attribute whose type follows from its value."""
    if isinstance(value, list) and not value:
        # helper cannot guess the type of an empty list; recurrent operators have empty "activations".
        empty = AttributeProto()
        empty.name = name
        empty.type = AttributeProto.STRINGS if name == "activations" else AttributeProto.FLOATS
        return empty
    return helper.make_attribute(name, value)


def new_node(
    operator: str, inputs: Iterable[str], outputs: Iterable[str], attributes: Mapping[str, object], name: str = ""
) -> NodeProto:
    """A node of a standard operator; attributes that are None are left out."""
    node = NodeProto(op_type=operator, input=inputs, output=outputs)
    if name:
        node.name = name
    node.attribute.extend(make_attribute(key, value) for key, value in attributes.items() if value is not None)
    return node


def fresh_name(name: str, taken: set[str]) -> str:
    """The name, with a number appended if it is taken; it is taken afterwards."""
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    taken.add(candidate)
    return candidate


def copied_node(node: NodeProto) -> NodeProto:
    """A copy of a node, independent of its model."""
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


def parameter_bytes(model: ModelProto) -> int:
    """The size of a model's parameters."""
    return sum(stored_bytes(tensor) for tensor in model.graph.initializer)


def stored_bytes(tensor: TensorProto) -> int:
    """The size of a tensor by its shape: reading its data would copy it."""
    try:
        size = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError, ValueError):  # no numbers
        size = 1
    return math.prod(tensor.dims) * int(size)


def any_value(name: str) -> ValueInfoProto:
    """A declaration with only a name."""
    value = ValueInfoProto()
    value.name = name
    return value


def constant_node_value(node: NodeProto) -> NDArray[Any]:
    """The array of a Constant node.

    Raises:
        ExportError: it holds text or a sparse tensor.
    """
    for attribute in node.attribute:
        if attribute.name == "value":
            return tensor_array(attribute.t)
        if attribute.name in ("value_float", "value_floats"):
            return np.asarray(helper.get_attribute_value(attribute), dtype=np.float32)
        if attribute.name in ("value_int", "value_ints"):
            return np.asarray(helper.get_attribute_value(attribute), dtype=np.int64)
    raise ExportError(f'Constant "{node.name}" holds no number; expected a tensor, a float or an integer')


def subgraphs(node: NodeProto) -> Iterable[GraphProto]:
    """The bodies of an If, Loop or Scan."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def captures(node: NodeProto) -> set[str]:
    """Tensors of the outer graph that the bodies of a node read."""
    found: set[str] = set()
    for graph in subgraphs(node):
        inner = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        inner |= {name for child in graph.node for name in child.output}
        found |= {name for child in graph.node for name in reads(child)} - inner
        found |= {value.name for value in graph.output} - inner
    return found


def reads(node: NodeProto) -> list[str]:
    """All tensors that a node reads: its inputs, and tensors of the outer graph read by its bodies."""
    return [name for name in node.input if name] + sorted(captures(node))


def first_line(error: BaseException) -> str:
    """The message of an ONNX or onnxruntime error, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
