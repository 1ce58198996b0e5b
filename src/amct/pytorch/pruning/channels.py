"""The channels of all tensors of a model: which belong together, which must stay, and the rules that say so.

Each position along an axis of a tensor has a label, the number of a channel. Channels that an operation couples (both
operands of an addition, a filter and its batch norm) are joined to one set. A set is *kept*, with a reason, if
removing it would change more than tensors that can be cut: an output of the model, an operation of unknown effect. An
axis without labels (None) is kept whole.

A rule is a function of the ``ChannelMap`` and an operation. It returns the axes of the operation's result; for an
operation with several results a list, one for each position. What it couples or keeps it tells the map.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.numerics.observer import is_dense
from amct.pytorch.pruning.cutting import PARAMETER, node_type
from amct.pytorch.pruning.user_sizes import UserSizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Labels = NDArray[np.int64]
    Axis = Labels | None
    Axes = tuple[Axis, ...]
    from collections.abc import Callable

    from torch import nn

    from amct.pytorch.capture.program_reader import Operation, Program, ProgramTensor

    Rule = Callable[["ChannelMap", Operation], Axes | list[Axes]]


KEPT = 0
"""The label of positions that cannot be removed, such as those of a literal padding."""


class ChannelSets:
    """Disjoint sets of channels (union-find), and why some of them are kept."""

    def __init__(self) -> None:
        self._parent = np.zeros(1024, np.int64)
        self._count = 1  # label 0 is KEPT
        self._reasons: dict[int, str] = {KEPT: "its positions are fixed"}

    @property
    def count(self) -> int:
        """The number of labels."""
        return self._count

    def new(self, size: int) -> Labels:
        """Labels of new channels, each a set of its own."""
        first, self._count = self._count, self._count + size
        if self._count > len(self._parent):
            self._parent = np.concatenate([self._parent, np.zeros(max(self._count, len(self._parent)), np.int64)])
        labels = np.arange(first, self._count, dtype=np.int64)
        self._parent[first : self._count] = labels
        return labels

    def roots(self, labels: Labels) -> Labels:
        """One label for each set: equal for channels of the same set."""
        found = self._parent[labels]
        while True:
            above = self._parent[found]
            if np.array_equal(above, found):
                break
            found = above
        self._parent[labels] = found
        return found

    def join(self, first: Labels, second: Labels, reason: str) -> None:
        """Couple two arrays of channels position by position; ``reason`` says why, for sets that become kept by it."""
        for a, b in zip(self.roots(first).tolist(), self.roots(second).tolist(), strict=True):
            one, other = self._root(a), self._root(b)
            if one == other:
                continue
            upper, lower = min(one, other), max(one, other)
            if upper == KEPT:  # not joined, so that each set keeps its own reason
                self._reasons.setdefault(lower, reason)
                continue
            self._parent[lower] = upper
            if lower in self._reasons:
                self._reasons.setdefault(upper, self._reasons[lower])

    def _root(self, label: int) -> int:
        while self._parent[label] != label:
            label = int(self._parent[label])
        return label

    def join_rows(self, rows: NDArray[np.int64], reason: str) -> Labels:
        """Couple all rows of a matrix of labels; returns the labels of one."""
        for row in rows[1:]:
            self.join(rows[0], row, reason)
        first: Labels = rows[0]
        return first

    def keep(self, labels: Axis, reason: str) -> None:
        """Keep channels: the first reason of a set is the one that is told."""
        if labels is None:
            return
        for root in np.unique(self.roots(labels)).tolist():
            self._reasons.setdefault(root, reason)

    def is_kept(self, labels: Labels) -> NDArray[np.bool_]:
        """Whether each channel is kept."""
        kept = np.fromiter(self._reasons, np.int64, len(self._reasons))
        return np.isin(self.roots(labels), kept)

    def reason(self, labels: Labels) -> str | None:
        """Why the first kept channel among some is kept; None if none is."""
        found = (self._reasons.get(root) for root in self.roots(labels).tolist() if root != KEPT)
        return next((text for text in found if text is not None), None)


def concatenated(parts: Sequence[tuple[Axis, int]]) -> Axis:
    """The labels of axes one behind the other, each with its size; None if none has any."""
    if all(axis is None for axis, _ in parts):
        return None
    return np.concatenate([np.full(size, KEPT) if axis is None else axis for axis, size in parts])


RULES: dict[str, Rule] = {}
"""The rules by the kind of operation."""


def rule(*kinds: str) -> Callable[[Rule], Rule]:
    """Register a rule for kinds of operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return register


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerChannels:
    """One call of an operation with weights, or of a normalization.

    Attributes:
        name: The module's path, or the name of a parameter that no module of a known type has.
        operation: The operation.
        inputs: The labels of its input channels; None for a normalization, whose channels are outputs.
        outputs: The labels of its output channels.
        produces: Whether the operation makes its output channels, each from a filter of its weight.
        weight: The name of its weight.
        axes: The axes of input and output channels in the weight.
    """

    name: str
    operation: Operation
    inputs: Labels | None
    outputs: Labels
    produces: bool = False
    weight: str | None = None
    axes: tuple[int, int] = (1, 0)


