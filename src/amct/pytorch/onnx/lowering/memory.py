"""Which tensors of a captured program share memory, so that an operation in place can become one that is not.

An operation in place is replaced by the one that returns its result, which all later readers of the tensor get. That is
right if no other tensor that shares the memory is read afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.pytorch.onnx.lowering.registry import NotLoweredError

if TYPE_CHECKING:
    from torch import fx
    from torch._ops import OpOverload

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
