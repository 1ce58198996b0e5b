"""Pruning with full reach: channels are followed through every operation that has a rule.

The cut model is captured again, and every tensor must have the shape that the channel map predicts. A size that the
user's code computes from its tensors (``x.shape[1] // 2``) looks in a captured program like a literal; in the program
of the cut model a computed size has changed and a literal one has not. A line with a literal size ends the chain there,
and the choice is made anew.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from amct.errors import ModelError
from amct.model import Skip
from amct.pytorch.capture.program import CaptureFailure, capture
from amct.pytorch.capture.program_reader import read_program
from amct.pytorch.pruning.compensation import compensate, measure_inputs, ranked_by_data
from amct.pytorch.pruning.cutting import chain_records, cut_channels
from amct.pytorch.pruning.propagation import map_channels
from amct.pytorch.pruning.removal import Removal, cost_of
from amct.pytorch.pruning.selection import ChannelCell, choose, find_cells
from amct.pytorch.pruning.user_sizes import UserSizes
from amct.pytorch.user_model import copy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from amct.pytorch.capture.program_reader import Operation
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.inputs import ExampleInputs
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.pruning.channels import ChannelMap
    from amct.pytorch.pruning.compensation import InputMoments
    from amct.record import PruneRecord


logger = logging.getLogger(__name__)

LARGEST_RATIO = 0.95
_LAYOUT = frozenset({"alias", "clone", "contiguous"})
"""Operations that a captured program has only if a tensor's layout needs them."""
_VIEWS = dict.fromkeys(("_unsafe_view", "view"), "reshape")
"""Operations of which a captured program has one or the other, as a tensor's layout needs."""
_SEARCH_STEPS = 7


@dataclass(frozen=True, kw_only=True, eq=False)
class Pruned:
    """A model without the channels that were removed.

    Attributes:
        model: The cut copy.
        chains: What was removed.
        skips: Every layer that keeps all its channels, with the reason.
        channels: The numbers of output channels of every layer that makes channels, before and after.
        before: The channels of the whole model.
        after: Those of the cut model.
    """

    model: nn.Module
    chains: Sequence[PruneRecord]
    skips: Sequence[Skip]
    channels: Mapping[str, tuple[int, int]]
    before: Removal
    after: Removal


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """How much to remove.

    Attributes:
        ratio: The fraction of the channels that a cell loses.
        flops: In place of the ratio: the fraction of the MACs that is left.
        align: The numbers of channels that are left are multiples of this, for each cell.
        kept: Layers that keep their channels, with the reason.
    """

    ratio: Callable[[ChannelCell], float]
    flops: float | None = None
    align: Callable[[ChannelCell], int]
    kept: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reached:
    """What a choice of channels can be made of.

    Attributes:
        channel_map: The channels of the model.
        cells: Those that may be removed, in the order in which they go.
        moments: What was measured of the inputs of layers.
        sizes: What is known of the sizes in the user's code.
    """

    channel_map: ChannelMap
    cells: Sequence[ChannelCell]
    moments: Mapping[str, InputMoments]
    sizes: UserSizes


def prune_fully(traced: Traced, wanted: Wanted, batches: Iterable[Arguments] = ()) -> Pruned:
    """Remove channels from a copy of a traced model.

    With batches, the channels are chosen whose absence the layers behind them can make up for best, and these are
    fitted so that they do.

    Raises:
        ModelError: The model cannot be captured or copied, or the cut copy does not run.
    """
    return cut_chosen(traced, wanted, lambda found: _chosen(found.channel_map, found.cells, wanted), batches)[0]


def cut_chosen(
    traced: Traced,
    wanted: Wanted,
    choice: Callable[[Reached], Removal],
    batches: Iterable[Arguments] = (),
    sizes: UserSizes | None = None,
) -> tuple[Pruned, UserSizes]:
    """Remove the channels of a choice, which is made anew whenever a size does not follow as was assumed.

    Args:
        traced: The model.
        wanted: Which layers stay, and how numbers of channels are rounded.
        choice: What goes.
        batches: To fit layers to.
        sizes: What is known of the sizes in the user's code.

    Returns:
        The cut model, and what is known of the sizes then.

    Raises:
        ModelError: The model cannot be captured or copied, or the cut copy does not run.
    """
    moments: dict[str, InputMoments] | None = None
    sizes = sizes or UserSizes()
    while True:
        channel_map = map_channels(traced, sizes=sizes, kept_layers=wanted.kept)
        if moments is None:
            moments = measure_inputs(traced.model, {layer.name for layer in channel_map.layers}, batches)
        cells = ranked_by_data(find_cells(channel_map), channel_map, moments)
        removal = choice(Reached(channel_map=channel_map, cells=cells, moments=moments, sizes=sizes))
        chains = chain_records(removal, cells)
        model = copy_model(traced.model)
        cut_channels(model, chains)
        fault = _find_fault(model, traced.inputs, removal) if chains else None
        if fault is None:
            model = copy_model(traced.model)
            compensate(model, chains, moments)
            cut_channels(model, chains)
            return _result(model, chains, removal, cells, wanted), sizes
        logger.info("a size does not follow the channels: %s", fault)
        places = fault.places(removal)
        if places:
            sizes = sizes.after_fault(places, channel_map)
        elif fault.where and fault.where not in sizes.whole:
            sizes = replace(sizes, whole=sizes.whole | {fault.where})
        else:
            raise ModelError(f"{type(model).__name__} does not run without the channels that were removed: {fault}")


