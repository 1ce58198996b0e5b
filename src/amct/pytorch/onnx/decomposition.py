"""Replaces operations that the ONNX exporter cannot translate, without tracing the program again.

torch.onnx asks the captured program for ``run_decompositions``, which traces all of it a second time: more than half of
the cost of an export. Most programs need only replacements that concern one node each: a batch norm in eval mode, a
global average pooling, an operation that works in place. ``quickly_decomposed`` returns a program that makes these
itself, with the names and nodes of the slow way, and takes the slow way if anything else is to be replaced.
"""

from __future__ import annotations

import copy
import logging
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputKind
from torch.fx.traceback import NodeSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._ops import OpOverload

logger = logging.getLogger(__name__)

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


def quickly_decomposed(program: ExportedProgram) -> ExportedProgram:
    """The same program, whose ``run_decompositions`` replaces single nodes where that is enough."""

    def run_decompositions(decomp_table: Mapping[Any, Any] | None = None, **options: object) -> ExportedProgram:
        try:
            return _Decomposition(program, decomp_table or {}).run()
        except _NotLocalError as error:
            logger.debug("the program is traced again for its export, because of %s", error)
            decomposed: ExportedProgram = program.run_decompositions(decomp_table, **options)
            return decomposed

    quick = copy.copy(program)
    quick.run_decompositions = run_decompositions  # of this object only
    return quick


class _NotLocalError(Exception):
    """An operation needs more than the replacement of one node."""


