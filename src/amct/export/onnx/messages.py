"""ONNX messages: attributes, arrays, the tensors that a node reads; and the writer of new graphs.

The lowering of a torch program and the forms of Caffe's layers write with ``GraphWriter``; ``graph.py`` edits a graph
that exists.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from amct.errors import ExportError
from amct.export.onnx.kept_weights import light_copy, tensor_array

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from amct.export.onnx.kept_weights import KeptWeights


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


class GraphWriter:
    """The nodes and initializers of one graph; names stay different from each other.

    Args:
        opset: Of the model.
        taken: Names of tensors that exist already.
        kept: Takes large arrays, to which the initializers then refer; None: they hold them.
    """

    def __init__(self, opset: int, taken: Iterable[str] = (), kept: KeptWeights | None = None) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}
        self.notes: list[str] = []
        """What the user should know of the model."""
        self._kept = kept
        self._node_names: set[str] = set()
        self._tensor_names: set[str] = set(taken)
        self._stored: dict[Hashable, str] = {}

    def node(
        self, operator: str, name: str, inputs: Sequence[str], outputs: Sequence[str] = (), **attributes: object
    ) -> str:
        """Add a node; returns its first output, which is named after the node unless given."""
        unique = fresh_name(name, self._node_names)
        results = list(outputs) or [self.tensor(f"{unique}.output0")]
        self.nodes.append(new_node(operator, inputs, results, attributes, unique))
        return results[0]

    def tensor(self, name: str) -> str:
        """Reserve the name of a tensor; another one when it is taken."""
        return fresh_name(name, self._tensor_names)

    def store(self, name: str, value: NDArray[Any], key: Hashable = None) -> str:
        """Store an array; returns the name of the tensor. Arrays of the same key are stored once."""
        if key in self._stored:
            return self._stored[key]
        unique = self.tensor(name)
        array = np.ascontiguousarray(value).reshape(value.shape)
        stored = numpy_helper.from_array(array, unique) if self._kept is None else self._kept.tensor(unique, array)
        self.initializers[unique] = stored
        if key is not None:
            self._stored[key] = unique
        return unique

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names; those that are not mentioned keep theirs."""
        for node in self.nodes:
            for values in (node.input, node.output):
                values[:] = [names.get(name, name) for name in values]
        for old, tensor in self.initializers.items():
            tensor.name = names.get(old, old)

    def model(
        self,
        name: str,
        inputs: Iterable[ValueInfoProto],
        outputs: Iterable[ValueInfoProto],
        initializers: Iterable[TensorProto],
        between: Iterable[ValueInfoProto],
    ) -> ModelProto:
        """The model of the graph with these declarations."""
        opsets = [helper.make_opsetid("", self.opset)]
        version = helper.find_min_ir_version_for(opsets)
        model = ModelProto(producer_name="amct", ir_version=version, opset_import=opsets)
        graph = model.graph
        graph.name = name
        graph.node.extend(self.nodes)
        graph.input.extend(inputs)
        graph.output.extend(outputs)
        graph.initializer.extend(initializers)
        graph.value_info.extend(between)
        return model


def check_valid(model: ModelProto, problem: str) -> None:
    """Check a written model.

    Raises:
        ExportError: ONNX says that it is not valid; the message begins with ``problem``.
    """
    try:
        onnx.checker.check_model(light_copy(model))
    except onnx.checker.ValidationError as error:
        raise ExportError(f"{problem}: {error}") from error
