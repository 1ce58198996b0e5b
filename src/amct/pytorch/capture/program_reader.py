"""Reads a program captured by torch.export as a plain list of operations on named values, and what a file cannot do."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amct.pytorch.capture.functional_layers import layer_name
from amct.pytorch.capture.program import plain_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.export import ExportedProgram

Shape = tuple[int | None, ...]

_LIBRARIES = (str(torch.__path__[0]), str(Path(__file__).parents[1]))
_USERS_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(eq=False)
class ProgramTensor:
    """A tensor of the program; ``parameter`` is the qualified name of a parameter or buffer used unmodified."""

    name: str
    constant: bool = False  # computed from parameters only
    parameter: str | None = None
    shape: Shape | None = None  # None for non-tensors; a dynamic size is None


@dataclass(frozen=True)
class ModuleCall:
    """An active module call: the module's path, and ``key``, which differs between calls of the same module."""

    path: str
    key: str


@dataclass(eq=False)
class Operation:
    """One operation; ``arguments`` are the positional ones, with tensors as ``ProgramTensor``."""

    kind: str  # the operation's name without namespace, overload and in-place suffix: "conv2d", "relu"
    name: str
    arguments: tuple[Any, ...]
    operands: tuple[ProgramTensor, ...]
    results: list[ProgramTensor]
    constant: bool
    callers: tuple[ModuleCall, ...]  # outermost first
    where: str  # file:line of the innermost code outside torch
    has_graphs: bool = False  # it runs graphs of its own, as torch.cond does
    pointwise: bool = False  # each element of the result depends on one element of each operand, up to broadcasting
    items: list[int] = field(default_factory=list)  # of several results: the position of each in ``results``

    def operand(self, position: int) -> ProgramTensor | None:
        """The tensor at a positional argument; None if it is not a tensor."""
        argument = self.arguments[position] if position < len(self.arguments) else None
        return argument if isinstance(argument, ProgramTensor) else None

    @property
    def settings(self) -> tuple[Any, ...]:
        """The positional arguments that are not tensors."""
        return tuple(argument for argument in self.arguments if not isinstance(argument, ProgramTensor))


@dataclass(frozen=True, kw_only=True)
class Program:
    """Inputs, operations in execution order, outputs."""

    inputs: Sequence[ProgramTensor]
    operations: Sequence[Operation]
    outputs: Sequence[ProgramTensor]


def read_program(program: ExportedProgram) -> Program:
    """Read every operation that returns a tensor; size arithmetic and assertions are omitted."""
    reader = _ProgramReader(program)
    outputs = reader.read()
    returned = set(program.graph_signature.user_outputs)
    return Program(
        inputs=reader.inputs,
        operations=reader.operations,
        outputs=[value for value in outputs if value.name in returned],
    )


@dataclass(eq=False)
class _ProgramReader:
    program: ExportedProgram
    inputs: list[ProgramTensor] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    known: dict[fx.Node, ProgramTensor | Operation] = field(default_factory=dict)
    """The value of a node, or the operation with several results that are not unpacked yet."""

    def read(self) -> list[ProgramTensor]:
        """Read the graph; returns its outputs."""
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                found = (self.known.get(source) for source in node.all_input_nodes)
                return [value for value in found if isinstance(value, ProgramTensor) and value.shape is not None]
        return []

    def __post_init__(self) -> None:
        signature = self.program.graph_signature
        stored = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        self.stored = {node: plain_name(target) for node, target in stored.items()}

    def _placeholder(self, node: fx.Node) -> None:
        stored = self.stored.get(node.name)
        value = ProgramTensor(
            node.name, constant=stored is not None, parameter=stored, shape=_shape(node.meta.get("val"))
        )
        self.known[node] = value
        if stored is None and value.shape is not None:
            self.inputs.append(value)

    def _call(self, node: fx.Node) -> None:
        source = self.known.get(_node(node.args[0])) if node.target is operator.getitem else None
        if isinstance(source, Operation):
            self._item(node, source)
        elif _makes_tensors(node.meta.get("val")):
            self._operation(node)

    def _operation(self, node: fx.Node) -> None:
        arguments: Any = fx.map_arg(node.args, self._resolved)  # type: ignore[arg-type]  # maps to any type
        found = (self.known.get(source) for source in node.all_input_nodes)
        operands = tuple(value for value in found if isinstance(value, ProgramTensor) and value.shape is not None)
        made = Operation(
            kind=_kind(node),
            name=node.name,
            arguments=tuple(arguments),
            operands=operands,
            results=[],
            constant=all(value.constant for value in operands),
            callers=_callers(node),
            where=place_in_code(node),
            has_graphs=isinstance(node.target, torch._ops.HigherOrderOperator),
            pointwise=_is_pointwise(node.target),
        )
        self.operations.append(made)
        shape = _shape(node.meta.get("val"))
        if shape is None:
            self.known[node] = made
        else:
            made.results.append(ProgramTensor(made.name, constant=made.constant, shape=shape))
            self.known[node] = made.results[0]

    def _resolved(self, node: fx.Node) -> ProgramTensor | str:
        value = self.known.get(node)
        return value if isinstance(value, ProgramTensor) and value.shape is not None else node.name

    def _item(self, node: fx.Node, source: Operation) -> None:
        value = ProgramTensor(node.name, constant=source.constant, shape=_shape(node.meta.get("val")))
        source.results.append(value)
        source.items.append(int(node.args[1]))  # type: ignore[arg-type]  # getitem of a tuple
        self.known[node] = value