class _Decomposition:
    """Copies a program node by node.

    An operation in place becomes the one that returns its result, which all later readers of the tensor get. That is
    right only if nothing else shares the tensor's memory, so the tensors that own their memory alone are noted.
    """

    def __init__(self, program: ExportedProgram, table: Mapping[Any, Any]) -> None:
        self._program = program
        self._table = table
        self._graph = fx.Graph()
        self._current: dict[fx.Node, fx.Node] = {}
        self._same: dict[fx.Node, list[fx.Node]] = {}
        """For a tensor that owns its memory: all nodes that are this tensor."""

    def run(self) -> ExportedProgram:
        """The decomposed program.

        Raises:
            _NotLocalError: single replacements are not enough.
        """
        program = self._program
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
            raise _NotLocalError("the program writes to its inputs")
        for node in program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op in ("placeholder", "output"):
                self._current[node] = self._copied(node, node.target, node.name)
            else:
                raise _NotLocalError(node)
        return ExportedProgram(
            root=program.graph_module,
            graph=self._graph,
            graph_signature=self._signature(),
            state_dict=program.state_dict,
            range_constraints=program.range_constraints,
            module_call_graph=program.module_call_graph,
            example_inputs=program.example_inputs,
            constants=program.constants,
            verifiers=program.verifiers,
        )

    def _signature(self) -> ExportGraphSignature:
        """The signature with the new names of the outputs."""
        old = self._program.graph_signature
        names = {node.name: new.name for node, new in self._current.items()}
        outputs = []
        for spec in old.output_specs:
            name = getattr(spec.arg, "name", None)
            outputs.append(replace(spec, arg=replace(spec.arg, name=names[name])) if name in names else spec)
        return ExportGraphSignature(input_specs=old.input_specs, output_specs=outputs)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise _NotLocalError(node)
        if not isinstance(target, torch._ops.OpOverload):
            self._current[node] = self._copied(node, target, target.__name__)  # type: ignore[union-attr]
            self._shares_memory(node)
        elif target._schema.is_mutable:
            self._in_place(node, target)
        elif target is _ATEN.batch_norm.default:
            self._batch_norm(node)
        elif target is _ATEN.adaptive_avg_pool2d.default and list(node.args[1]) == [1, 1]:  # type: ignore[arg-type]
            changed = self._created(node, _ATEN.mean.dim, (self._new(node.args[0]), [-1, -2], True))
            self._owns_memory(node, changed)
        elif target is _ATEN.flatten.using_ints and not any(map(_is_symbolic, node.meta["val"].shape)):
            shape = list(node.meta["val"].shape)
            self._current[node] = self._created(node, _ATEN.view.default, (self._new(node.args[0]), shape))
            self._shares_memory(node)
        elif target in self._table:
            raise _NotLocalError(node)
        else:
            self._current[node] = self._copied(node, target, _name(target))
            if _makes_memory(target):
                self._owns_memory(node, self._current[node])
            elif target is _ATEN.alias.default and node.args[0] in self._same:
                self._is_same(node, node.args[0])
            else:
                self._shares_memory(node)

    def _in_place(self, node: fx.Node, target: OpOverload) -> None:
        functional = _without_mutation(target)
        if target is _ATEN.dropout_.default and node.args[2] is False:  # writes nothing
            self._current[node] = self._copied(node, functional, "dropout")
            self._shares_memory(node)
            return
        written = node.args[0] if node.args else None
        if functional is None or functional in self._table or written not in self._same:
            raise _NotLocalError(node)
        if len({each.meta["val"].dtype for each in node.all_input_nodes if _is_tensor(each)}) != 1:
            raise _NotLocalError  # the result has the type of the tensor written to, not the promoted one
        new = self._copied(node, functional, _name(functional))
        self._is_same(node, written)
        for each in self._same[node]:
            self._current[each] = new

    def _batch_norm(self, node: fx.Node) -> None:
        x, weight, bias, mean, variance, training, momentum, epsilon, _ = node.args
        if training or mean is None or variance is None:
            raise _NotLocalError(node)
        arguments = (*map(self._new, (x, weight, bias, mean, variance)), momentum, epsilon)
        norm = self._created(node, _ATEN._native_batch_norm_legit_no_training.default, arguments)
        value = node.meta["val"]
        norm.meta["val"] = (value, value.new_empty(0), value.new_empty(0))
        result, *unused = [self._created(node, operator.getitem, (norm, index), "getitem") for index in range(3)]
        for each in unused:
            self._graph.erase_node(each)
        self._owns_memory(node, result)

    # -- memory ----------------------------------------------------------------------------------------------------

    def _owns_memory(self, node: fx.Node, new: fx.Node) -> None:
        self._current[node] = new
        self._same[node] = [node]

    def _is_same(self, node: fx.Node, tensor: Any) -> None:  # noqa: ANN401  an argument of a node, here another node
        self._same[node] = self._same[tensor]
        self._same[tensor].append(node)

    def _shares_memory(self, node: fx.Node) -> None:
        """Note that a node may be a view of its inputs: none of them may be written to from now on."""
        for given in node.all_input_nodes:
            for each in self._same.get(given, ()):
                self._same.pop(each, None)

    # -- the copy --------------------------------------------------------------------------------------------------

    def _new(self, argument: Any) -> Any:  # noqa: ANN401  a node, or a constant
        return self._current[argument] if isinstance(argument, fx.Node) else argument

    def _copied(self, node: fx.Node, target: Any, name: str) -> fx.Node:  # noqa: ANN401  fx.Node's own type
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._current.__getitem__)
        return self._noted(node, self._graph.create_node(node.op, target, args, kwargs, name))

    def _created(self, node: fx.Node, target: Any, args: tuple[Any, ...], name: str = "") -> fx.Node:  # noqa: ANN401
        return self._noted(node, self._graph.create_node("call_function", target, args, {}, name or _name(target)))

    def _noted(self, node: fx.Node, new: fx.Node) -> fx.Node:
        new.meta = copy.copy(node.meta)
        if node.op == "call_function":
            new.meta["from_node"] = [NodeSource(node, "decomposition")]
        return new


def _name(target: OpOverload) -> str:
    return str(target.overloadpacket.__name__)


def _is_symbolic(size: object) -> bool:
    return not isinstance(size, int)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _makes_memory(target: OpOverload) -> bool:
    """Whether the result of an operation never shares memory with an input."""
    schema = target._schema
    if any(result.alias_info is not None or str(result.type) != "Tensor" for result in schema.returns):
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return schema.name in _OWN_MEMORY or not target.has_kernel_for_dispatch_key(composite)


def _without_mutation(target: OpOverload) -> OpOverload | None:
    """``relu`` for ``relu_``: the operation that returns what the given one writes to its first argument."""
    first, *others = target._schema.arguments
    name = _name(target)
    written = first.alias_info is not None and first.alias_info.is_write
    if not name.endswith("_") or not written or any(each.alias_info is not None for each in others):
        return None
    found = getattr(getattr(_ATEN, name[:-1], None), target._overloadname, None)
    if found is None or found._schema.is_mutable:
        return None
    types, wanted = ([str(each.type) for each in op._schema.arguments] for op in (found, target))
    return found if types == wanted else None
