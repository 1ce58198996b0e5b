"""A captured network as regions that are run one after the other, each alone: residual blocks, else single layers.

A region ends where a single tensor leads on, so that what it computes depends on what it reads only. Neighbours of one
module with few layers are joined (the three convolutions of an inverted bottleneck without a sum), a region with many
layers is divided again. The program is that of the user's model; folded batch norms pass their input on, and the values
of parameters are those of a model that is given (the folded one, or one with rounded weights).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from amct.errors import ModelError
from amct.pytorch.capture.functional_layers import layer_module, layer_name, named_tensors
from amct.pytorch.capture.layer_types import layer_type
from amct.pytorch.capture.program import plain_name
from amct.pytorch.onnx.lowering.program import Memory, without_mutation
from amct.pytorch.onnx.lowering.writer import NotLoweredError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.export import ExportedProgram

    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.folding import Fused
    from amct.pytorch.layer_hooks import Arguments

Values = dict[fx.Node, Any]
"""Tensors by the node that makes them."""

MOST_JOINED, MOST_LAYERS = 4, 12
_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


@dataclass(frozen=True, eq=False)
class Step:
    """One operation of the program.

    Attributes:
        node: Its node.
        target: What computes it; of an operation in place, the one that returns a new tensor.
        reads: By node among its arguments: the node that has its value by now, if that was written to.
        layer: The quantized layer that it computes; "" for all else.
        reads_weight: Whether its arguments are an input, the layer's own weight, and a bias or None.
        is_folded: Whether it is a batch norm that is folded, which passes its input on.
        module: The path of the module that called it.
    """

    node: fx.Node
    target: Callable[..., Any]
    reads: Mapping[fx.Node, fx.Node]
    layer: str = ""
    reads_weight: bool = False
    is_folded: bool = False
    module: str = ""

    @property
    def given(self) -> list[fx.Node]:
        """The nodes whose values it reads."""
        read = self.node.all_input_nodes[:1] if self.is_folded else self.node.all_input_nodes
        return [self.reads.get(each, each) for each in read]


@dataclass(frozen=True, eq=False)
class Region:
    """Neighbouring operations.

    Attributes:
        steps: Them, in order.
        inputs: The tensors that they read and others made.
        outputs: The tensors that they make and others read, or that the model returns.
        shared: The inputs that other regions read, too.
    """

    steps: Sequence[Step]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    shared: Collection[fx.Node] = ()

    @property
    def layers(self) -> list[str]:
        """The quantized layers."""
        return [step.layer for step in self.steps if step.layer]

    @property
    def name(self) -> str:
        """Its layers, for people."""
        names = self.layers or [self.steps[0].node.name]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


@dataclass(frozen=True, eq=False)
class Constants:
    """What a program does not compute of its inputs.

    Attributes:
        values: Parameters, buffers, and what is computed of them alone.
        biases: By layer: its bias, which it may have got when a batch norm was folded into it.
    """

    values: Values
    biases: Mapping[str, Tensor | None]


LayerCall = Callable[[Step, Callable[..., Tensor], Tensor], Tensor]
"""Called with a step that computes a layer, its operation and its input, in place of the operation.

