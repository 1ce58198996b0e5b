"""The program of a captured model in steps, which are put into regions (see ``amct.pipeline.blocks.regions``).

The program is that of the user's model; folded batch norms pass their input on, and the values of parameters are those
of a model that is given (the folded one, or one with rounded weights).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from amct.errors import ModelError
from amct.pipeline.blocks.regions import Constants, Program, Step
from amct.pytorch.capture.functional_layers import layer_module, layer_name, named_tensors
from amct.pytorch.capture.layer_types import layer_type
from amct.pytorch.capture.program import plain_name
from amct.pytorch.onnx.lowering.program import Memory, without_mutation
from amct.pytorch.onnx.lowering.writer import NotLoweredError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.export import ExportedProgram

    from amct.pipeline.blocks.regions import LayerCall, Region, Values
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.folding import Fused
    from amct.pytorch.layer_hooks import Arguments

_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


@dataclass(frozen=True, eq=False, kw_only=True)
class NodeStep(Step):
    """One operation of the program; tensors are named by the nodes that make them.

    Attributes:
        node: Its node.
        target: What computes it; of an operation in place, the one that returns a new tensor.
        reads: By node among its arguments: the node that has its value by now, if that was written to.
        is_folded: Whether it is a batch norm that is folded, which passes its input on.
    """

    node: fx.Node
    target: Callable[..., Any]
    reads: Mapping[fx.Node, fx.Node]
    is_folded: bool = False


class RegionProgram(Program):
    """The program of a captured model in steps.

    Args:
        traced: The model.
        fused: Its folded copy.
        layers: The quantized layers, and the batch norms to be called.

    Raises:
        ModelError: It has no program, or one that cannot be divided.
    """

    def __init__(self, traced: Traced, fused: Fused, layers: Iterable[str]) -> None:
        if traced.program is None:
            raise ModelError(f"the model cannot be captured as a program: {traced.failure}")
        self._program: ExportedProgram = traced.program
        types = {**traced.module_types, **{name: facts.type for name, facts in traced.layers.items()}}
        self._layers = {name: types[name] for name in layers}
        self._folded = {
            norm for norm in fused.fusions.values() if isinstance(layer_module(fused.model, norm), nn.Identity)
        }
        self._parameters = self._stored_names()
        graph = traced.program.graph
        self.inputs = [each for each in graph.find_nodes(op="placeholder") if each.name not in self._parameters]
        self._constants: list[NodeStep] = []
        self.steps: list[NodeStep] = []
        self._read()
        (output,) = graph.find_nodes(op="output")
        self.outputs = [self._latest.get(each, each) for each in output.all_input_nodes]
        first = next((each.meta["val"] for each in self.inputs if isinstance(each.meta["val"], Tensor)), None)
        size = first.shape[0] if first is not None and first.ndim else 0
        self._symbol = size.node.expr if isinstance(size, torch.SymInt) else None
        self._sizes = self._fixed_sizes(traced)

    def _fixed_sizes(self, traced: Traced) -> dict[Any, int]:
        """The sizes of the example by torch's symbols of them, but that of the batch."""
        tensors = [each for each in self.inputs if isinstance(each.meta["val"], Tensor)]
        found = _sizes_of(dict(zip(tensors, traced.inputs.tensors(), strict=False)))
        return {symbol: size for symbol, size in found.items() if symbol != self._symbol}

    # -- reading -------------------------------------------------------------------------------------------------------

    def _stored_names(self) -> dict[str, str]:
        """By name of a placeholder: the name of its parameter or buffer in the program."""
        specs = self._program.graph_signature.input_specs
        return {spec.arg.name: str(spec.target) for spec in specs if spec.kind is not InputKind.USER_INPUT}

    def _read(self) -> None:
        graph = self._program.graph
        self._latest: dict[fx.Node, fx.Node] = {}
        changing, memory = set(self.inputs), Memory(graph)
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                memory.add_stored(node)
            if node.op != "call_function":
                continue
            if any(each in changing for each in node.all_input_nodes):
                changing.add(node)  # a size of a tensor, too
            if not _tensors(node.meta.get("val")):
                continue
            step = self._step(node, memory)
            (self.steps if node in changing else self._constants).append(step)

    def _step(self, node: fx.Node, memory: Memory) -> NodeStep:
        reads = {each: self._latest[each] for each in node.all_input_nodes if each in self._latest}
        target: Any = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            found = without_mutation(target)
            written: Any = node.args[0]
            try:
                if found is None:
                    raise NotLoweredError(f"{target} has no form that returns a new tensor")
                self._latest.update(dict.fromkeys(memory.write(node, written), node))
            except NotLoweredError as error:
                raise ModelError(f"the program cannot be divided: {error}") from error
            target = found
        elif target in _SAME:
            memory.add_same(node, node.all_input_nodes[0])
        else:
            memory.add_result(node)
        stack = node.meta.get("nn_module_stack") or {}
        paths = [layer_name(path) for path, _ in stack.values()]
        layer = next((path for path in paths if path in self._layers and self._computes(node, path)), "")
        is_folded = bool(self._folded.intersection(paths)) and "batch_norm" in str(node.target)
        own = layer and len(node.args) > 1 and self._parameter(node.args[1]) == f"{layer}.weight"
        read = node.all_input_nodes[:1] if is_folded else node.all_input_nodes
        value = node.meta["val"]
        return NodeStep(
            given=[reads.get(each, each) for each in read],
            made=[node],
            layer=layer,
            reads_weight=bool(own),
            is_layer=bool(layer),
            module=paths[-1] if paths else "",
            size=value.shape[1:].numel() if isinstance(value, Tensor) else None,
            node=node,
            target=target,
            reads=reads,
            is_folded=is_folded,
        )

    def _computes(self, node: fx.Node, layer: str) -> bool:
        """Whether a node is the operation of a layer, not one that pads its input or the like."""
        entry = layer_type(self._layers[layer])
        operation = "batch_norm" if entry is None else entry.operation
        target = node.target
        return isinstance(target, torch._ops.OpOverload) and _name(target) == operation

    def _parameter(self, node: object) -> str:
        name = self._parameters.get(node.name, "") if isinstance(node, fx.Node) else ""
        return layer_name(plain_name(name))

    # -- regions -------------------------------------------------------------------------------------------------------

    def is_tensor(self, key: fx.Node) -> bool:
        """Whether a node makes one tensor."""
        return isinstance(key.meta["val"], Tensor)

    def is_by_sample(self, region: Region, constants: Constants, given: Values) -> bool:
        """Whether the first axis of all that a region reads and makes is that of the samples, of any number."""
        del constants, given
        tensors = [node.meta["val"] for node in (*region.inputs, *region.outputs)]
        return self._symbol is not None and all(
            isinstance(each, Tensor)
            and each.ndim > 0
            and isinstance(each.shape[0], torch.SymInt)
            and each.shape[0].node.expr == self._symbol
            for each in tensors
        )

    # -- running -------------------------------------------------------------------------------------------------------

    def constants(self, model: nn.Module) -> Constants:
        """Parameters and buffers of a model that has the program's modules, such as the folded one."""
        stored = named_tensors(model)
        values: Values = {}
        for node in self._program.graph.nodes:
            if node.op == "get_attr":
                values[node] = getattr(self._program.graph_module, str(node.target))
            elif node.name in self._parameters:
                target = self._parameters[node.name]
                own = self._program.state_dict.get(target, self._program.constants.get(target))
                found = stored.get(layer_name(plain_name(target)), own)
                values[node] = found.detach() if isinstance(found, Tensor) else found
        with torch.no_grad():
            for step in self._constants:
                values[step.node] = self._run(step, values, self._sizes, _plain)
        biases = {
            step.layer: getattr(layer_module(model, step.layer), "bias", None) for step in self.steps if step.layer
        }
        own = {name: bias.detach() if isinstance(bias, Tensor) else None for name, bias in biases.items()}
        return Constants(values, own)

    def given(self, arguments: Arguments) -> Values:
        """The inputs of the program by node."""
        return dict(zip(self.inputs, pytree.tree_leaves(arguments), strict=True))

    def run(self, region: Region, constants: Constants, given: Values, call: LayerCall | None = None) -> list[Any]:
        """What a region computes of its inputs; ``call`` computes the quantized layers, without it they are float."""

        def as_it_is(step: NodeStep, operation: Callable[..., Tensor], x: Tensor) -> Tensor:
            if not step.reads_weight:
                return operation(x)
            weight: Any = step.node.args[1]
            return operation(x, constants.values[weight], constants.biases[step.layer])

        values = {**constants.values, **given}
        sizes = self._sizes | _sizes_of(given)
        for step in region.steps:
            values[step.node] = self._run(step, values, sizes, call or as_it_is)
        return [values[node] for node in region.outputs]

    def _run(self, step: NodeStep, values: Values, sizes: Mapping[Any, int], call: LayerCall) -> Any:  # noqa: ANN401  any result
        def look_up(node: fx.Node) -> Any:  # noqa: ANN401  any value
            node = step.reads.get(node, node)
            return values[node] if node in values else _number(node.meta["val"], sizes)

        args: Any = fx.map_arg(step.node.args[:1] if step.is_folded else step.node.args, look_up)
        if step.is_folded:
            return args[0]
        kwargs: Any = fx.map_arg(step.node.kwargs, look_up)
        if not step.layer:
            return step.target(*args, **kwargs)

        def operation(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
            own = (x, *args[1:]) if weight is None else (x, weight, bias, *args[3:])
            result: Tensor = step.target(*own, **kwargs)
            return result

        return call(step, operation, args[0])


def _sizes_of(given: Values) -> dict[Any, int]:
    """The sizes that torch's symbols stand for, as given tensors have them."""
    pairs = (
        (symbol, size)
        for node, tensor in given.items()
        if isinstance(tensor, Tensor)
        for symbol, size in zip(node.meta["val"].shape, tensor.shape, strict=True)
    )
    return {symbol.node.expr: size for symbol, size in pairs if isinstance(symbol, torch.SymInt)}


def _number(value: Any, sizes: Mapping[Any, int]) -> Any:  # noqa: ANN401  a number, or torch's symbol of one
    """What an argument that is no tensor is.

    Raises:
        RuntimeError: It depends on a size that no tensor here has.
    """
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    expression = value.node.expr
    unknown = expression.free_symbols.difference(sizes)
    if unknown:
        raise RuntimeError(f"the size {unknown.pop()} is not that of a tensor which is read here")
    found = expression.subs(sizes)
    return int(found) if isinstance(value, torch.SymInt) else type(value.node.hint)(found)


def _plain(step: NodeStep, operation: Callable[..., Tensor], x: Tensor) -> Tensor:
    del step
    return operation(x)


def _name(target: torch._ops.OpOverload) -> str:
    """The name of an operation, that of ``relu_`` without its end."""
    return str(target._schema.name).rpartition("::")[2].rstrip("_")


def _tensors(value: object) -> bool:
    """Whether a value of the program is a tensor, or several."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(each, Tensor) for each in leaves)