def _chosen(channel_map: ChannelMap, cells: Sequence[ChannelCell], wanted: Wanted) -> Removal:
    if wanted.flops is None:
        return choose(channel_map, cells, wanted.ratio, wanted.align)
    limit = cost_of(Removal(channel_map)).macs * wanted.flops
    low, high = 0.0, LARGEST_RATIO
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        removal = choose(channel_map, cells, lambda _, ratio=middle: ratio, wanted.align)  # type: ignore[misc]  # bound per step
        low, high = (low, middle) if cost_of(removal).macs <= limit else (middle, high)
    removal = choose(channel_map, cells, lambda _: high, wanted.align)
    if cost_of(removal).macs > limit:
        logger.warning("more than %.0f %% of the MACs are left: no more channels can be removed", 100 * wanted.flops)
    return removal


def _result(
    model: nn.Module, chains: Sequence[PruneRecord], removal: Removal, cells: Sequence[ChannelCell], wanted: Wanted
) -> Pruned:
    channel_map = removal.channel_map
    channels, skips = {}, []
    for maker in channel_map.producers:
        count = len(maker.outputs)
        channels[maker.name] = (count, removal.left(maker.outputs, count))
        if channels[maker.name][1] == count:
            reason = channel_map.sets.reason(maker.outputs) or _too_few(maker.name, cells, wanted)
            skips.append(Skip(maker.name, reason))
    before = Removal(channel_map)
    return Pruned(model=model, chains=chains, skips=skips, channels=channels, before=before, after=removal)


def _too_few(name: str, cells: Sequence[ChannelCell], wanted: Wanted) -> str:
    for cell in cells:
        place = next((number for number, maker in enumerate(cell.makers) if maker.name == name), None)
        if place is not None:
            count, align = cell.sizes[place][0], wanted.align(cell)
            return f"rounded to a multiple of {align}, all of its {count} channels are left"
    return "its channels cannot be removed"


def _find_fault(model: nn.Module, inputs: ExampleInputs, removal: Removal) -> _Fault | None:
    """Capture a cut model and compare it with the prediction; None if it is as predicted."""
    program = capture(model, inputs)
    if isinstance(program, CaptureFailure):
        return _Fault(str(program), program.where)
    expected, found = (
        [each for each in operations if each.kind not in _LAYOUT]
        for operations in (removal.channel_map.program.operations, read_program(program).operations)
    )
    for before, after in zip(expected, found, strict=False):
        if _VIEWS.get(before.kind, before.kind) != _VIEWS.get(after.kind, after.kind):
            return _Fault(f"the cut model computes {after.kind} in place of {before.kind}", before.where)
        for one, other in zip(before.results, after.results, strict=False):
            if removal.shape(one) != other.shape:
                return _Fault(
                    f"{before.kind} returns the shape {other.shape}, expected {removal.shape(one)}", before.where
                )
        if not _same_start(before, after, removal):
            return _Fault(f"{before.kind} starts at a literal channel", before.where)
        if before.pointwise and _numbers(before) != _numbers(after):
            return _Fault(f"{before.kind} computes with another number", before.where, of_number=True)
    if len(expected) != len(found):
        return _Fault(f"the cut model has {len(found)} operations, expected {len(expected)}", "")
    return None


def _same_start(before: Operation, after: Operation, removal: Removal) -> bool:
    """Whether a slice of channels starts where the channels in front of it end."""
    front = removal.channel_map.starts.get(before.name)
    if front is None:
        return True
    start = int((after.arguments[2] if len(after.arguments) > 2 else 0) or 0)
    if start < 0:
        start += after.arguments[0].shape[after.arguments[1]]
    return start == removal.left(front, len(front))


def _numbers(operation: Operation) -> list[object]:
    return [each for each in operation.settings if isinstance(each, (int, float))]


@dataclass(frozen=True)
class _Fault:
    """What is wrong with a cut model, and the line of user code; ``of_number`` if it computes with a number."""

    text: str
    where: str
    of_number: bool = False

    def __str__(self) -> str:
        return f"{self.text}{f' ({self.where})' if self.where else ''}"

    def places(self, removal: Removal) -> frozenset[str]:
        """The lines whose sizes do not follow: that of the fault, or all that the removal depends on.

        There are none where the line of the fault is known to be literal: then its size is that of another tensor.
        """
        channel_map = removal.channel_map
        followed = {
            place
            for place, calls in channel_map.followed.items()
            if any(len(removal.removed(labels)) for _, labels in calls)
        }
        literal = self.where in channel_map.sizes.literal
        if self.where in followed or (self.of_number and not literal):
            return frozenset({self.where})
        return frozenset() if literal and self.where not in channel_map.sizes.whole else frozenset(followed)