def _node(argument: object) -> fx.Node:
    assert isinstance(argument, fx.Node)
    return argument


def _makes_tensors(value: object) -> bool:
    items = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(item, torch.Tensor) for item in items)


def _shape(value: object) -> Shape | None:
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def _kind(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).rpartition("::")[2].removesuffix("_")
    return getattr(target, "__name__", str(target))


def _is_pointwise(target: object) -> bool:
    """Whether torch marks an operation, or the one that it does in place, as pointwise."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else [target]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _callers(node: fx.Node) -> tuple[ModuleCall, ...]:
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(ModuleCall(path=_layer_of(path), key=key) for key, (path, _) in stack.items())


def _layer_of(path: object) -> str:
    """The layer at a path of torch.export, which ends in ``@1`` for the second call of a module."""
    return layer_name(str(path).partition("@")[0])


def place_in_code(node: fx.Node) -> str:
    """``file:line`` of the user's code that an operation comes from; "" if unknown."""
    found = list(_USERS_LINE.finditer(node.meta.get("stack_trace") or ""))
    users = [match for match in found if not match["file"].startswith(_LIBRARIES)]
    return f"{users[-1]['file']}:{users[-1]['line']}" if users else ""


# -- unused modules ----------------------------------------------------------------------------------------------------


def unused_modules(program: ExportedProgram) -> frozenset[str]:
    """The modules that are called although no output of the model depends on them.

    An exported file does not contain them, so they are not quantized; an example is the pooler of a BERT of which only
    the hidden state is used. In-place operations and operations with subgraphs count as used.
    """
    live: set[fx.Node] = set()
    used: set[str] = set()
    called: set[str] = set()
    for node in reversed(program.graph.nodes):
        if _has_effect(node) or any(user in live for user in node.users):
            live.add(node)
        if node.op == "call_function":
            stack = node.meta.get("nn_module_stack") or {}
            paths = {_layer_of(path) for path, _ in stack.values()}
            called |= paths
            if node in live:
                used |= paths
    return frozenset(called - used)


def _has_effect(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op == "output"
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    return getattr(node.target, "__name__", "") != "getitem"


# -- what a file cannot do in the same way -----------------------------------------------------------------------------


_RANDOM = frozenset(
    {
        "bernoulli", "exponential", "geometric", "multinomial", "normal", "poisson", "rand", "rand_like", "randint",
        "randint_like", "randn", "randn_like", "randperm", "uniform",
    }
)  # fmt: skip
"""Operators that draw numbers; dropout draws none in eval mode."""


def side_effects(program: ExportedProgram) -> Iterator[str]:
    """What the user should know of a model before its outputs are compared with those of a file."""
    nodes = [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    drawn = next((node for node in nodes if _operator(node).removesuffix("_") in _RANDOM), None)
    if drawn is not None:
        yield (
            f"the forward draws random numbers ({_operator(drawn)}{_place(drawn)}), so simulation and files differ "
            "from run to run; make these numbers an input of the model"
        )
    buffers = program.graph_signature.inputs_to_buffers
    writes = {buffers[base.name]: node for node in nodes for base in _written(node) if base.name in buffers}
    for name, node in writes.items():
        yield (
            f'the forward writes to the buffer "{name}"{_place(node)}, but a file keeps nothing from one run to the '
            "next: each run starts with the value of now; make the buffer an input and an output of the model"
        )


def _operator(node: fx.Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema.name.partition("::")[2]


def _place(node: fx.Node) -> str:
    place = place_in_code(node)
    return f" at {place}" if place else ""


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors of which an operation writes a part."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if isinstance(value, fx.Node) and argument.alias_info is not None and argument.alias_info.is_write:
            yield _base(value)


def _base(node: fx.Node) -> fx.Node:
    """The tensor of which a tensor is a view, or that it is after a write."""
    while isinstance(node.target, torch._ops.OpOverload) and node.args and isinstance(node.args[0], fx.Node):
        if node.target._schema.arguments[0].alias_info is None:
            return node
        node = node.args[0]
    return node
