"""Chooses the channels to remove: cells of channels that the same layers make, their scores, and how many go.

Channels that different layers make (a residual stream) are removed in all of them. A *cell* is a set of such channels
that all have the same makers; a fraction of each cell is removed, rounded to a number that kernels are fast with.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from amct.pytorch.pruning.balance import maker_norms
from amct.pytorch.pruning.removal import Removal, RemovalCosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from amct.pytorch.pruning.channels import ChannelMap, LayerChannels


_SMALLEST = float(np.finfo(np.float64).tiny)
_SAME_COUNT = 0.5
"""A number of channels that is nearer than this to the ratio is the ratio's."""
PREFERRED = 16
"""A multiple of this many channels fills the blocks of all kernels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelCell:
    """Channels that the same layers make.

    Attributes:
        makers: The layers.
        roots: The sets of channels, from the least to the most important.
        sizes: For each maker: its number of output channels, and how many of them one set has.
        losses: What is lost with each set, in the order of the sets: the share of the power of its filters, or of the
            power of the outputs of the layers that read it, added up over the layers.
    """

    makers: tuple[LayerChannels, ...]
    roots: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    losses: tuple[float, ...]

    def options(self, ratio: float, align: int) -> list[int]:
        """The numbers of sets that may be removed, ascending: next to the ratio, leaving a multiple of channels.

        A number that leaves a multiple of 16 is also next to the ratio if no more than ``align`` channels are between.
        Where channels are coupled so that no number of them leaves a multiple, it is one of half as many channels.
        """
        wanted = len(self.roots) * ratio
        if align == 1:
            return [min(round(wanted), len(self.roots) - 1)]
        possible = self._leaving(align)
        if not any(possible) and min(size for size, _ in self.sizes) > align:
            return self.options(ratio, align // 2 if align % 2 == 0 else 1)
        below, above = ([count for count in possible if (count > wanted) is side] for side in (False, True))
        found = {*below[-1:], *above[:1]}
        exact = [count for count in found if abs(count - wanted) < _SAME_COUNT]
        channels = max(each for _, each in self.sizes)
        if PREFERRED % align == 0:
            near = (count for count in self._leaving(PREFERRED) if abs(count - wanted) * channels <= align)
            found.update(near)
        return exact or sorted(found) or [0]

    def removable(self, align: int) -> list[int]:
        """All numbers of sets that may be removed so that a multiple of channels is left; 0 is the first."""
        found = self._leaving(align)
        if not any(found) and align > 1 and min(size for size, _ in self.sizes) > align:
            return self.removable(align // 2 if align % 2 == 0 else 1)  # coupled so that no number leaves a multiple
        return found if found[:1] == [0] else [0, *found]

    def _leaving(self, align: int) -> list[int]:
        """The numbers of sets without which every maker has a multiple of channels."""

        def fits(count: int) -> bool:
            left = [size - count * each for size, each in self.sizes]
            return all(rest > 0 and rest % align == 0 for rest in left)

        return [count for count in range(len(self.roots)) if fits(count)]


def find_cells(channel_map: ChannelMap) -> tuple[ChannelCell, ...]:
    """The cells of a model whose channels may be removed, in the order of their first makers."""
    makers = channel_map.producers
    sets = channel_map.sets
    outputs = [sets.roots(maker.outputs) for maker in makers]
    made_by: dict[int, list[int]] = {}
    for number, (maker, roots) in enumerate(zip(makers, outputs, strict=True)):
        for root in np.unique(roots[~sets.is_kept(maker.outputs)]).tolist():
            made_by.setdefault(root, []).append(number)
    groups: dict[tuple[int, ...], list[int]] = {}
    for root, numbers in made_by.items():
        groups.setdefault(tuple(numbers), []).append(root)
    norms = {number: maker_norms(channel_map, makers[number]) for places in groups for number in places}
    found = []
    for places, members in sorted(groups.items()):
        made = [_Made(makers[number], outputs[number], norms[number]) for number in places]
        counts = np.stack([each.summed(members) for each in made], axis=1).astype(int).tolist()
        by_count: dict[tuple[int, ...], list[int]] = {}
        for root, count in zip(members, counts, strict=True):
            by_count.setdefault(tuple(count), []).append(root)
        found += [_cell(made, own, each) for each, own in by_count.items()]
    return tuple(found)


@dataclass(frozen=True, eq=False)
class _Made:
    """A layer of a cell: the set of each of its output channels, and the norms of their filters."""

    layer: LayerChannels
    outputs: NDArray[np.int64]
    norms: NDArray[np.float64]

    def summed(self, members: Sequence[int], values: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """The sum of some values of the channels in each of some sets, given ascending; without any their number."""
        sets = np.array(members)
        places = np.searchsorted(sets, self.outputs)
        inside = (places < len(sets)) & (sets[np.minimum(places, len(sets) - 1)] == self.outputs)
        weights = None if values is None else values[inside]
        return np.bincount(places[inside], weights=weights, minlength=len(sets)).astype(np.float64)

    @property
    def scores(self) -> NDArray[np.float64]:
        """The norms scaled to [0, 1]."""
        lowest, highest = self.norms.min(), self.norms.max()
        scaled: NDArray[np.float64] = (self.norms - lowest) / max(float(highest - lowest), _SMALLEST)
        return scaled

    @property
    def powers(self) -> NDArray[np.float64]:
        """The share of the power of all filters that each has."""
        powers: NDArray[np.float64] = self.norms**2 / max(float((self.norms**2).sum()), _SMALLEST)
        return powers


def _cell(made: Sequence[_Made], members: Sequence[int], counts: Sequence[int]) -> ChannelCell:
    """A cell of sets with so many channels in each layer: ordered by their mean score over the layers."""
    scores, losses = np.zeros(len(members)), np.zeros(len(members))
    for each, count in zip(made, counts, strict=True):
        scores += each.summed(members, each.scores) / count
        losses += each.summed(members, each.powers)
    order = np.argsort(scores, kind="stable")
    return ChannelCell(
        makers=tuple(each.layer for each in made),
        roots=tuple(np.array(members)[order].tolist()),
        sizes=tuple((len(each.outputs), count) for each, count in zip(made, counts, strict=True)),
        losses=tuple(losses[order].tolist()),
    )


def choose(
    channel_map: ChannelMap,
    cells: Sequence[ChannelCell],
    ratio: Callable[[ChannelCell], float],
    align: Callable[[ChannelCell], int],
) -> Removal:
    """What is removed when each cell loses about its ratio, and a multiple of channels is left.

    A cell's number of channels is rounded up or down so that the whole model has about the MACs that the ratios give
    without rounding. Those cells are rounded down that save most time for what is lost with their channels.
    """
    options = [cell.options(ratio(cell), align(cell)) for cell in cells]
    chosen = [each[0] for each in options]
    if any(len(each) > 1 for each in options):
        costs = RemovalCosts(channel_map, [cell.roots for cell in cells])
        wanted = float(costs.macs(np.array([ratio(cell) for cell in cells])))
        chosen = _Rounding(cells, options, costs).reach(wanted)
    roots = frozenset(root for cell, count in zip(cells, chosen, strict=True) for root in cell.roots[:count])
    return Removal(channel_map, roots)


class _Rounding:
    """Rounds the numbers of removed sets: all begin with the fewest, and one after the other takes its next option."""

    def __init__(self, cells: Sequence[ChannelCell], options: Sequence[Sequence[int]], costs: RemovalCosts) -> None:
        self.cells, self.options, self.costs = cells, options, costs
        self.steps = [0] * len(cells)
        self.shares = np.array([self._share(number, 0) for number in range(len(cells))])

    def _share(self, cell: int, step: int) -> float:
        return self.options[cell][step] / len(self.cells[cell].roots)

    def reach(self, macs: float) -> list[int]:
        """Remove more until the MACs are as near to the wanted ones as the options allow."""
        queue = [(-self._gain(cell), cell) for cell in range(len(self.cells)) if len(self.options[cell]) > 1]
        heapq.heapify(queue)
        left = float(self.costs.macs(self.shares))
        while queue and left > macs:
            _, cell = heapq.heappop(queue)
            gain = self._gain(cell)
            if queue and gain < -queue[0][0]:  # another cell's step has changed it
                heapq.heappush(queue, (-gain, cell))
                continue
            before = self.shares.copy()
            self.shares[cell] = self._share(cell, self.steps[cell] + 1)
            after = float(self.costs.macs(self.shares))
            if macs - after > left - macs:  # it was nearer before
                self.shares = before
                continue
            left = after
            self.steps[cell] += 1
            if self.steps[cell] + 1 < len(self.options[cell]):
                heapq.heappush(queue, (-self._gain(cell), cell))
        return [options[step] for options, step in zip(self.options, self.steps, strict=True)]

    def _gain(self, cell: int) -> float:
        """The time that a cell's next step saves, for what is lost with its channels."""
        more = self.shares.copy()
        more[cell] = self._share(cell, self.steps[cell] + 1)
        first, last = (self.options[cell][self.steps[cell] + step] for step in (0, 1))
        lost = sum(self.cells[cell].losses[first:last])
        return float(self.costs.work(self.shares) - self.costs.work(more)) / max(lost, _SMALLEST)
