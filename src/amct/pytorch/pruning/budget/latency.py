"""Finds the choice that takes a share of the time of the whole model, as measured in onnxruntime.

Time is not counted but measured, of whole files: an operation of a file costs less than its operations alone, and what
is not an operation of a layer costs too. The search is therefore made for the work of kernels, and how much work may be
left is corrected by the time that its result takes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from amct.errors import SearchError

if TYPE_CHECKING:
    from amct.pytorch.pruning.budget.allocation import Counts
    from amct.pytorch.pruning.budget.probes import Probes
    from amct.pytorch.pruning.budget.search import BudgetSearch
    from amct.pytorch.pruning.timing import Stopwatch

logger = logging.getLogger(__name__)

NEAR = 0.04
"""How far below the budget the time may be, as a share of it."""
TRIES = 7
_CLOSE = 1e-3
_FASTER = 0.9
"""Where all are too slow, the next one has less than this share of the work."""


class LatencySearch:
    """Reaches a share of the time of the whole model.

    Args:
        search: The search, whose costs are the work of kernels.
        probes: Its models.
        stopwatch: Times them.
    """

    def __init__(self, search: BudgetSearch, probes: Probes, stopwatch: Stopwatch) -> None:
        self._search, self._probes, self._stopwatch = search, probes, stopwatch
        self._times: dict[Counts, float] = {}

    def time(self, counts: Counts) -> float:
        """The time of a choice as a share of the whole model's; measured once."""
        if counts not in self._times:
            whole, pruned = self._stopwatch.seconds(self._probes.model(counts))
            self._times[counts] = pruned / whole
        return self._times[counts]

    def reach(self, share: float, work: float) -> Counts:
        """The choice that takes at most a share of the time, and hardly less.

        Args:
            share: Of the whole model's time.
            work: The work of the whole model.

        Raises:
            SearchError: No choice takes so little time.
        """
        slow, fast = (1.0, 1.0), (0.0, 0.0)  # shares of the work and of the time; nothing takes no time, at first
        least = self._search.smallest_cost() / work
        for number in range(TRIES):
            limit = max(least, _between(slow, fast, share * (1 - NEAR / 2)))
            time = self.time(self._search.rung(limit * work))
            logger.info("try %d: %.1f %% of the work takes %.1f %% of the time", number + 1, 100 * limit, 100 * time)
            if time > share and limit <= least:
                raise SearchError(
                    f"latency: expected at least {time:.3f}, got {share:g}: without every channel that can be removed "
                    "the model still takes so much of its time"
                )
            slow, fast = (slow, (limit, time)) if time <= share else ((limit, time), fast)
            if share * (1 - NEAR) <= time <= share or slow[0] - fast[0] < _CLOSE:
                break
        if fast[0] == 0.0:
            raise SearchError(f"latency: {share:g} was not reached in {TRIES} tries; the fastest took {slow[1]:.3f}")
        better = self._search.corrected(fast[0] * work).counts
        return better if self.time(better) <= share else self._search.rung(fast[0] * work)


def _between(slow: tuple[float, float], fast: tuple[float, float], wanted: float) -> float:
    """The share of the work that probably takes a share of the time, on a line through what is known.

    As long as nothing is fast enough, the line goes through the whole model.
    """
    if fast[0] == 0.0 and slow[1] < 1.0:
        slope = (1 - slow[0]) / (1 - slow[1])
        return min(slow[0] + slope * (wanted - slow[1]), _FASTER * slow[0])
    return fast[0] + (slow[0] - fast[0]) * (wanted - fast[1]) / max(slow[1] - fast[1], 1e-9)