@dataclass(eq=False)
class ChannelMap:
    """The channels of all tensors of a model, as far as its program was followed.

    Attributes:
        program: The operations.
        model: The model.
        sizes: What is known of the sizes in the user's code.
        carriers: By line: which of the axes that a reshape splits one into has its channels, counted from the last
            one; 0, as where none is noted: the one that is most likely.
        sets: Which channels belong together, and which must stay.
        layers: The operations with weights and the normalizations, in execution order.
        parameters: The labels along each axis of each parameter and buffer that was read.
        axes: The labels along each axis of each activation, by the identity of its value.
        followed: By line: the calls of modules whose sizes are assumed to follow these numbers of channels.
        rows: Rows of channels that must lose as many each, with the reason.
        splits: By line: the channels of the axes that reshapes split, and into how many at most.
        contracted: The channels that a value is a sum over, by its identity: those of the last products.
        attentions: The identities of values that are a softmax of products.
        head_widths: Channels of queries, keys and values: a part of a head should not go if a whole one can.
        starts: By slice: the channels in front of its start.
    """

    program: Program
    model: nn.Module
    sizes: UserSizes = field(default_factory=UserSizes)
    carriers: Mapping[str, int] = field(default_factory=dict)
    sets: ChannelSets = field(default_factory=ChannelSets)
    layers: list[LayerChannels] = field(default_factory=list)
    parameters: dict[str, Axes] = field(default_factory=dict)
    axes: dict[int, Axes] = field(default_factory=dict)
    followed: dict[str, list[tuple[str, Labels]]] = field(default_factory=dict)
    rows: list[tuple[Labels, str]] = field(default_factory=list)
    splits: dict[str, tuple[Labels, int]] = field(default_factory=dict)
    contracted: dict[int, list[Labels]] = field(default_factory=dict)
    attentions: set[int] = field(default_factory=set)
    head_widths: list[Labels] = field(default_factory=list)
    starts: dict[str, Labels] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = self.model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        parts = (part for module in model.modules() for part in (module._parameters, module._buffers))
        owners = Counter(id(tensor) for part in parts for tensor in part.values())
        self._shared = {name for name, tensor in tensors if owners[id(tensor)] > 1}
        self.tensors = dict(tensors)

    @property
    def producers(self) -> tuple[LayerChannels, ...]:
        """The layers that make channels, each layer once."""
        return tuple({layer.name: layer for layer in reversed(self.layers) if layer.produces}.values())[::-1]

    def of(self, value: ProgramTensor) -> Axes:
        """The axes of a tensor; those of a parameter are new channels."""
        if value.parameter is not None:
            return self._of_parameter(value.parameter, value)
        return self.axes.get(id(value), (None,) * len(value.shape or ()))

    def _of_parameter(self, name: str, value: ProgramTensor) -> Axes:
        if name not in self.tensors:
            return (None,) * len(value.shape or ())
        if name not in self.parameters:
            axes = tuple(self.sets.new(size) for size in self.tensors[name].shape)
            self.parameters[name] = axes
            stays = f"several modules share {name}" if name in self._shared else ""
            if not is_dense(self.tensors[name]):
                stays = f"{name} is sparse"
            for labels in axes if stays else ():
                self.sets.keep(labels, stays)
        return self.parameters[name]

    def keep(self, axes: Sequence[Axis], operation: Operation, why: str) -> None:
        """Keep the channels of some axes because of an operation."""
        for labels in axes:
            self.sets.keep(labels, f"{described(operation)} {why}")

    def join(self, labels: Sequence[Axis], operation: Operation) -> Axis:
        """Couple axes of equal size; returns one of them. An axis without labels keeps the others."""
        present = [each for each in labels if each is not None]
        if not present:
            return None
        why = f"{described(operation)} couples it with channels that cannot be removed"
        if len(present) < len(labels):
            for each in present:
                self.sets.keep(each, why)
        for other in present[1:]:
            self.sets.join(present[0], other, why)
        return present[0]

    def follows_sizes(self, labels: Axis, operation: Operation) -> Axis:
        """Note that a size given to the operation must follow its channels; if it is literal, they are kept."""
        if labels is None:
            return None
        if operation.where in self.sizes.literal:
            self.keep([labels], operation, "has a literal size")
        else:
            path = operation.callers[-1].path if operation.callers else ""
            self.followed.setdefault(operation.where, []).append((path, labels))
        return labels

    def lose_alike(self, rows: Labels, reason: str, *, same: bool = False) -> None:
        """Note that each row must lose as many channels; of ``same`` rows those at the same positions."""
        if same:
            self.sets.join_rows(rows, reason)
        else:
            self.rows.append((rows, reason))

    def inherit(self, value: ProgramTensor, results: Sequence[ProgramTensor]) -> None:
        """Let results that change the elements of a value only be sums over the same channels."""
        for result in results:
            if id(value) in self.contracted:
                self.contracted.setdefault(id(result), self.contracted[id(value)])
            if id(value) in self.attentions:
                self.attentions.add(id(result))

    def labelled(self, axis: Axis, size: int) -> Labels:
        """The labels of an axis, also of one that is kept whole."""
        return np.full(size, KEPT, np.int64) if axis is None else axis

    def owner(self, parameter: str | None, kinds: type[nn.Module] | tuple[type[nn.Module], ...]) -> str | None:
        """The path of the module of some type that has the parameter as its weight; None if there is none."""
        path, _, leaf = (parameter or "").rpartition(".")
        return path if leaf == "weight" and isinstance(self.modules.get(path), kinds) else None

    def owner_of_call(self, operation: Operation, kinds: type[nn.Module] | tuple[type[nn.Module], ...]) -> str | None:
        """The path of the innermost calling module if it is of some type."""
        path = operation.callers[-1].path if operation.callers else ""
        return path if path and isinstance(self.modules.get(path), kinds) else None

    def add_layer(
        self,
        operation: Operation,
        weight: str | None,
        *,
        inputs: Labels,
        outputs: Labels,
        produces: bool,
        kinds: tuple[type[nn.Module], ...],
        axes: tuple[int, int] = (1, 0),
    ) -> None:
        """Note an operation with a weight, which is a parameter or computed from one (weight standardization)."""
        path = self.owner(weight, kinds) or self.owner_of_call(operation, kinds)
        if weight is None and path is not None:
            weight = f"{path}.weight"
            own = self.parameters.get(weight)
            filters = None if own is None else own[axes[1]]
            if filters is None or len(filters) != len(outputs):
                path = None
            else:
                self.join([filters, outputs], operation)
        if weight is None or (path is None and weight not in self.tensors):
            self.keep([inputs, outputs], operation, "computes its weight")
            return
        self.layers.append(
            LayerChannels(
                name=path or weight,
                operation=operation,
                inputs=inputs,
                outputs=outputs,
                produces=produces,
                weight=weight,
                axes=axes,
            )
        )

    def normalizes(self, operation: Operation, labels: Axis, parameter: str | None) -> None:
        """Note a module with one parameter per channel, which may also have none; of a function its parameters are."""
        path = (parameter or "").rpartition(".")[0] or (operation.callers[-1].path if operation.callers else "")
        if labels is None or node_type(self.modules.get(path)) == PARAMETER:
            return
        self.layers.append(LayerChannels(name=path, operation=operation, inputs=None, outputs=labels))


def described(operation: Operation) -> str:
    """An operation for a message: its kind, its layer and its line."""
    path = operation.callers[-1].path if operation.callers else ""
    layer = f' in "{path}"' if path else ""
    return f"{operation.kind}{layer}{f' ({operation.where})' if operation.where else ''}"


def positive(axis: Any, rank: int) -> int:  # noqa: ANN401  an argument of the program
    """The axis counted from the front."""
    return int(axis) % rank if rank else 0


def argument(operation: Operation, position: int, default: Any = None) -> Any:  # noqa: ANN401  an argument of the program
    """A positional argument; torch.export leaves trailing defaults out."""
    return operation.arguments[position] if position < len(operation.arguments) else default
