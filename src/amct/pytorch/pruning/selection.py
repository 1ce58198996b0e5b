"""Chooses the channels to remove: cells of channels that the same layers make, their scores, and how many go.

Channels that different layers make (a residual stream) are removed in all of them. A *cell* is a set of such channels
that all have the same makers; a fraction of each cell is removed, so that every layer has about the same fraction left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.numerics.pruning.channels import filter_norms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from amct.pytorch.pruning.propagation import ChannelMap
    from amct.pytorch.pruning.rules.registry import LayerChannels


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """Channels that the same layers make.

    Attributes:
        makers: The layers.
        roots: The sets of channels, from the least to the most important.
        sizes: For each maker: its number of output channels, and how many of them one set has.
    """

    makers: tuple[LayerChannels, ...]
    roots: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]

    def removed(self, ratio: float, align: int) -> int:
        """How many sets to remove: as near to the ratio as the multiple of channels that is left allows."""
        wanted = len(self.roots) * ratio
        possible = [count for count in range(len(self.roots)) if self._aligned(count, align)]
        return min(possible, key=lambda count: (abs(count - wanted), count), default=0)

    def _aligned(self, count: int, align: int) -> bool:
        left = [size - count * each for size, each in self.sizes]
        return all(rest > 0 and rest % align == 0 for rest in left)


def find_cells(channel_map: ChannelMap, weights: Mapping[str, Tensor]) -> tuple[Cell, ...]:
    """The cells of a model whose channels may be removed, in the order of their first makers.

    Args:
        channel_map: The channels of the model.
        weights: Its parameters by name.
    """
    makers = channel_map.producers
    sets = channel_map.sets
    outputs = [sets.roots(maker.outputs) for maker in makers]
    made_by: dict[int, list[int]] = {}
    for number, (maker, roots) in enumerate(zip(makers, outputs, strict=True)):
        for root in np.unique(roots[~sets.is_kept(maker.outputs)]).tolist():
            made_by.setdefault(root, []).append(number)
    cells: dict[tuple[int, ...], list[int]] = {}
    for root, numbers in made_by.items():
        cells.setdefault(tuple(numbers), []).append(root)
    scores = {number: _scores(makers[number], weights) for number in {n for numbers in cells for n in numbers}}
    found = []
    for places, members_of in sorted(cells.items()):
        by_multiplicity = _by_multiplicity(members_of, [outputs[number] for number in places])
        for each, members in by_multiplicity.items():
            ranked = _ranked(members, [(outputs[number], scores[number]) for number in places])
            sizes = tuple((len(outputs[number]), count) for number, count in zip(places, each, strict=True))
            found.append(Cell(makers=tuple(makers[number] for number in places), roots=ranked, sizes=sizes))
    return tuple(found)


def _by_multiplicity(roots: Sequence[int], outputs: Sequence[NDArray[np.int64]]) -> dict[tuple[int, ...], list[int]]:
    """Sets by the number of channels that they have in each maker."""
    counts = [
        dict(zip(*(part.tolist() for part in np.unique(each, return_counts=True)), strict=True)) for each in outputs
    ]
    found: dict[tuple[int, ...], list[int]] = {}
    for root in roots:
        found.setdefault(tuple(count[root] for count in counts), []).append(root)
    return found


def _scores(maker: LayerChannels, weights: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """The norm of each filter of a layer, scaled to [0, 1]."""
    assert maker.weight is not None
    weight = weights[maker.weight].detach().movedim(maker.axes[1], 0)
    norms = filter_norms(weight)
    if len(norms) != len(maker.outputs):  # a grouped transposed convolution: each column is in every group
        norms = norms.repeat(len(maker.outputs) // len(norms))
    spread = torch.clamp(norms.max() - norms.min(), min=torch.finfo(norms.dtype).tiny)
    return np.asarray((norms - norms.min()) / spread)


def _ranked(roots: Sequence[int], makers: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> tuple[int, ...]:
    """Sets by their mean score over the makers, the lowest first."""
    order = np.sort(np.array(roots))
    total = np.zeros(len(order))
    for outputs, scores in makers:
        places = np.searchsorted(order, outputs)
        inside = (places < len(order)) & (order[np.minimum(places, len(order) - 1)] == outputs)
        sums = np.bincount(places[inside], weights=scores[inside], minlength=len(order))
        total += sums / np.maximum(np.bincount(places[inside], minlength=len(order)), 1)
    return tuple(int(root) for root in order[np.argsort(total, kind="stable")])


def choose(cells: Sequence[Cell], ratio: Callable[[Cell], float], align: Callable[[Cell], int]) -> frozenset[int]:
    """The sets to remove when each cell loses about its ratio, and a multiple of channels is left."""
    return frozenset(root for cell in cells for root in cell.roots[: cell.removed(ratio(cell), align(cell))])
