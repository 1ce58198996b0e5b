"""Chooses how many channels each cell loses: the least loss for a cost, which is counted exactly.

The loss of a model is taken as the sum of the losses of its cells. Its cost is not such a sum: a layer costs the
product of the channels that it reads and of those that it makes, which belong to two cells. So cells are not chosen one
by one, but step by step: of all cells the next one is that which saves most for what is lost, with the cost of the
whole model counted anew after each step. At the end channels are exchanged between two cells as long as that loses
less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Counts = tuple[int, ...]
    Costs = Callable[[NDArray[np.int64]], NDArray[np.float64]]

_GIVEN = (1, 2, 3, 4, 6, 8)
"""How many steps a cell gets back in an exchange."""
_TAKEN = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""How many steps another one loses for it."""
_AT_ONCE = 256
"""Exchanges whose costs are counted together."""
_MOST = 4096
"""Exchanges that are tried at a time, the best ones."""
_LEAST = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """What is lost with some numbers of sets of one cell.

    Attributes:
        counts: The numbers of sets that may be removed, ascending.
        losses: What is lost with each, never less than with the one before.
    """

    counts: NDArray[np.int64]
    losses: NDArray[np.float64]

    @classmethod
    def through(cls, counts: Sequence[int], places: Sequence[int], losses: Sequence[float]) -> Curve:
        """A curve through some measured places, linear in between; numbers beyond the last place are left out."""
        allowed = np.array([count for count in counts if places[0] <= count <= places[-1]], np.int64)
        rising = np.maximum.accumulate(np.asarray(losses, np.float64))
        return cls(counts=allowed, losses=np.interp(allowed, places, rising))

    def corners(self) -> list[int]:
        """The steps at the corners of the curve's lower hull: between them no number loses less for what it saves."""
        found: list[int] = []
        for step in range(len(self.counts)):
            while len(found) > 1 and self._slope(found[-2], found[-1]) >= self._slope(found[-1], step):
                found.pop()
            found.append(step)
        return found

    def _slope(self, one: int, other: int) -> float:
        return float((self.losses[other] - self.losses[one]) / (self.counts[other] - self.counts[one]))


class Allocation:
    """The steps from the whole model to a budget.

    Args:
        curves: Of each cell.
        costs: The costs of several choices, a row of numbers of removed sets for each.
    """

    def __init__(self, curves: Sequence[Curve], costs: Costs) -> None:
        self._curves, self._costs = curves, costs
        self._corners = [curve.corners() for curve in curves]

    def cost(self, counts: Counts) -> float:
        """What one choice costs."""
        return float(self._costs(np.array([counts], np.int64))[0])

    def loss(self, counts: Counts) -> float:
        """The sum of the losses of the cells."""
        pairs = zip(self._curves, counts, strict=True)
        return float(sum(np.interp(count, curve.counts, curve.losses) for curve, count in pairs))

    def smallest(self) -> Counts:
        """The choice without any set that can be removed."""
        return tuple(int(curve.counts[-1]) for curve in self._curves)

    def reach(self, limit: float) -> Counts | None:
        """The choice that costs at most the limit and loses least; None if none costs so little."""
        steps = self._descended(limit)
        return None if steps is None else self._counts(self._exchanged(steps, limit))

    def _counts(self, steps: NDArray[np.int64]) -> Counts:
        return tuple(int(curve.counts[step]) for curve, step in zip(self._curves, steps, strict=True))

    def _cost_of(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """The costs of choices given as steps, a row for each."""
        columns = [curve.counts[steps[:, cell]] for cell, curve in enumerate(self._curves)]
        return self._costs(np.stack(columns, axis=1))

    def _descended(self, limit: float) -> NDArray[np.int64] | None:
        """The steps of each cell after the best jumps, one after the other, down to the limit."""
        steps = np.zeros(len(self._curves), np.int64)
        cost = float(self._cost_of(steps[None])[0])
        while cost > limit:
            jumps = [
                (cell, next(corner for corner in corners if corner > steps[cell]))
                for cell, corners in enumerate(self._corners)
                if corners[-1] > steps[cell]
            ]
            if not jumps:
                return None
            tried = np.repeat(steps[None], len(jumps), axis=0)
            for row, (cell, corner) in enumerate(jumps):
                tried[row, cell] = corner
            found = self._cost_of(tried)
            lost = [
                self._curves[cell].losses[corner] - self._curves[cell].losses[steps[cell]] for cell, corner in jumps
            ]
            best = int(np.argmax((cost - found) / np.maximum(lost, _LEAST)))
            before, steps, cost = steps, tried[best], float(found[best])
            if cost <= limit:
                steps = self._no_further(before, steps, jumps[best][0], limit)
        return steps

    def _no_further(
        self, before: NDArray[np.int64], after: NDArray[np.int64], cell: int, limit: float
    ) -> NDArray[np.int64]:
        """The last jump, only as far as the limit needs."""
        between = np.repeat(after[None], after[cell] - before[cell], axis=0)
        between[:, cell] = np.arange(before[cell] + 1, after[cell] + 1)
        found: NDArray[np.int64] = between[int(np.argmax(self._cost_of(between) <= limit))]
        return found

    def _exchanged(self, steps: NDArray[np.int64], limit: float) -> NDArray[np.int64]:
        """Give channels back to a cell and take others from another one, as long as less is lost within the limit."""
        while True:
            exchanges = self._exchanges(steps)
            for start in range(0, len(exchanges), _AT_ONCE):
                some = exchanges[start : start + _AT_ONCE]
                fits = np.flatnonzero(self._cost_of(some) <= limit)
                if len(fits):
                    steps = some[fits[0]]
                    break
            else:
                return steps

    def _exchanges(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """All exchanges that lose less, the best first."""
        gains, found = [], []
        for one, own in enumerate(self._curves):
            for back in (each for each in _GIVEN if each <= steps[one]):
                gain = own.losses[steps[one]] - own.losses[steps[one] - back]
                for other, theirs in enumerate(self._curves):
                    for more in (each for each in _TAKEN if steps[other] + each < len(theirs.counts)):
                        lost = theirs.losses[steps[other] + more] - theirs.losses[steps[other]]
                        again = not more and other != (0 if one else 1)  # nothing taken: the same for any other cell
                        if other != one and gain - lost > _LEAST and not again:
                            gains.append(gain - lost)
                            found.append((one, back, other, more))
        order = np.argsort(np.array(gains), kind="stable")[::-1][:_MOST]
        rows = np.repeat(steps[None], len(order), axis=0)
        for row, place in enumerate(order):
            one, back, other, more = found[place]
            rows[row, one] -= back
            rows[row, other] += more
        return rows
