"""The ladder of a search: for every cost the choice of each layer that makes least noise, an exact knapsack.

Every layer gets one of its options. The noise of a model is taken as the sum of the noise of its layers, as it is for
small errors, and its cost as the sum of their costs. Of all combinations only those are kept that no other one beats
in both: layer by layer, so that it takes milliseconds for hundreds of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

MOST_STATES = 100_000
"""Combinations kept at a time; beyond, the one of least noise in each of so many equal steps of the cost."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """What one layer may become.

    Attributes:
        choice: Its name, such as "int8".
        cost: What it adds to the cost of the model.
        noise: What it adds to the noise of the output.
    """

    choice: str
    cost: float
    noise: float


class Ladder:
    """The best combinations, the cheapest first.

    Args:
        options: By layer.
    """

    def __init__(self, options: Mapping[str, Sequence[Option]]) -> None:
        self._options = {name: list(own) for name, own in options.items()}
        self._steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self.costs: NDArray[np.float64] = np.zeros(1)
        self.noises: NDArray[np.float64] = np.zeros(1)
        for own in self._options.values():
            self._add(own)

    def __len__(self) -> int:
        return len(self.costs)

    def _add(self, own: list[Option]) -> None:
        """Combine what was found so far with the options of one more layer."""
        costs = (self.costs[:, None] + np.array([each.cost for each in own])).ravel()
        noises = (self.noises[:, None] + np.array([each.noise for each in own])).ravel()
        order = np.lexsort((noises, costs))
        best = np.minimum.accumulate(noises[order])
        kept = order[np.concatenate([[True], best[1:] < best[:-1]])]
        if len(kept) > MOST_STATES:
            kept = kept[_thinned(costs[kept])]
        self._steps.append((kept // len(own), kept % len(own)))
        self.costs, self.noises = costs[kept], noises[kept]

    def choices(self, rung: int) -> dict[str, str]:
        """What each layer becomes on a rung, 0 for the cheapest."""
        found: dict[str, str] = {}
        for (before, chosen), (name, own) in zip(
            reversed(self._steps), reversed(list(self._options.items())), strict=True
        ):
            found[name] = own[int(chosen[rung])].choice
            rung = int(before[rung])
        return {name: found[name] for name in self._options}

    def quietest_within(self, noise: float) -> int:
        """The cheapest rung with at most this noise; the last one if none has so little."""
        fits = np.flatnonzero(self.noises <= noise * (1 + 1e-9))
        return int(fits[0]) if len(fits) else len(self) - 1


def _thinned(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """The last of the combinations in each step of the cost: of all in it, it has the least noise."""
    width = (costs[-1] - costs[0]) / MOST_STATES
    steps = np.floor((costs - costs[0]) / width).astype(np.int64)
    return np.flatnonzero(np.concatenate([steps[1:] != steps[:-1], [True]]))
