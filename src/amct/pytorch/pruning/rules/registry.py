"""The registry of rules, and what a rule can say about an operation.

A rule is a function of a ``Flow`` and an operation. It returns the axes of the operation's result; for an operation
with several results a list, one for each position. What it couples or keeps it says through the flow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.pytorch.pruning.channel_sets import KEPT, ChannelSets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from amct.pytorch.capture.program_reader import Operation, Value
    from amct.pytorch.pruning.channel_sets import Axes, Axis, Labels

    Rule = Callable[["Flow", Operation], Axes | list[Axes]]

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
class Flow:
    """The channels of all tensors of a program, as far as it was read."""

    modules: Mapping[str, nn.Module]
    shared: frozenset[str]  # parameters that several modules have
    stored: Mapping[str, tuple[int, ...]]  # shapes of parameters and buffers by name
    literal_places: frozenset[str] = frozenset()  # lines whose sizes are known to be literal
    sets: ChannelSets = field(default_factory=ChannelSets)
    axes: dict[int, Axes] = field(default_factory=dict)  # by the identity of the value
    parameters: dict[str, Axes] = field(default_factory=dict)
    layers: list[LayerChannels] = field(default_factory=list)
    assumed: dict[str, Labels] = field(default_factory=dict)  # lines whose sizes are assumed to follow the model
    starts: dict[str, Labels] = field(default_factory=dict)  # by operation: what a slice leaves out in front

    def of(self, value: Value) -> Axes:
        """The axes of a tensor; those of a parameter are new channels."""
        if value.parameter is not None:
            return self._of_parameter(value.parameter, value)
        return self.axes.get(id(value), (None,) * len(value.shape or ()))

    def _of_parameter(self, name: str, value: Value) -> Axes:
        if name not in self.stored:
            return (None,) * len(value.shape or ())
        if name not in self.parameters:
            axes = tuple(self.sets.new(size) for size in self.stored[name])
            self.parameters[name] = axes
            if name in self.shared:
                for labels in axes:
                    self.sets.keep(labels, f"several modules share {name}")
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
        if operation.where in self.literal_places:
            self.keep([labels], operation, "has a literal size")
        else:
            before = self.assumed.get(operation.where)
            self.assumed[operation.where] = labels if before is None else np.concatenate([before, labels])
        return labels

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
        if weight is None or (path is None and weight not in self.stored):
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
        """Note an operation with one parameter per channel, which may also have none."""
        if labels is None:
            return
        path = (parameter or "").rpartition(".")[0] or (operation.callers[-1].path if operation.callers else "")
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
