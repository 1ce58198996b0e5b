"""Puts the written nodes together to a model: final names, declared types and shapes, only what outputs depend on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from amct.errors import ExportError
from amct.export.onnx.messages import fresh_name
from amct.pytorch.inputs import check_chosen_names
from amct.pytorch.onnx.lowering.writer import ONNX_TYPES, Size, expression, is_static
from amct.pytorch.user_model import as_array

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from amct.pytorch.inputs import IoNames
    from amct.pytorch.onnx.lowering.writer import Value, Writer

_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True, eq=False)
class Lowered:
    """A lowered program.

    Attributes:
        model: The model; its nodes have the modules that they belong to in their metadata, and large parameters have
            no values yet.
        tensors: The name in the model of each tensor of the program that exists in it.
    """

    model: ModelProto
    tensors: Mapping[str, str]


@dataclass(eq=False)
class Assembly:
    """Makes the model of a writer's nodes; arguments are what a lowering has noted."""

    writer: Writer
    inputs: Sequence[Value]
    results: dict[str, str]
    parameters: Mapping[str, tuple[str, Tensor, bool]]
    _final: dict[str, str] = field(default_factory=dict)
    _labels: dict[str, str] = field(default_factory=dict)

    def finish(self, made: Sequence[tuple[Value, str]], names: IoNames, values: Mapping[str, Value]) -> Lowered:
        """Build the model; ``made`` are its outputs with their operations, ``values`` the tensors of the program."""
        outputs = self._own_outputs(made)
        self._drop_unused(outputs)
        self._choose_names(outputs, names)
        self._labels = self._labels_of(names)
        own = {value.name for value in outputs}
        nodes = self.writer.nodes
        between = [self.writer.declared[name] for node in nodes for name in node.output if name not in own]
        stored = self._initializers()
        self._name_nodes()
        self.writer.rename(self._final)
        inputs, results, inner = (map(self._declaration, values) for values in (self.inputs, outputs, between))
        model = self.writer.model("main_graph", inputs, results, stored, inner)
        graph = model.graph
        for name, axes in names.axes.items():
            _label_output(graph, name, axes, names.outputs)
        existing = {name for node in graph.node for name in node.output} | {value.name for value in graph.input}
        tensors = {origin: self._final.get(value.name, "") for origin, value in values.items()}
        return Lowered(model=model, tensors={origin: name for origin, name in tensors.items() if name in existing})

    # -- outputs ---------------------------------------------------------------------------------------------------

    def _own_outputs(self, outputs: Sequence[tuple[Value, str]]) -> list[Value]:
        """Give every output its own tensor, distinct from inputs, parameters and other outputs."""
        seen = {value.name for value in self.inputs} | set(self.parameters) | {""}
        own: list[Value] = []
        for value, operation in outputs:
            if value.name in seen:
                self.writer.enter((), None)
                value = self.writer.add("Identity", value, dtype=value.dtype, shape=value.shape)
            own.append(value)
            seen.add(value.name)
            self.results[value.name] = operation
        return own

    def _drop_unused(self, outputs: Sequence[Value]) -> None:
        needed = {value.name for value in outputs}
        kept = []
        for node in reversed(self.writer.nodes):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(node.input)
        self.writer.nodes = kept[::-1]

    # -- names -----------------------------------------------------------------------------------------------------

    def _choose_names(self, outputs: Sequence[Value], names: IoNames) -> None:
        stored = {name for name, _, _ in self.parameters.values()}
        check_chosen_names(names, len(outputs), stored)
        self._final = {temporary: name for temporary, (name, _, _) in self.parameters.items()}
        self._final.update({value.name: name for value, name in zip(self.inputs, names.inputs, strict=True)})
        self._final.update({value.name: name for value, name in zip(outputs, names.outputs, strict=False)})
        taken = stored.union(self._final.values())
        for temporary, operation in self.results.items():
            if temporary not in self._final:
                self._final[temporary] = fresh_name(operation, taken)
        for temporary in [name for node in self.writer.nodes for name in node.output]:
            if temporary not in self._final:
                self._final[temporary] = fresh_name(f"val_{len(self._final)}", taken)
        for temporary in self.writer.initializers:
            self._final[temporary] = fresh_name(f"constant_{temporary.removeprefix('%c')}", taken)

    def _labels_of(self, names: IoNames) -> dict[str, str]:
        """The labels of the dynamic axes by the symbols of their sizes."""
        found = {}
        for name, value in zip(names.inputs, self.inputs, strict=True):
            for axis, label in names.axes.get(name, {}).items():
                found[str(expression(value.shape[axis]))] = label
        return found

    # -- the graph -------------------------------------------------------------------------------------------------

    def _name_nodes(self) -> None:
        """Name each node after its result, or number it."""
        taken: set[str] = set()
        for node in self.writer.nodes:
            result = node.output[0]
            wanted = f"node_{self._final[result]}" if result in self.results else f"node_{node.op_type}_{len(taken)}"
            node.name = fresh_name(wanted, taken)

    def _initializers(self) -> list[TensorProto]:
        """Parameters and constants that nodes read."""
        used = {name for node in self.writer.nodes for name in node.input}
        found = [
            _without_values(name, tensor) if later else numpy_helper.from_array(as_array(tensor), name)
            for temporary, (name, tensor, later) in self.parameters.items()
            if temporary in used
        ]
        return [*found, *(tensor for name, tensor in self.writer.initializers.items() if name in used)]

    def _declaration(self, value: Value) -> ValueInfoProto:
        sizes = [self._size(size) for size in value.shape]
        return helper.make_tensor_value_info(self._final[value.name], ONNX_TYPES[value.dtype], sizes)

    def _size(self, size: Size) -> int | str:
        """``s77`` becomes ``batch``, ``2*s77`` becomes ``2*batch``."""
        if is_static(size):
            return int(size)
        return _WORD.sub(lambda match: self._labels.get(match[0], match[0]), str(expression(size)))


def _label_output(graph: GraphProto, name: str, axes: Mapping[int, str], outputs: Sequence[str]) -> None:
    if name not in outputs:
        return
    dims = graph.output[list(outputs).index(name)].type.tensor_type.shape.dim
    for axis, label in axes.items():
        if axis >= len(dims):
            raise ExportError(f'dynamic_axes["{name}"]: axis {axis} does not exist, it has {len(dims)} axes')
        dims[axis].dim_param = label


def _without_values(name: str, tensor: Tensor) -> TensorProto:
    proto = TensorProto(name=name, data_type=ONNX_TYPES[tensor.dtype], dims=list(tensor.shape))
    proto.data_location = TensorProto.EXTERNAL
    return proto
