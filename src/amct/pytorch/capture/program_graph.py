"""Builds the topology from a program's operations: one node per layer call or other operation.

All operations of one call of a quantizable layer or batch norm become one node, named by the module's path (``conv``,
and ``conv@1`` for a second call); every other operation is its own node. Parameters, and values computed only from
them, are not activations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from amct.model import Graph, Node
from amct.pytorch.capture.functional_layers import named_layers
from amct.pytorch.capture.layer_types import is_layer, layer_type, type_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from amct.pytorch.capture.program_reader import ModuleCall, Operation, Program, ProgramTensor

WEIGHTED_OPERATIONS = frozenset(
    {
        "addmm", "baddbmm", "bilinear", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "convolution", "einsum", "gru", "linear", "lstm", "matmul", "mm", "rnn_relu", "rnn_tanh",
    }
)  # fmt: skip
"""Operations that are reported as not quantized if one operand is a weight."""

_ZERO_PADS = frozenset({"pad", "constant_pad_nd"})
_REARRANGES = frozenset({"contiguous", "permute", "transpose"})


@dataclass(eq=False, kw_only=True)
class LayerCall:
    """One call of a quantizable layer or batch norm.

    ``problem`` says why the call differs from the plain layer (a subclass with its own forward); ``exact`` means that
    it returns the result of its one operation unchanged, so that a following layer can be folded in.
    ``normalizes_first`` means of a batch norm that all else it does (an activation) reads the normalized values only.
    """

    name: str
    path: str
    operations: list[Operation] = field(default_factory=list)
    inputs: tuple[ProgramTensor, ...] = ()
    outputs: tuple[ProgramTensor, ...] = ()
    problem: str | None = None
    exact: bool = False
    normalizes_first: bool = False


@dataclass(frozen=True, kw_only=True)
class ProgramGraph:
    """The topology of a program, its layer calls and its other weighted operations."""

    graph: Graph
    calls: Mapping[str, Sequence[LayerCall]]  # by module path
    functional: Sequence[Operation]  # weighted operations outside of quantizable layers


def call_name(layer: str, call: int) -> str:
    """The name of the node of one call of a layer, counted from 0."""
    return f"{layer}@{call}" if call else layer


def program_graph(program: Program, model: nn.Module) -> ProgramGraph:
    """Group the operations by layer; ``model`` is the model that was captured."""
    return _Builder(program, model).build()


class _Builder:
    def __init__(self, program: Program, model: nn.Module) -> None:
        self.program = program
        self.modules = dict(named_layers(model))
        stored = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.tensors = {name: id(tensor) for name, tensor in stored}
        self.groups: dict[str, list[Operation]] = {}
        self.calls: dict[str, LayerCall] = {}  # by the key of the module call
        self.numbers: Counter[str] = Counter()  # of calls so far, by module path
        self.readers: dict[int, dict[str, str]] = {}  # of a stored tensor: module path and place in the code

    def build(self) -> ProgramGraph:
        functional: list[Operation] = []
        read = {id(value) for operation in self.program.operations for value in operation.operands}
        read.update(id(value) for value in self.program.outputs)
        for operation in self.program.operations:
            owner = self._layer_owner(operation)
            if any(id(result) in read for result in operation.results):
                self._note_readers(operation, owner.path if owner is not None else "")
            if owner is not None:
                call = self._call(owner)
                call.operations.append(operation)
                self.groups.setdefault(call.name, call.operations)
            elif not operation.constant:
                self.groups[operation.name] = [operation]
                if operation.kind in WEIGHTED_OPERATIONS and any(value.constant for value in operation.operands):
                    functional.append(operation)
        self._join()
        by_path: dict[str, list[LayerCall]] = {}
        for call in self.calls.values():
            by_path.setdefault(call.path, []).append(call)
            self._examine(call)
        return ProgramGraph(graph=self._graph(by_path), calls=by_path, functional=functional)

    def _layer_owner(self, operation: Operation) -> ModuleCall | None:
        """The outermost quantizable layer or batch norm whose call contains the operation."""
        for caller in operation.callers:
            module = self.modules.get(caller.path) if caller.path else None
            if module is not None and is_layer(module):
                return caller
        return None

    def _note_readers(self, operation: Operation, path: str) -> None:
        for value in operation.operands:
            stored = self.tensors.get(value.parameter or "")
            if stored is not None:
                self.readers.setdefault(stored, {}).setdefault(path, operation.where or operation.kind)

    def _read_elsewhere(self, path: str) -> str | None:
        """Where something else than a module reads one of its parameters."""
        own = (id(parameter) for parameter in self.modules[path].parameters(recurse=False))
        places = (place for each in own for reader, place in self.readers.get(each, {}).items() if reader != path)
        return next(places, None)

    def _call(self, owner: ModuleCall) -> LayerCall:
        if owner.key not in self.calls:
            earlier = self.numbers[owner.path]
            self.numbers[owner.path] += 1
            self.calls[owner.key] = LayerCall(name=call_name(owner.path, earlier), path=owner.path)
        return self.calls[owner.key]

    # -- edges -----------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Find the inputs and outputs of each layer call."""
        readers: dict[int, set[str]] = {id(value): {""} for value in self.program.outputs}
        for name, operations in self.groups.items():
            for operation in operations:
                for value in operation.operands:
                    readers.setdefault(id(value), set()).add(name)
        for call in self.calls.values():
            made = [result for operation in call.operations for result in operation.results]
            inside = {id(result) for result in made}
            reads = (value for operation in call.operations for value in operation.operands)
            call.inputs = _unique(value for value in reads if id(value) not in inside and not value.constant)
            call.outputs = tuple(result for result in made if readers.get(id(result), set()) - {call.name})

    def _graph(self, by_path: Mapping[str, Sequence[LayerCall]]) -> Graph:
        by_name = {call.name: call for call in self.calls.values()}
        nodes = []
        for name, operations in self.groups.items():
            call = by_name.get(name)
            nodes.append(self._layer_node(call, len(by_path[call.path])) if call else _operation_node(operations[0]))
        outputs = [value.name for value in self.program.outputs if not value.constant]
        return Graph(nodes, inputs=[value.name for value in self.program.inputs], outputs=outputs)

    def _layer_node(self, call: LayerCall, calls: int) -> Node:
        module = self.modules[call.path]
        return Node(
            name=call.name,
            op=type_name(module),
            inputs=tuple(value.name for value in call.inputs),
            outputs=tuple(value.name for value in call.outputs),
            attributes={
                "module": call.path,
                "class": type(module).__name__,
                "calls": calls,
                "exact": call.exact and call.problem is None,
                "normalizes_first": call.normalizes_first,
                "read_elsewhere": self._read_elsewhere(call.path),
                "shapes": tuple(value.shape for value in call.outputs),
            },
        )

    # -- checks of layer calls -------------------------------------------------------------------------------------

    def _examine(self, call: LayerCall) -> None:
        module = self.modules[call.path]
        kind = type_name(module)
        entry = layer_type(kind)
        work = entry.operation if entry else "batch_norm"
        doing = [operation for operation in call.operations if operation.kind == work]
        if len(doing) != 1:
            call.problem = f"its forward calls {work} {len(doing)} times, not once"
            return
        main = doing[0]
        call.exact = len(call.outputs) == 1 and any(result is call.outputs[0] for result in main.results)
        others = [op for op in call.operations if op is not main and op.kind in WEIGHTED_OPERATIONS and not op.constant]
        if others:
            call.problem = f"its forward also calls {others[0].kind} ({others[0].where})"
        elif entry and main.constant:
            call.problem = "it reads nothing that depends on the model's input, so what it computes is a constant"
        elif entry and not self._reads_input(call, main):
            call.problem = f"its forward changes the input before {work} ({main.where})"
        elif entry and not self._uses_own_parameters(module, main, entry.parameters):
            call.problem = (
                f"its forward computes the weight it uses ({main.where}); if it is the same for every input, put its "
                f"value into a plain {kind}"
            )
        if not entry:
            call.normalizes_first = call.problem is None and self._normalizes_first(module, call, main)
            if [operation.kind for operation in call.operations] != ["batch_norm"]:
                call.problem = "its forward does more than normalize"

    def _reads_input(self, call: LayerCall, main: Operation) -> bool:
        """Whether the operation reads the module's input, at most zero-padded or rearranged."""
        makers = {id(result): operation for operation in call.operations for result in operation.results}
        value = main.operand(0)
        while value is not None and id(value) in makers:
            maker = makers[id(value)]
            if maker.kind not in _REARRANGES and not _pads_with_zeros(maker):
                return False
            value = maker.operand(0)
        return value is not None and not value.constant

    def _normalizes_first(self, module: nn.Module, call: LayerCall, main: Operation) -> bool:
        """Whether a batch norm's operation, with its own settings, is the only reader of the module's input."""
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        given = main.operand(0)
        readers = [operation for operation in call.operations if given in operation.operands]
        training, _, eps = main.arguments[5:8]
        return (
            call.inputs == (given,)
            and readers == [main]
            and not training
            and eps == module.eps
            and self._uses_own_parameters(module, main, (1, 2, 3, 4))
        )

    def _uses_own_parameters(self, module: nn.Module, main: Operation, positions: tuple[int, ...]) -> bool:
        """Whether weight and bias are the module's own tensors, unmodified."""
        own = {id(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
        used = (main.operand(position) for position in positions)
        names = [value.parameter for value in used if value is not None]
        return all(name is not None and self.tensors.get(name) in own for name in names)


def _operation_node(operation: Operation) -> Node:
    inputs = _unique(value for value in operation.operands if not value.constant)
    return Node(
        name=operation.name,
        op=operation.kind,
        inputs=tuple(value.name for value in inputs),
        outputs=tuple(value.name for value in operation.results),
        attributes={
            "module": operation.callers[-1].path if operation.callers else "",
            "settings": operation.settings,
            "parameters": tuple(value.parameter for value in operation.operands if value.parameter is not None),
            "shapes": tuple(value.shape for value in operation.results),
            "where": operation.where,
        },
    )


def _pads_with_zeros(operation: Operation) -> bool:
    if operation.kind not in _ZERO_PADS:
        return False
    settings = operation.arguments[2:]
    return all(setting in ("constant", 0, None) for setting in settings)


def _unique(values: Iterator[ProgramTensor]) -> tuple[ProgramTensor, ...]:
    return tuple({id(value): value for value in values}.values())
