"""Follows the channels of a model through its captured program: which belong together, and which must stay.

Every parameter starts with channels of its own along each axis; the rule of each operation couples them and says where
they are found in its result. Operations without a rule keep all channels that they read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from amct.errors import ModelError
from amct.pytorch.capture.program_reader import read_program
from amct.pytorch.pruning.rules import reductions, shapes
from amct.pytorch.pruning.rules.elementwise import broadcast
from amct.pytorch.pruning.rules.layers import unknown
from amct.pytorch.pruning.rules.registry import RULES, Flow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from amct.pytorch.capture.program_reader import Operation, Program, Value
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.pruning.channel_sets import Axes, ChannelSets, Labels
    from amct.pytorch.pruning.rules.registry import LayerChannels

_RULES_ARE_REGISTERED = (reductions, shapes)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelMap:
    """The channels of all tensors of a model.

    Attributes:
        program: The operations.
        sets: Which channels belong together, and which must stay.
        layers: The operations with weights and the normalizations, in execution order.
        parameters: The labels along each axis of each parameter and buffer that was read.
        values: The axes of each activation, by its name.
        assumed: Lines whose sizes are assumed to follow the number of channels, with these channels.
        starts: By slice: the channels in front of its start.
    """

    program: Program
    sets: ChannelSets
    layers: tuple[LayerChannels, ...]
    parameters: Mapping[str, Axes]
    values: Mapping[str, Axes]
    assumed: Mapping[str, Labels]
    starts: Mapping[str, Labels]

    @property
    def producers(self) -> tuple[LayerChannels, ...]:
        """The layers that make channels, each layer once."""
        return tuple({layer.name: layer for layer in reversed(self.layers) if layer.produces}.values())[::-1]


def map_channels(
    traced: Traced, *, literal_places: frozenset[str] = frozenset(), kept_layers: Mapping[str, str] | None = None
) -> ChannelMap:
    """Follow the channels of a traced model.

    Args:
        traced: The model.
        literal_places: Lines of user code (``file:line``) whose sizes are literal: they end a chain.
        kept_layers: Layers whose output channels must stay, with the reason.

    Raises:
        ModelError: The model could not be captured.
    """
    if traced.program is None:
        raise ModelError(
            f"{type(traced.model).__name__} cannot be pruned, because it cannot be captured as a program: "
            f"{traced.failure}. Express this by operations on tensors"
        )
    program = read_program(traced.program)
    flow = _flow(traced.model, literal_places)
    for operation in program.operations:
        _follow(flow, operation)
    for value in program.outputs:
        for labels in flow.of(value):
            flow.sets.keep(labels, "its channels are an output of the model")
    for layer in flow.layers:
        if kept_layers and layer.produces and layer.name in kept_layers:
            flow.sets.keep(layer.outputs, kept_layers[layer.name])
    values = {result.name: flow.of(result) for operation in program.operations for result in operation.results}
    return ChannelMap(
        program=program,
        sets=flow.sets,
        layers=tuple(flow.layers),
        parameters=flow.parameters,
        values=values,
        assumed=flow.assumed,
        starts=flow.starts,
    )


def _flow(model: nn.Module, literal_places: frozenset[str]) -> Flow:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    owners = Counter(id(tensor) for _, tensor in tensors)
    return Flow(
        modules=dict(model.named_modules(remove_duplicate=False)),
        shared=frozenset(name for name, tensor in tensors if owners[id(tensor)] > 1),
        stored={name: tuple(tensor.shape) for name, tensor in tensors},
        literal_places=literal_places,
    )


def _follow(flow: Flow, operation: Operation) -> None:
    if not operation.operands:
        return
    if any(isinstance(flow.modules.get(caller.path), nn.MultiheadAttention) for caller in operation.callers):
        for value in operation.operands:
            flow.keep(flow.of(value), operation, "ends the chain: nn.MultiheadAttention has a fixed width")
        return
    found = _rule_of(operation)(flow, operation)
    if isinstance(found, list):
        for value, item in zip(operation.results, operation.items, strict=True):
            _put(flow, operation, value, found[item] if item < len(found) else ())
    else:
        for value in operation.results:
            _put(flow, operation, value, found)


def _rule_of(operation: Operation):  # type: ignore[no-untyped-def]  # noqa: ANN202  Rule, known to type checkers only
    if operation.has_graphs or any(value.shape and None in value.shape for value in operation.operands):
        return unknown
    return RULES.get(operation.kind) or (broadcast if operation.pointwise else unknown)


def _put(flow: Flow, operation: Operation, value: Value, axes: Axes) -> None:
    """Note the axes of a result; a rule that is wrong about a shape keeps its channels."""
    shape = value.shape or ()
    sizes = tuple(size if labels is None else len(labels) for labels, size in zip(axes, shape, strict=False))
    if len(axes) == len(shape) and sizes == shape:
        flow.axes[id(value)] = axes
    else:
        unknown(flow, operation)
        flow.keep(axes, operation, "ends the chain: its channels cannot be followed")


@dataclass(frozen=True, eq=False)
class Removal:
    """A choice of channels to remove, as a set of roots of a channel map."""

    channel_map: ChannelMap
    roots: frozenset[int] = field(default_factory=frozenset)

    def removed(self, labels: Labels) -> Labels:
        """The positions of an axis that are removed."""
        found: Labels = np.flatnonzero(self._is_removed[self.channel_map.sets.roots(labels)])
        return found

    @cached_property
    def _is_removed(self) -> NDArray[np.bool_]:
        """Whether each label is the root of a removed set."""
        found = np.zeros(self.channel_map.sets.count, np.bool_)
        found[list(self.roots)] = True
        return found

    def left(self, labels: Labels | None, size: int) -> int:
        """How many positions of an axis are left."""
        return size if labels is None else size - len(self.removed(labels))

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of an activation or parameter after the removal."""
        axes = self.channel_map.parameters.get(value.parameter or "") or self.channel_map.values.get(value.name)
        sizes = tuple(size or 0 for size in value.shape or ())
        if axes is None:
            return sizes
        return tuple(self.left(labels, size) for labels, size in zip(axes, sizes, strict=True))
