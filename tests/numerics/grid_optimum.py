"""The best centres on an integer grid: the iterations of ``snq`` are measured by them.

Found by dynamic programming: the cost is a sum over neighbouring pairs of centres, so the cheapest chain of n centres
is found by extending the cheapest chains of n - 1.
"""

from __future__ import annotations

import numpy as np

from amct.numerics.counts.compiled import compiled
from amct.numerics.snq import LIMIT, Floats, Integers, _left_cost, _pair_cost, _right_cost


@compiled
def optimal_centres(moments: Floats, clusters: int) -> Integers:
    """Return the ``clusters`` different integers with the least total cost, ascending."""
    count = 2 * LIMIT + 1
    pair = np.empty((count, count))
    for high in range(count):
        for low in range(high):
            pair[high, low] = _pair_cost(moments, low - LIMIT, high - LIMIT)
    best = np.empty(count)
    for last in range(count):
        best[last] = _left_cost(moments, last - LIMIT)
    before = np.zeros((clusters, count), np.int64)
    for chain in range(1, clusters):
        longer = np.full(count, np.inf)
        for last in range(chain, count):
            for previous in range(chain - 1, last):
                cost = best[previous] + pair[last, previous]
                if cost < longer[last]:
                    longer[last] = cost
                    before[chain, last] = previous
        best = longer
    for last in range(clusters - 1, count):
        best[last] += _right_cost(moments, last - LIMIT)
    centres = np.empty(clusters, np.int64)
    chosen = np.argmin(best[clusters - 1 :]) + clusters - 1
    for chain in range(clusters - 1, -1, -1):
        centres[chain] = chosen - LIMIT
        chosen = before[chain, chosen]
    return centres