The operation takes an input and, if the step reads its own weight, also a weight and a bias.
"""


class RegionProgram:
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
        self._constants: list[Step] = []
        self.steps: list[Step] = []
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

    def _step(self, node: fx.Node, memory: Memory) -> Step:
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
        return Step(node, target, reads, layer, bool(own), is_folded, paths[-1] if paths else "")

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

    def regions(self) -> list[Region]:
        """The regions, in the order in which they are run; those that follow the last layer are part of the last."""
        last = {node: place for place, step in enumerate(self.steps) for node in step.given}
        last |= dict.fromkeys(self.outputs, len(self.steps))
        parts: list[list[Step]] = [[]]
        alive = set(self.inputs)
        for place, step in enumerate(self.steps):
            parts[-1].append(step)
            alive.add(step.node)
            alive = {node for node in alive if last.get(node, -1) > place}
            if len(alive) == 1 and all(isinstance(node.meta["val"], Tensor) for node in alive):
                parts.append([])
        divided = [piece for part in _joined(parts) for piece in _divided(part)]
        return [self._region(part) for part in divided]

    def between(self, chosen: Sequence[Collection[Step]]) -> list[tuple[Region, int | None]]:
        """Regions for chosen steps and all that lies between them, in an order in which they can be run.

        Args:
            chosen: For each wanted region its steps, none of which reads a step behind its first one but its own.

        Returns:
            The regions, each with its number among the chosen ones; None: it lies between.
        """
        owner = {step.node: number for number, steps in enumerate(chosen) for step in steps}
        parts: list[tuple[list[Step], int | None]] = []
        begun: dict[int, list[Step]] = {}
        for step in self.steps:
            number = owner.get(step.node)
            if number is None:
                if not parts or parts[-1][1] is not None:
                    parts.append(([], None))
                parts[-1][0].append(step)
            elif number in begun:
                begun[number].append(step)
            else:
                begun[number] = [step]
                parts.append((begun[number], number))
        return [(self._region(steps), number) for steps, number in parts]

    def _region(self, steps: list[Step]) -> Region:
        made = {step.node for step in steps}
        changing = {*self.inputs, *(step.node for step in self.steps)}
        read = dict.fromkeys(node for step in steps for node in step.given)
        inputs = [node for node in read if node in changing and node not in made]
        others = {node for step in self.steps if step.node not in made for node in step.given} | {*self.outputs}
        return Region(
            steps=steps,
            inputs=inputs,
            outputs=[step.node for step in steps if step.node in others],
            shared=others.intersection(inputs),
        )

    def is_by_sample(self, region: Region) -> bool:
        """Whether the first axis of all that a region reads and makes is that of the samples, of any number."""
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

        def as_it_is(step: Step, operation: Callable[..., Tensor], x: Tensor) -> Tensor:
            if not step.reads_weight:
                return operation(x)
            weight: Any = step.node.args[1]
            return operation(x, constants.values[weight], constants.biases[step.layer])

        values = {**constants.values, **given}
        sizes = self._sizes | _sizes_of(given)
        for step in region.steps:
            values[step.node] = self._run(step, values, sizes, call or as_it_is)
        return [values[node] for node in region.outputs]

    def _run(self, step: Step, values: Values, sizes: Mapping[Any, int], call: LayerCall) -> Any:  # noqa: ANN401  any result
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


def _plain(step: Step, operation: Callable[..., Tensor], x: Tensor) -> Tensor:
    del step
    return operation(x)


def _name(target: torch._ops.OpOverload) -> str:
    """The name of an operation, that of ``relu_`` without its end."""
    return str(target._schema.name).rpartition("::")[2].rstrip("_")


def _tensors(value: object) -> bool:
    """Whether a value of the program is a tensor, or several."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(each, Tensor) for each in leaves)


def _count(part: Sequence[Step]) -> int:
    return sum(1 for step in part if step.layer)


def _parent(part: Sequence[Step]) -> str:
    """The module that calls the layers of a part; its only layer's own parent."""
    paths = [step.module.split(".")[:-1] for step in part if step.layer]
    same = [each[0] for each in zip(*paths, strict=False) if len(set(each)) == 1]
    return ".".join(same)


def _joined(parts: list[list[Step]]) -> list[list[Step]]:
    """Join each part without layers with a neighbour, and neighbours of one module that have few layers.

    What keeps the number of values, such as an activation, belongs to the part before, a pooling to the one behind.
    """
    found: list[list[Step]] = []
    waiting: list[Step] = []
    for part in filter(None, parts):
        if not _count(part) and found and not waiting and _values(part) == _values(found[-1]):
            found[-1] += part
        elif not _count(part):
            waiting += part
        else:
            found.append([*waiting, *part])
            waiting = []
            if len(found) > 1 and _belong_together(*found[-2:]):
                found[-2:] = [found[-2] + found[-1]]
    if waiting:
        found[-1:] = [[*(found[-1] if found else []), *waiting]]
    return found


def _belong_together(first: list[Step], second: list[Step]) -> bool:
    parent = _parent(first)
    return parent != "" and parent == _parent(second) and _count(first) + _count(second) <= MOST_JOINED


def _values(part: Sequence[Step]) -> object:
    """The number of values that a part makes of each sample."""
    made = part[-1].node.meta["val"]
    return made.shape[1:].numel() if isinstance(made, Tensor) else None


def _divided(part: list[Step]) -> list[list[Step]]:
    """Divide a part with many layers in front of each of them."""
    if _count(part) <= MOST_LAYERS:
        return [part]
    found: list[list[Step]] = [[]]
    for step in part:
        if step.layer and _count(found[-1]):
            found.append([])
        found[-1].append(step)
    return found
