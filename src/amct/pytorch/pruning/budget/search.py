"""The search: what each cell loses with its channels, the ladder down to the budget, and measured corrections.

Each cell alone is measured with a few numbers of channels removed; that gives its curve. The curves are those of an
otherwise whole model. Where much is removed at once, a cell matters more or less than alone. So the choice at the end
of the ladder is measured itself, with each cell a little larger and a little smaller; the curves through these three
places give the next choice, and so on as long as that loses less.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from amct import log
from amct.errors import SearchError
from amct.pytorch.pruning.budget.allocation import Allocation, Curve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.pruning.budget.allocation import Costs, Counts
    from amct.pytorch.pruning.budget.probes import Probes

logger = logging.getLogger(__name__)

PLACES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)
"""The shares of its sets without which each cell is measured."""
ROUNDS = 2
"""How often the choice is corrected, at most."""
STEP = 1 / 8
"""How far a correction goes, as a share of a cell's sets."""
WORTH = 0.97
"""A correction that loses more than this share of what the choice before loses is the last one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """A choice, and what it costs and loses.

    Attributes:
        counts: How many sets each cell loses.
        cost: In the unit of the budget.
        lost: Measured.
    """

    counts: Counts
    cost: float
    lost: float


class BudgetSearch:
    """One search.

    Args:
        probes: Measures what is lost.
        options: The numbers of sets that each cell may lose.
        costs: The costs of choices.
    """

    def __init__(self, probes: Probes, options: Sequence[Sequence[int]], costs: Costs) -> None:
        self._probes, self._options, self._costs = probes, options, costs
        self._curves = self._alone()
        self._alone_allocation = Allocation(self._curves, costs)

    def _alone(self) -> list[Curve]:
        """The curve of each cell of the otherwise whole model."""
        curves = []
        with log.bar("Measuring layers", len(self._options)) as advance:
            for cell, options in enumerate(self._options):
                places = sorted(
                    {0, *(_nearest(options, len(self._probes.cells[cell].roots) * share) for share in PLACES)}
                )
                losses = [self._probes.lost(self._with(cell, place)) for place in places]
                curves.append(Curve.through(options, *_finite(places, losses)))
                advance(1)
        return curves

    def _with(self, cell: int, count: int) -> Counts:
        return tuple(count if place == cell else 0 for place in range(len(self._options)))

    def smallest_cost(self) -> float:
        """The least that a choice can cost."""
        return self._alone_allocation.cost(self._alone_allocation.smallest())

    def rung(self, limit: float) -> Counts:
        """The best choice within a limit as far as the cells alone tell.

        Raises:
            SearchError: No choice costs so little.
        """
        found = self._alone_allocation.reach(limit)
        if found is None:
            raise SearchError(f"no choice costs less than {self.smallest_cost():.4g}, wanted {limit:.4g}")
        return found

    def cost(self, counts: Counts) -> float:
        """What a choice costs."""
        return self._alone_allocation.cost(counts)

    def found(self, counts: Counts) -> Found:
        """A choice with what it costs and loses."""
        return Found(counts=counts, cost=self.cost(counts), lost=self._probes.lost(counts))

    def corrected(self, limit: float) -> Found:
        """The best choice within a limit, corrected by what is lost around it.

        Raises:
            SearchError: No choice costs so little.
        """
        best = self.found(self.rung(limit))
        for number in range(ROUNDS):
            around = self._around(best, f"Correcting, round {number + 1} of {ROUNDS}")
            counts = Allocation(around, self._costs).reach(limit)
            if counts is None or counts == best.counts:
                break
            other = self.found(counts)
            logger.info("correction %d: loses %.4g in place of %.4g", number + 1, other.lost, best.lost)
            worth = other.lost < WORTH * best.lost
            best = min(best, other, key=lambda each: each.lost)
            if not worth:
                break
        return best

    def _around(self, found: Found, text: str) -> list[Curve]:
        """The curve of each cell near a choice."""
        curves = []
        with log.bar(text, len(self._options)) as advance:
            for cell, options in enumerate(self._options):
                count, size = found.counts[cell], len(self._probes.cells[cell].roots)
                lower = _nearest([each for each in options if each <= count], count - STEP * size)
                upper = _nearest([each for each in options if each >= count], count + STEP * size)
                upper = min(upper, int(self._curves[cell].counts[-1]))
                places = sorted({min(lower, count), count, max(upper, count)})
                losses = [
                    self._probes.lost((*found.counts[:cell], place, *found.counts[cell + 1 :])) for place in places
                ]
                curves.append(Curve.through(options, *_finite(places, losses)))
                advance(1)
        return curves


def _nearest(options: Sequence[int], wanted: float) -> int:
    return min(options, key=lambda each: (abs(each - wanted), each))


def _finite(places: Sequence[int], losses: Sequence[float]) -> tuple[Sequence[int], Sequence[float]]:
    """The places up to the first one whose loss is no finite number."""
    whole = np.isfinite(losses)
    count = len(losses) if whole.all() else max(1, int(np.argmin(whole)))
    return places[:count], losses[:count]
