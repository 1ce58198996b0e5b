"""Lowers a captured program to ONNX: every operation by its rule, constants computed by torch itself.

A program is lowered as a whole or not at all: ``NotLoweredError`` names the first operation without a rule.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from amct.pytorch.capture.functional_layers import layer_name
from amct.pytorch.capture.program import plain_name
from amct.pytorch.onnx.lowering.assembly import Assembly, Lowered
from amct.pytorch.onnx.lowering.rules import RULES
from amct.pytorch.onnx.lowering.writer import ONNX_TYPES, NotLoweredError, Value, Writer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._ops import OpOverload
    from torch.export import ExportedProgram

    from amct.pytorch.inputs import IoNames


LARGEST_CONSTANT = 4096
"""Parameters and buffers with more values are weights; smaller ones may be indices or shapes to compute with."""

LARGEST_FOLD = 2**18
"""Computed constants with more values are left to the graph."""

_RANDOM_OR_EMPTY = ("empty", "rand", "bernoulli", "multinomial", "normal", "dropout")


def lower(program: ExportedProgram, names: IoNames, stored: Mapping[str, Tensor], opset: int) -> Lowered:
    """Lower a program.

    Args:
        program: The program, as torch.export captured it.
        names: The names of inputs and outputs, and the labels of dynamic axes.
        stored: Parameters and buffers by their names in the model, in place of the program's own; large ones get their
            values later, in the finished model.
        opset: 18 to 21.

    Raises:
        NotLoweredError: an operation or an argument has no rule.
        ExportError: a name is taken by a parameter, or there are more names than outputs.
    """
    lowering = _Lowering(program, stored, opset)
    with torch.no_grad():
        lowering.run()
    assembly = Assembly(lowering.writer, lowering.inputs, lowering.results, lowering.parameters)
    return assembly.finish(list(zip(lowering.outputs, lowering.output_names, strict=True)), names, lowering.values)


class _Lowering:
    def __init__(self, program: ExportedProgram, stored: Mapping[str, Tensor], opset: int) -> None:
        self._program = program
        self._stored = stored
        self._memory = Memory(program.graph)
        self._current: dict[fx.Node, Any] = {}
        self.writer = Writer(opset)
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.output_names: list[str] = []
        self.parameters: dict[str, tuple[str, Tensor, bool]] = {}
        """By temporary name: the name in the model, the values, and whether these are stored later."""
        self.results: dict[str, str] = {}
        """The operation whose result a tensor is, by the tensor's temporary name."""
        self.values: dict[str, Value] = {}
        """The tensor of each operation when it is computed; later writes are other tensors."""

    def run(self) -> None:
        """Lower all operations."""
        self._placeholders()
        used = _used(self._program.graph)
        for node in self._program.graph.nodes:
            if node.op == "call_function" and node in used:
                self._call(node)
            elif node.op == "get_attr" and node in used:
                self._attribute(node)
            elif node.op not in ("call_function", "get_attr", "placeholder", "output"):
                raise NotLoweredError(f"a node of the kind {node.op}")
        self._note_outputs()

    # -- what is given ---------------------------------------------------------------------------------------------

    def _placeholders(self) -> None:
        specs = {getattr(spec.arg, "name", None): spec for spec in self._program.graph_signature.input_specs}
        for node in self._program.graph.find_nodes(op="placeholder"):
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                self._input(node, spec)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                self._current[node] = self._parameter(str(spec.target))
            else:
                raise NotLoweredError(f"an input of the kind {spec.kind.name}")
            self._memory.add_stored(node)

    def _input(self, node: fx.Node, spec: Any) -> None:  # noqa: ANN401  torch.export's InputSpec
        if not isinstance(spec.arg, TensorArgument):
            self._current[node] = getattr(spec.arg, "value", None)
            if not isinstance(self._current[node], (int, float, bool, str, type(None))):
                raise NotLoweredError("an input that is no tensor")
            return
        fake = node.meta["val"]
        _check_type(fake)
        value = Value(f"%i{len(self.inputs)}", fake.dtype, tuple(fake.shape))
        self.inputs.append(value)
        self.values[node.name] = value
        self._current[node] = value
        self.writer.sizes.add_input(value)

    def _parameter(self, target: str) -> Value:
        name = layer_name(plain_name(target))
        own = self._program.state_dict.get(target, self._program.constants.get(target))
        tensor = self._stored.get(name, own)
        if not isinstance(tensor, Tensor):
            raise NotLoweredError(f"{target} is no tensor")
        tensor = tensor.detach()
        _check_type(tensor)
        few = tensor.numel() <= LARGEST_CONSTANT
        self.parameters[f"%p{name}"] = (name, tensor, name in self._stored and not few)
        return Value(f"%p{name}", tensor.dtype, tuple(tensor.shape), tensor.cpu() if few else None, tensor)

    def _attribute(self, node: fx.Node) -> None:
        tensor = getattr(self._program.graph_module, str(node.target), None)
        if not isinstance(tensor, Tensor) or tensor.numel() > LARGEST_FOLD:
            raise NotLoweredError(f"the attribute {node.target}")
        self._current[node] = self.writer.constant(tensor.detach().cpu())
        self._memory.add_stored(node)

    def _note_outputs(self) -> None:
        (output,) = self._program.graph.find_nodes(op="output")
        for spec, result in zip(self._program.graph_signature.output_specs, output.args[0], strict=True):
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise NotLoweredError("the program writes to its inputs")
            value = self._current[result] if isinstance(result, fx.Node) else None
            if not isinstance(value, Value):
                raise NotLoweredError("an output that is no tensor")
            self.outputs.append(value)
            self.output_names.append(result.name)

    # -- operations ------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            self._item(node)
            return
        value = node.meta.get("val")
        if isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
            self._current[node] = value
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise NotLoweredError(f"{target} has no rule")
        for each in value if isinstance(value, (list, tuple)) else [value]:
            _check_type(each)
        if target._schema.is_mutable:
            self._write(node, target)
        else:
            self._current[node] = self._lowered(node, target)
            if target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
                self._memory.add_same(node, node.args[0])  # type: ignore[arg-type]
            else:
                self._memory.add_result(node)

    def _write(self, node: fx.Node, target: OpOverload) -> None:
        functional = without_mutation(target)
        if functional is None:
            raise NotLoweredError(f"{target} has no rule")
        written = node.args[0]
        assert isinstance(written, fx.Node)
        if self._write_constant(node, target, written):
            return
        new = self._lowered(node, functional)
        assert isinstance(new, Value)
        if new is self._current[written]:  # dropout_ and detach_ write nothing
            self._memory.add_same(node, written)
            self._current[node] = new
            return
        for each in self._memory.write(node, written):
            self._current[each] = new

    def _write_constant(self, node: fx.Node, target: OpOverload, written: fx.Node) -> bool:
        """Let torch write to a constant of the program; views of it are views of the same memory here too."""
        arguments, _ = self._arguments(node, target)
        if self._memory.is_outside(written) or not _all_constant(list(arguments.values())):
            return False
        _called(target, arguments)
        self._memory.add_same(node, written)
        self._current[node] = self._current[written]
        return True

    def _lowered(self, node: fx.Node, target: OpOverload) -> Any:  # noqa: ANN401  a tensor, or a list of tensors
        arguments, defaults = self._arguments(node, target)
        folded = _folded(target, node, arguments)
        if folded is not None:
            return folded
        writer = self.writer
        stack = node.meta.get("nn_module_stack") or {}
        scopes = (*(path for path, _ in stack.values()), node.name)
        writer.enter(scopes, node.meta["val"])
        known = writer.count
        result = RULES.apply(writer, target._schema.name, arguments, defaults)
        if isinstance(result, Value):
            self._name(result, node.name, known)
            self.values[node.name] = result
        return result

    def _item(self, node: fx.Node) -> None:
        """One of several results; rules leave out those at the end that hardly anyone uses."""
        of, place = node.args
        results = self._current.get(of)  # type: ignore[arg-type]
        if not isinstance(results, list) or place >= len(results):  # type: ignore[operator]
            raise NotLoweredError(f"the result {place} of {of}")
        value = results[place]  # type: ignore[index]
        self._name(value, node.name, 0)
        self.values[node.name] = value
        self._current[node] = value
        self._memory.add_result(node)

    def _name(self, value: Value, name: str, since: int) -> None:
        """Give a tensor the name of an operation whose result it is, unless it is an older tensor passed through."""
        number = value.name.removeprefix("%")
        if value.name not in self.results and number.isdigit() and int(number) > since:
            self.results[value.name] = name

    def _arguments(self, node: fx.Node, target: OpOverload) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments of an operation by name, and their defaults."""
        arguments: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        for place, argument in enumerate(target._schema.arguments):
            name = "x" if argument.name in ("self", "input") else argument.name
            defaults[name] = argument.default_value if argument.has_default_value() else None
            if place < len(node.args):
                arguments[name] = self._given(node.args[place])
            elif argument.name in node.kwargs:
                arguments[name] = self._given(node.kwargs[argument.name])
            else:
                arguments[name] = defaults[name]
        return arguments, defaults

    def _given(self, argument: Any) -> Any:  # noqa: ANN401  an argument of the program
        if isinstance(argument, (list, tuple)):
            return [self._given(each) for each in argument]
        if isinstance(argument, fx.Node):
            argument = self._current.get(argument)
            if isinstance(argument, (torch.SymFloat, torch.SymBool)) or argument is None:
                raise NotLoweredError("an argument that is computed from sizes")
        return argument


def _used(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that outputs depend on, and those that write to a tensor."""
    used: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if node.op == "output" or writes or node in used:
            used.add(node)
            used.update(node.all_input_nodes)
    return used


