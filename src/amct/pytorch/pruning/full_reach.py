"""Pruning with full reach: channels are followed through every operation that has a rule.

The cut model is captured again and compared with the prediction. A line of user code that turns out to have a literal
size ends the chain there, and the choice is made anew.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.errors import ModelError
from amct.model import Skip
from amct.pytorch.pruning.chain_records import chain_records
from amct.pytorch.pruning.compensation import compensate, ranked_by_data
from amct.pytorch.pruning.compression import measured
from amct.pytorch.pruning.costs import Cost, cost_of
from amct.pytorch.pruning.cutting import cut_channels
from amct.pytorch.pruning.propagation import ChannelMap, Removal, map_channels
from amct.pytorch.pruning.selection import Cell, choose, find_cells
from amct.pytorch.pruning.verification import find_fault
from amct.pytorch.user_model import copy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.pruning.measuring.input_moments import InputMoments
    from amct.record import PruneRecord

logger = logging.getLogger(__name__)

ALIGN = 8
LARGEST_RATIO = 0.95
_SEARCH_STEPS = 7


@dataclass(frozen=True, kw_only=True, eq=False)
class Pruned:
    """A model without the channels that were removed.

    Attributes:
        model: The cut copy.
        chains: What was removed.
        skips: Every layer that keeps all its channels, with the reason.
        channels: The numbers of output channels of every layer that makes channels, before and after.
        before: The cost of the whole model.
        after: The cost of the cut model.
        removal: The channels that were removed.
    """

    model: nn.Module
    chains: tuple[PruneRecord, ...]
    skips: tuple[Skip, ...]
    channels: Mapping[str, tuple[int, int]]
    before: Cost
    after: Cost
    removal: Removal


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """How much to remove.

    Attributes:
        ratio: The fraction of the channels that a cell loses.
        flops: In place of the ratio: the fraction of the MACs that is left.
        align: The numbers of channels that are left are multiples of this, for each cell.
        kept: Layers that keep their channels, with the reason.
    """

    ratio: Callable[[Cell], float]
    flops: float | None = None
    align: Callable[[Cell], int] = lambda _: ALIGN
    kept: Mapping[str, str]


def prune_fully(traced: Traced, wanted: Wanted, batches: Iterable[Arguments] = ()) -> Pruned:
    """Remove channels from a copy of a traced model.

    With batches, the channels are chosen whose absence the layers behind them can make up for best, and these are
    fitted so that they do.

    Raises:
        ModelError: The model cannot be captured or copied, or the cut copy does not run.
    """
    literal: frozenset[str] = frozenset()
    moments: dict[str, InputMoments] | None = None
    while True:
        channel_map = map_channels(traced, literal_places=literal, kept_layers=wanted.kept)
        if moments is None:
            moments = measured(traced, {layer.name for layer in channel_map.layers}, batches)
        cells = find_cells(channel_map, dict(traced.model.named_parameters(remove_duplicate=False)))
        cells = ranked_by_data(cells, channel_map, traced.model, moments)
        removal = Removal(channel_map, _chosen(channel_map, cells, wanted, traced.model))
        modules = dict(traced.model.named_modules(remove_duplicate=False))
        chains = chain_records(removal, cells, modules)
        model = copy_model(traced.model)
        cut_channels(model, chains)
        fault = find_fault(model, traced.inputs, removal) if chains else None
        if fault is None:
            model = copy_model(traced.model)
            compensate(model, chains, moments)
            cut_channels(model, chains)
            return _result(traced, model, chains, removal, cells, wanted)
        found = fault.literal_places(removal) - literal
        if not found:
            raise ModelError(f"{type(model).__name__} does not run without the channels that were removed: {fault}")
        logger.info("literal sizes end a chain: %s", ", ".join(sorted(found)) or fault)
        literal |= found


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


def _chosen(channel_map: ChannelMap, cells: Sequence[Cell], wanted: Wanted, model: nn.Module) -> frozenset[int]:
    if wanted.flops is None:
        return choose(channel_map, cells, wanted.ratio, wanted.align)
    stored = _shapes(model)
    limit = cost_of(channel_map, stored).macs * wanted.flops
    low, high = 0.0, LARGEST_RATIO
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        roots = choose(channel_map, cells, lambda _, ratio=middle: ratio, wanted.align)  # type: ignore[misc]  # bound per step
        enough = cost_of(channel_map, stored, Removal(channel_map, roots)).macs <= limit
        low, high = (low, middle) if enough else (middle, high)
    roots = choose(channel_map, cells, lambda _: high, wanted.align)
    left = cost_of(channel_map, stored, Removal(channel_map, roots)).macs
    if left > limit:
        logger.warning("more than %.0f %% of the MACs are left: no more channels can be removed", 100 * wanted.flops)
    return roots


def _result(
    traced: Traced,
    model: nn.Module,
    chains: Sequence[PruneRecord],
    removal: Removal,
    cells: Sequence[Cell],
    wanted: Wanted,
) -> Pruned:
    channel_map, stored = removal.channel_map, _shapes(traced.model)
    channels, skips = {}, []
    for maker in channel_map.producers:
        count = len(maker.outputs)
        channels[maker.name] = (count, removal.left(maker.outputs, count))
        if channels[maker.name][1] == count:
            reason = channel_map.sets.reason(maker.outputs) or _too_few(maker.name, cells, wanted)
            skips.append(Skip(maker.name, reason))
    return Pruned(
        model=model,
        chains=tuple(chains),
        skips=tuple(skips),
        channels=channels,
        before=cost_of(channel_map, stored),
        after=cost_of(channel_map, stored, removal),
        removal=removal,
    )


def _too_few(name: str, cells: Sequence[Cell], wanted: Wanted) -> str:
    for cell in cells:
        place = next((number for number, maker in enumerate(cell.makers) if maker.name == name), None)
        if place is not None:
            count, align = cell.sizes[place][0], wanted.align(cell)
            return f"rounded to a multiple of {align}, all of its {count} channels are left"
    return "its channels cannot be removed"
