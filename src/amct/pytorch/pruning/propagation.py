"""Follows the channels of a model through its captured program: which belong together, and which must stay.

Every parameter starts with channels of its own along each axis; the rule of each operation couples them and says where
they are found in its result. Operations without a rule keep all channels that they read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from amct.errors import ModelError
from amct.pytorch.capture.program_reader import read_program
from amct.pytorch.pruning.balance import balance
from amct.pytorch.pruning.channels import RULES, ChannelMap
from amct.pytorch.pruning.removal import MULTIPLYING
from amct.pytorch.pruning.rules import broadcast, unknown
from amct.pytorch.pruning.user_sizes import UserSizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.pytorch.capture.program_reader import Operation, Program, ProgramTensor
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.pruning.channels import Axes


def program_of(traced: Traced) -> Program:
    """The program of a traced model.

    Raises:
        ModelError: The model could not be captured.
    """
    if traced.program is None:
        raise ModelError(
            f"{type(traced.model).__name__} cannot be pruned, because it cannot be captured as a program: "
            f"{traced.failure}. Express this by operations on tensors"
        )
    return read_program(traced.program)


def map_channels(
    traced: Traced, *, sizes: UserSizes | None = None, kept_layers: Mapping[str, str] | None = None
) -> ChannelMap:
    """Follow the channels of a traced model.

    Where a reshape splits an axis of channels, they can be followed along one of the new axes only. If they are kept
    along that one, or are the width of a head, another one is tried: so whole heads go.

    Args:
        traced: The model.
        sizes: What is known of the sizes in the user's code.
        kept_layers: Layers whose output channels must stay, with the reason.

    Raises:
        ModelError: The model could not be captured.
    """
    program, sizes = program_of(traced), sizes or UserSizes()
    carriers: dict[str, int] = {}
    while True:
        channels = ChannelMap(program, traced.model, sizes, carriers)
        _follow_all(channels, kept_layers or {})
        stuck = _stuck(channels)
        others = {line: number for line in stuck if (number := carriers.get(line, 0) + 1) <= channels.splits[line][1]}
        if not others:
            break
        carriers |= others
    if stuck & set(carriers):  # no other axis is better
        left = {line: number for line, number in carriers.items() if line not in stuck}
        channels = ChannelMap(program, traced.model, sizes, left)
        _follow_all(channels, kept_layers or {})
    return channels


def _follow_all(channels: ChannelMap, kept_layers: Mapping[str, str]) -> None:
    for operation in channels.program.operations:
        _follow(channels, operation)
    _keep_whole_modules(channels)
    for value in channels.program.outputs:
        for labels in channels.of(value):
            channels.sets.keep(labels, "its channels are an output of the model")
    for layer in channels.layers:
        if layer.produces and layer.name in kept_layers:
            channels.sets.keep(layer.outputs, kept_layers[layer.name])
    balance(channels)


def _keep_whole_modules(channels: ChannelMap) -> None:
    """Keep all channels in the calls of modules whose code computes with the sizes of other tensors."""
    operations = channels.program.operations
    for line in sorted(channels.sizes.whole):
        calls = {each.callers[-1].key if each.callers else None for each in operations if each.where == line}
        for operation in operations:
            if None in calls or any(caller.key in calls for caller in operation.callers):
                for value in (*operation.operands, *operation.results):
                    for labels in channels.of(value):
                        channels.sets.keep(labels, f"{line} computes with the size of another tensor")


def _stuck(channels: ChannelMap) -> set[str]:
    """The lines that split an axis so that its channels are kept, or are the width of a head."""
    sets = channels.sets
    widths = sets.roots(np.concatenate([np.zeros(0, np.int64), *channels.head_widths]))
    return {
        line
        for line, (labels, _) in channels.splits.items()
        if line not in channels.sizes.literal
        and (sets.is_kept(labels).all() or np.isin(sets.roots(labels), widths).any())
    }


def _follow(channels: ChannelMap, operation: Operation) -> None:
    if not operation.operands:
        return
    if any(isinstance(channels.modules.get(caller.path), nn.MultiheadAttention) for caller in operation.callers):
        for value in operation.operands:
            channels.keep(channels.of(value), operation, "ends the chain: nn.MultiheadAttention has a fixed width")
        return
    found = _rule_of(operation)(channels, operation)
    if isinstance(found, list):
        for value, item in zip(operation.results, operation.items, strict=True):
            _put(channels, operation, value, found[item] if item < len(found) else ())
    else:
        for value in operation.results:
            _put(channels, operation, value, found)
    if operation.kind not in MULTIPLYING:
        for value in operation.operands:
            channels.inherit(value, operation.results)


def _rule_of(operation: Operation):  # type: ignore[no-untyped-def]  # noqa: ANN202  Rule, known to type checkers only
    if operation.has_graphs or any(value.shape and None in value.shape for value in operation.operands):
        return unknown
    return RULES.get(operation.kind) or (broadcast if operation.pointwise else unknown)


def _put(channels: ChannelMap, operation: Operation, value: ProgramTensor, axes: Axes) -> None:
    """Note the axes of a result; a rule that is wrong about a shape keeps its channels."""
    shape = value.shape or ()
    sizes = tuple(size if labels is None else len(labels) for labels, size in zip(axes, shape, strict=False))
    if len(axes) == len(shape) and sizes == shape:
        channels.axes[id(value)] = axes
    else:
        unknown(channels, operation)
        channels.keep(axes, operation, "ends the chain: its channels cannot be followed")