def _check_type(value: object) -> None:
    if isinstance(value, Tensor) and value.dtype not in ONNX_TYPES:
        raise NotLoweredError(f"the type {value.dtype}")
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        raise NotLoweredError(f"the layout {value.layout}")


def _folded(target: OpOverload, node: fx.Node, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401  values or None
    """The result of an operation on constants, computed by torch; None if it is not constant or too large."""
    results = node.meta["val"]
    sizes = [
        each.numel() for each in (results if isinstance(results, (list, tuple)) else [results]) if each is not None
    ]
    if not all(isinstance(size, int) and size <= LARGEST_FOLD for size in sizes):
        return None
    name = target._schema.name.partition("::")[2]
    if any(word in name for word in _RANDOM_OR_EMPTY) or not _all_constant(list(arguments.values())):
        return None
    made = _called(target, arguments)
    if isinstance(made, Tensor):
        return _as_constant(made)
    return [_as_constant(each) for each in made]


def _called(target: OpOverload, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401  what the operation returns
    given = list(zip(target._schema.arguments, map(_as_torch, arguments.values()), strict=True))
    return target(
        *(value for argument, value in given if not argument.kwarg_only),
        **{
            argument.name: value
            for argument, value in given
            if argument.kwarg_only and argument.name not in ("device", "pin_memory")
        },
    )


def _all_constant(arguments: list[Any]) -> bool:
    for argument in arguments:
        if isinstance(argument, list) and not _all_constant(argument):
            return False
        if isinstance(argument, torch.SymInt) or (isinstance(argument, Value) and argument.constant is None):
            return False
    return True


def _as_torch(argument: Any) -> Any:  # noqa: ANN401  an argument of the program
    if isinstance(argument, list):
        return [_as_torch(each) for each in argument]
    return argument.constant if isinstance(argument, Value) else argument


def _as_constant(tensor: Tensor) -> Value:
    return Value("", tensor.dtype, tuple(tensor.shape), tensor)


_ATEN = torch.ops.aten
_OWN_MEMORY = frozenset(
    {
        "aten::adaptive_avg_pool2d",
        "aten::batch_norm",
        "aten::conv1d",
        "aten::conv2d",
        "aten::conv3d",
        "aten::conv_transpose1d",
        "aten::conv_transpose2d",
        "aten::conv_transpose3d",
        "aten::group_norm",
        "aten::layer_norm",
        "aten::linear",
        "aten::matmul",
        "aten::max_pool2d",
    }
)
"""Composite operations whose result never shares memory with an input, which their schema does not tell."""


class Memory:
    """The tensors of a program in groups that may share memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._groups: dict[fx.Node, set[fx.Node]] = {}
        self._same: dict[fx.Node, list[fx.Node]] = {}
        self._outside: set[fx.Node] = set()

    def add_stored(self, node: fx.Node) -> None:
        """Note a tensor that belongs to the model or to the caller: it is never written to."""
        self._outside.add(node)
        self._add(node)

    def add_result(self, node: fx.Node) -> None:
        """Note the result of an operation, which may be a view of its inputs."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and (makes_memory(target) or _converts(node, target)):
            self._add(node)
            return
        group = {node}
        for given in node.all_input_nodes:
            group |= self._groups.get(given, set())
        for member in group:
            self._groups[member] = group
        self._same[node] = [node]

    def add_same(self, node: fx.Node, tensor: fx.Node) -> None:
        """Note a result that is the very tensor that was given."""
        self._groups[node] = self._groups[tensor]
        self._groups[node].add(node)
        self._same[node] = self._same[tensor]
        self._same[tensor].append(node)

    def is_outside(self, tensor: fx.Node) -> bool:
        """Whether a tensor may share memory with one of the model or the caller."""
        return not self._outside.isdisjoint(self._groups.get(tensor, {tensor}))

    def write(self, node: fx.Node, tensor: fx.Node) -> list[fx.Node]:
        """Note an operation that writes to a tensor; returns all nodes that are this tensor, which have a new value.

        Raises:
            NotLoweredError: another tensor with the same memory is read later, or it is not the program's own.
        """
        if tensor not in self._groups:
            raise NotLoweredError(f"{node} writes to {tensor}")
        self.add_same(node, tensor)
        same = self._same[tensor]
        others = self._groups[tensor].difference(same)
        if self.is_outside(tensor):
            raise NotLoweredError(f"{node} writes to a tensor that is not the program's own")
        if any(self._order[user] > self._order[node] for other in others for user in other.users):
            raise NotLoweredError(f"{node} writes to memory that is read as another tensor")
        return same

    def _add(self, node: fx.Node) -> None:
        self._groups[node] = {node}
        self._same[node] = [node]


def makes_memory(target: OpOverload) -> bool:
    """Whether the result of an operation never shares memory with an input."""
    schema = target._schema
    if any(result.alias_info is not None or str(result.type) != "Tensor" for result in schema.returns):
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return schema.name in _OWN_MEMORY or not target.has_kernel_for_dispatch_key(composite)


def _converts(node: fx.Node, target: OpOverload) -> bool:
    """Whether an operation makes a copy in another type."""
    if target._schema.name not in ("aten::to", "aten::type_as"):
        return False
    (given, *_) = node.all_input_nodes
    return bool(given.meta["val"].dtype != node.meta["val"].dtype)


def without_mutation(target: OpOverload) -> OpOverload | None:
    """``relu`` for ``relu_``: the operation that returns what the given one writes to its first argument."""
    first, *others = target._schema.arguments
    name = str(target.overloadpacket.__name__)
    written = first.alias_info is not None and first.alias_info.is_write
    if not name.endswith("_") or not written or any(each.alias_info is not None for each in others):
        return None
    found = getattr(getattr(_ATEN, name[:-1], None), target._overloadname, None)
    if found is None or found._schema.is_mutable:
        return None
    types, wanted = ([str(each.type) for each in op._schema.arguments] for op in (found, target))
    return found if types == wanted else None
