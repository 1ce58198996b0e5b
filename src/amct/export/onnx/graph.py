"""An editable ONNX graph: finds nodes and constants, inserts nodes, and builds a sorted model.

The original model is never changed. Initializers are kept as separate messages, so that a model above protobuf's 2 GB
limit can be edited: only parts of it are serialized.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from amct.errors import ExportError, did_you_mean
from amct.export.onnx.kept_weights import copy_fields, tensor_array
from amct.export.onnx.messages import (
    any_value,
    attribute_value,
    captures,
    constant_node_value,
    copied_node,
    make_attribute,
    model_opset,
    new_node,
    reads,
    stored_bytes,
)
from amct.model import TensorIndex
from amct.model.operators import REDUCING, STORED_ARITHMETIC, STORED_MOVING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt
    from numpy.typing import NDArray

    from amct.export.onnx.kept_weights import KeptWeights

_FOLDS = STORED_MOVING | STORED_ARITHMETIC | REDUCING
"""Operators allowed between a stored value and a weight."""
_LONGEST_FOLD = 64
"""The longest chain of operators between a stored value and a tensor that still counts as constant."""
_LARGEST_FOLD = 2**26
"""The size in bytes up to which a computed constant is always accepted."""
_NEVER = 2**31


class OnnxGraph(TensorIndex[NodeProto]):
    """The main graph of a model, for editing.

    Args:
        model: The model.
        kept: Takes the large arrays that are stored in the graph; None: they are in the messages.
    """

    def __init__(self, model: ModelProto, kept: KeptWeights | None = None) -> None:
        super().__init__()
        self._kept = kept
        self._source = model
        self.nodes: list[NodeProto] = [copied_node(node) for node in model.graph.node]
        self._initializers: dict[str, TensorProto] = {tensor.name: tensor for tensor in model.graph.initializer}
        self.inputs: list[ValueInfoProto] = [
            value for value in model.graph.input if value.name not in self._initializers
        ]
        self._outputs = {value.name for value in model.graph.output}
        self._value_info = {value.name: value for value in model.graph.value_info}
        self._captured: set[str] = set()
        self._by_name: dict[str, NodeProto] = {}
        self._folded: dict[str, NDArray[Any]] = {}
        self._constant_depths: dict[str, int] = {}
        for node in self.nodes:
            self._index(node)

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def opset(self) -> int:
        """The opset version of the standard operators."""
        return model_opset(self._source)

    def node(self, name: str) -> NodeProto:
        """The node with this name.

        Raises:
            ExportError: there is no such node.
        """
        found = self._by_name.get(name)
        if found is None:
            raise ExportError(
                f'the ONNX graph has no node "{name}".{did_you_mean(name, self._by_name)} '
                "Bind the layer to a node of the model that is exported"
            )
        return found

    def is_output(self, tensor: str) -> bool:
        """Whether the tensor is an output of the graph."""
        return tensor in self._outputs

    def is_captured(self, tensor: str) -> bool:
        """Whether the body of an If, Loop or Scan uses the tensor."""
        return tensor in self._captured

    def only_consumer(self, tensor: str) -> NodeProto | None:
        """The only node that reads the tensor; None with other readers, a subgraph reader or a graph output."""
        users = self.consumers(tensor)
        if len(users) != 1 or self.is_output(tensor) or self.is_captured(tensor):
            return None
        return users[0]

    def element_type(self, tensor: str) -> int:
        """The declared ONNX element type of a tensor; FLOAT if it is not declared."""
        if tensor in self._initializers:
            return self._initializers[tensor].data_type
        return next((each.elem_type for each in self._declared(tensor) if each.elem_type), TensorProto.FLOAT)

    def rank(self, tensor: str) -> int | None:
        """The declared number of dimensions of a tensor; None if it is not declared."""
        if tensor in self._initializers:
            return len(self._initializers[tensor].dims)
        return next((len(each.shape.dim) for each in self._declared(tensor) if each.HasField("shape")), None)

    def dimension(self, tensor: str, axis: int) -> int | None:
        """The declared size of one dimension of a tensor; None if it is not declared or not fixed."""
        shapes = (each.shape.dim for each in self._declared(tensor) if each.HasField("shape"))
        dims = next(shapes, ())
        if not -len(dims) <= axis < len(dims) or not dims[axis].HasField("dim_value"):
            return None
        return int(dims[axis].dim_value)

    def _declared(self, tensor: str) -> Iterator[TypeProto.Tensor]:
        """The declarations of a tensor."""
        declared = self._value_info.get(tensor)
        for value in (*self.inputs, *self._source.graph.output) if declared is None else (declared,):
            if value.name == tensor:
                yield value.type.tensor_type

    def constant(self, tensor: str) -> NDArray[Any] | None:
        """The value of a constant tensor: an initializer, a Constant, or one computed from those; else None."""
        if not tensor:
            return None
        if tensor in self._initializers:
            return tensor_array(self._initializers[tensor])
        if tensor not in self._folded:
            value = self._fold(tensor)
            if value is None:
                return None
            self._folded[tensor] = value
        return self._folded[tensor]

    def is_constant(self, tensor: str) -> bool:
        """Whether ``constant`` would return a value; cheaper than computing it."""
        depth = self._constant_depths.get(tensor)
        return (self._find_constant_depth(tensor) if depth is None else depth) <= _LONGEST_FOLD

    def _find_constant_depth(self, tensor: str) -> int:
        """The number of operators between stored values and a tensor; above the limit if it is not constant.

        Iterative, and visits each tensor once, because a file may have chains of any length.
        """
        depths = self._constant_depths
        waiting, entered = [tensor], set()
        while waiting:
            name = waiting[-1]
            own = self._stored_depth(name)
            sources = [] if own is not None else [each for each in self.producers[name].input if each]
            missing = [each for each in sources if each not in depths and each not in entered]
            if missing and name not in entered:
                entered.add(name)
                waiting += missing
                continue
            depths[waiting.pop()] = own if own is not None else 1 + max(depths.get(each, _NEVER) for each in sources)
        return depths[tensor]

    def _stored_depth(self, tensor: str) -> int | None:
        """0 for a stored value, None if the depth follows from the operator's inputs, otherwise above the limit."""
        if tensor in self._initializers:
            return 0
        node = self.producer(tensor)
        if node is not None and node.op_type == "Constant":
            return 0
        foldable = node is not None and node.op_type in _FOLDS and any(node.input)
        return None if foldable else _NEVER

    def is_initializer(self, tensor: str) -> bool:
        """Whether the tensor is stored in the model."""
        return tensor in self._initializers

    def _fold(self, tensor: str) -> NDArray[Any] | None:
        node = self.producer(tensor)
        if node is None:
            return None
        if node.op_type == "Constant":
            return constant_node_value(node)
        if not self.is_constant(tensor):
            return None
        inputs = {name: self.constant(name) for name in node.input if name}
        if any(value is None for value in inputs.values()) or self._is_too_large(node, inputs):
            return None
        alone = copied_node(node)
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(
            helper.make_graph([alone], "constant", [any_value(name) for name in inputs], [any_value(tensor)]),
            opset_imports=opsets,
        )
        try:
            results = ReferenceEvaluator(model).run([tensor], inputs)
        except Exception as error:
            raise ExportError(f'constant "{tensor}" cannot be computed by its {node.op_type}: {error}') from error
        assert isinstance(results, list)  # a dictionary only if no feed is given
        return np.asarray(results[0])

    def _is_too_large(self, node: NodeProto, inputs: Mapping[str, NDArray[Any] | None]) -> bool:
        """Whether a result is far larger than all stored values: a malicious file can double a value repeatedly."""
        sizes = {name: value.nbytes for name, value in inputs.items() if value is not None}
        result = sum(sizes[name] for name in node.input if name)
        if node.op_type == "Gather":
            data, indices = (inputs[name] for name in node.input)
            assert data is not None
            assert indices is not None
            axis = attribute_value(node, "axis", 0)
            result = data.nbytes // max(data.shape[axis] if data.ndim else 1, 1) * indices.size
        elif node.op_type in STORED_ARITHMETIC:
            operands = [value for value in inputs.values() if value is not None]
            result = math.prod(np.broadcast_shapes(*(each.shape for each in operands))) * operands[0].itemsize
        stored = sum(stored_bytes(tensor) for tensor in self._initializers.values())
        return result > max(2 * stored, _LARGEST_FOLD)

    # -- editing ---------------------------------------------------------------------------------------------------

    def set_initializer(self, name: str, value: NDArray[Any], dtype: npt.DTypeLike | None = None) -> str:
        """Store an array under a name, replacing any existing one; returns the name.

        ``dtype`` is the type in the file, if it is another one.
        """
        if self._kept is not None:
            self._initializers[name] = self._kept.tensor(name, np.asarray(value), dtype)
        else:
            self._initializers[name] = numpy_helper.from_array(np.asarray(value, dtype, order="C"), name)
        self._constant_depths.clear()
        self._value_info.pop(name, None)
        return name

    def add_initializer(self, name: str, value: NDArray[Any]) -> str:
        """Store a new array under ``name``, with a number appended if it is taken; returns the name."""
        return self.set_initializer(self.fresh_name(name), value)

    def add_constant(self, name: str, value: NDArray[Any]) -> str:
        """Add a Constant node; returns the name of its output, ``<name>.output0``."""
        return self.add_node("Constant", name, [], value=numpy_helper.from_array(np.asarray(value, order="C"), name))

    def add_node(
        self, op_type: str, name: str, inputs: Sequence[str], outputs: Sequence[str] | None = None, **attributes: object
    ) -> str:
        """Add a node; ``build`` sorts the nodes. Returns its first output, by default ``<name>.output0``.

        Raises:
            ExportError: the name is taken.
        """
        if name in self._by_name:
            raise ExportError(
                f'cannot add {op_type} "{name}": the ONNX graph already has a node of this name; '
                "was the model exported before? Start from the float model"
            )
        results = list(outputs or [self._fresh_tensor(f"{name}.output0")])
        node = new_node(op_type, inputs, results, attributes, name)
        self.nodes.append(node)
        self._index(node)
        self._constant_depths.clear()
        return node.output[0]

    def rename_node(self, node: NodeProto, name: str) -> None:
        """Give a node a new name; another node of that name is renamed."""
        if node.name == name:
            return
        holder = self._by_name.get(name)
        if holder is not None:
            self.rename_node(holder, self.fresh_name(f"{name}_other"))
        self._by_name.pop(node.name, None)
        node.name = name
        self._by_name[name] = node

    def fresh_name(self, name: str) -> str:
        """``name``, with a number appended if a node or tensor already has this name."""
        candidate, number = name, 1
        while candidate in self._by_name or self._is_tensor(candidate):
            candidate, number = f"{name}_{number}", number + 1
        return candidate

    def _fresh_tensor(self, name: str) -> str:
        return self.fresh_name(name) if self._is_tensor(name) else name

    def _is_tensor(self, name: str) -> bool:
        known = name in self.producers or name in self._initializers
        return known or any(value.name == name for value in self.inputs)

    def set_input(self, node: NodeProto, index: int, tensor: str) -> None:
        """Connect one input of a node to another tensor."""
        self._constant_depths.clear()
        while len(node.input) <= index:
            node.input.append("")
        old = node.input[index]
        node.input[index] = tensor
        if old and old not in node.input:
            self.disconnect(old, node)
        if tensor:
            self.connect(tensor, node)

    def set_inputs(self, node: NodeProto, tensors: Sequence[str]) -> None:
        """Replace all inputs of a node."""
        for name in node.input:
            self.disconnect(name, node)
        del node.input[:]
        for index, tensor in enumerate(tensors):
            self.set_input(node, index, tensor)

    def set_attribute(self, node: NodeProto, name: str, value: object) -> None:
        """Set one attribute of a node."""
        self.drop_attribute(node, name)
        node.attribute.append(make_attribute(name, value))

    def drop_attribute(self, node: NodeProto, name: str) -> None:
        """Remove an attribute of a node, if present."""
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        if len(kept) != len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(kept)

    def tap(self, tensor: str, fallback: str) -> tuple[str, str]:
        """Prepare to insert nodes behind a tensor; returns the tensor to read and the tensor to write.

        The readers of ``tensor`` will read the second one. A graph output (or a tensor used inside an If, Loop or Scan)
        keeps its name as the second one: its producer then writes ``<node>_output0`` instead.
        """
        producer = self.producer(tensor)
        assert producer is not None  # layers are bound to nodes
        if self.is_output(tensor) or self.is_captured(tensor):
            hidden = self.fresh_name(f"{producer.name}_output0")
            producer.output[list(producer.output).index(tensor)] = hidden
            self.producers[hidden] = self.producers.pop(tensor)
            self._constant_depths.clear()
            return hidden, tensor
        fallback = self._fresh_tensor(fallback)
        for user in self.consumers(tensor):
            for index, name in enumerate(user.input):
                if name == tensor:
                    self.set_input(user, index, fallback)
        return tensor, fallback

    def forget_type(self, tensor: str) -> None:
        """Remove the declared type of a tensor that an edit changed."""
        self._value_info.pop(tensor, None)

    def remove_node(self, node: NodeProto) -> None:
        """Remove a node; its outputs no longer have a producer."""
        self._constant_depths.clear()
        self.nodes = [other for other in self.nodes if other is not node]
        self._by_name.pop(node.name, None)
        for name in node.input:
            self.disconnect(name, node)
        for name in node.output:
            if self.producers.get(name) is node:
                del self.producers[name]

    def take_output(self, node: NodeProto, successor: NodeProto) -> None:
        """Make a node write the output of its successor, under that name, and remove the successor."""
        old, new = node.output[0], successor.output[0]
        self._constant_depths.clear()
        self.remove_node(successor)
        node.output[0] = new
        self.producers.pop(old, None)
        self.producers[new] = node
        self._value_info.pop(old, None)

    # -- writing ---------------------------------------------------------------------------------------------------

    def build(self) -> ModelProto:
        """Build a model of the edited graph: nodes sorted, unused nodes, initializers and declarations removed."""
        model = ModelProto()
        graph = model.graph
        copy_fields(self._source, model, skip={"graph"})
        copy_fields(self._source.graph, graph, skip={"node", "initializer", "input", "value_info"})
        graph.input.extend(self.inputs)
        nodes = self.live_nodes()
        graph.node.extend(nodes)
        used = {name for node in nodes for name in reads(node)} | self._outputs
        graph.initializer.extend(tensor for name, tensor in self._initializers.items() if name in used)
        written = {name for node in nodes for name in node.output}
        graph.value_info.extend(value for name, value in self._value_info.items() if name in written)
        return model

    def live_nodes(self) -> list[NodeProto]:
        """Nodes in topological order, without those that no output depends on."""
        alive: set[int] = set()
        pending = [self.producers[name] for name in self._outputs if name in self.producers]
        while pending:
            node = pending.pop()
            if id(node) in alive:
                continue
            alive.add(id(node))
            pending.extend(self.producers[name] for name in reads(node) if name in self.producers)
        return [node for node in self._sorted_nodes() if id(node) in alive]

    def _sorted_nodes(self) -> Iterator[NodeProto]:
        done: set[int] = set()
        for root in self.nodes:
            stack = [(root, False)]
            while stack:
                node, expanded = stack.pop()
                if id(node) in done:
                    continue
                if expanded:
                    done.add(id(node))
                    yield node
                    continue
                stack.append((node, True))
                needed = (self.producers[name] for name in reversed(reads(node)) if name in self.producers)
                stack.extend((producer, False) for producer in needed if id(producer) not in done)

    def _index(self, node: NodeProto) -> None:
        if not node.name:
            node.name = self.fresh_name(f"{node.op_type}_{node.output[0]}")
        self._by_name.setdefault(node.name, node)
        self.add(node, filter(None, node.input), filter(None, node.output))
        self._captured.update(captures(node))
