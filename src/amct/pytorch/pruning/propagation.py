"""Follows the channels of a model through its captured program: which belong together, and which must stay.

Every parameter starts with channels of its own along each axis; the rule of each operation couples them and says where
they are found in its result. Operations without a rule keep all channels that they read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from amct.errors import ModelError
from amct.pytorch.capture.program_reader import read_program
from amct.pytorch.pruning.channels import RULES, ChannelMap
from amct.pytorch.pruning.rules import broadcast, unknown

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
    channels = ChannelMap(program_of(traced), traced.model, literal_places)
    for operation in channels.program.operations:
        _follow(channels, operation)
    for value in channels.program.outputs:
        for labels in channels.of(value):
            channels.sets.keep(labels, "its channels are an output of the model")
    for layer in channels.layers:
        if kept_layers and layer.produces and layer.name in kept_layers:
            channels.sets.keep(layer.outputs, kept_layers[layer.name])
    return channels


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
