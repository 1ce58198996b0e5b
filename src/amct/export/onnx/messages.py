"""ONNX messages: what nodes read, how much memory tensors need, and the writer of new graphs.

The lowering of a torch program and the forms of Caffe's layers write with ``GraphWriter``; ``graph.py`` edits a graph
that exists. Memory is limited for each tensor, and for all tensors that exist at the same time. Shapes are those that
ONNX infers: a tensor whose shape depends on values is not counted before the model runs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from amct.errors import ExportError, ModelError
from amct.export.onnx.kept_weights import light_copy, tensor_array
from amct.memory import LiveTensors, gibibytes, machine_bytes, number_from_environment

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


def fixed_batch_size(model: ModelProto) -> int | None:
    """The batch size that a model takes only, by the first axis of its inputs; None: any."""
    shapes = [value.type.tensor_type.shape.dim for value in model.graph.input]
    return min((int(each[0].dim_value) for each in shapes if each and each[0].HasField("dim_value")), default=0) or None


def with_batch_size(model: ModelProto, size: int) -> ModelProto:
    """A copy of a model that takes batches of any size, for batches of one size only."""
    fixed = ModelProto()
    fixed.CopyFrom(model)
    first = [value.type.tensor_type.shape.dim[:1] for value in fixed.graph.input]
    labels = {axis.dim_param for axes in first for axis in axes if axis.dim_param}
    for axes in first:
        for axis in axes:
            axis.dim_value = size
    for value in (*fixed.graph.input, *fixed.graph.output, *fixed.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in labels:
                axis.dim_value = size
    return fixed


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
