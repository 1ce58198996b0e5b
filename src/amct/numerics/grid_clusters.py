"""One-dimensional clustering with centres on an integer grid.

Values are in grid steps. The border between two integer centres is their midpoint, a multiple of one half, so the cost
depends only on the count, sum and sum of squares of the values up to each half step: a table of 513 columns, however
much data there is. The cost of any set of centres takes a few subtractions in this table.

Lloyd's iteration moves real-valued centres; on sorted points with prefix sums an iteration costs one binary search per
centre. ``snap`` rounds its result to the grid and improves it there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from amct.numerics.counts.compiled import compiled

LIMIT = 127
"""Centres lie in -127..127, which is symmetric so that they can be negated."""
_ZERO = 256
"""Column of the border at 0; the border at n/2 is column _ZERO + n."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@compiled
def half_step_moments(values: NDArray[np.float32], scale: float) -> Floats:
    """Return count, sum and sum of squares of all ``values / scale`` up to each half step, ``[3, 513]``."""
    moments = np.zeros((3, 2 * _ZERO + 1))
    for index in range(values.size):
        value = np.float64(values[index]) / scale
        column = min(max(int(np.ceil(2.0 * value)) + _ZERO, 0), 2 * _ZERO)
        moments[0, column] += 1.0
        moments[1, column] += value
        moments[2, column] += value * value
    for column in range(1, 2 * _ZERO + 1):
        for order in range(3):
            moments[order, column] += moments[order, column - 1]
    return moments


@compiled
def _cost(moments: Floats, after: int, upto: int, centre: int) -> float:
    """Return the squared distance to ``centre`` of the values between two columns (``after`` -1: from the first)."""
    count, total, squares = moments[0, upto], moments[1, upto], moments[2, upto]
    if after >= 0:
        count -= moments[0, after]
        total -= moments[1, after]
        squares -= moments[2, after]
    return squares - 2.0 * centre * total + float(centre) * centre * count  # type: ignore[no-any-return]


@compiled
def _left_cost(moments: Floats, centre: int) -> float:
    """Return the cost of all values below the first centre."""
    return _cost(moments, -1, 2 * centre + _ZERO, centre)


@compiled
def _right_cost(moments: Floats, centre: int) -> float:
    """Return the cost of all values above the last centre."""
    return _cost(moments, 2 * centre + _ZERO, 2 * _ZERO, centre)


@compiled
def _pair_cost(moments: Floats, low: int, high: int) -> float:
    """Return the cost of all values between two neighbouring centres, each assigned to the nearer one."""
    middle = low + high + _ZERO
    return _cost(moments, 2 * low + _ZERO, middle, low) + _cost(moments, middle, 2 * high + _ZERO, high)


@compiled
def total_cost(moments: Floats, centres: Integers) -> float:
    """Return the sum of squared distances of all values to the nearest of the ascending ``centres``."""
    cost = _left_cost(moments, centres[0]) + _right_cost(moments, centres[-1])
    for index in range(centres.size - 1):
        cost += _pair_cost(moments, centres[index], centres[index + 1])
    return cost


@compiled
def lloyd(
    points: Floats, counts: Floats, sums: Floats, centres: Floats, max_iteration: int, min_distance: float
) -> Floats:
    """Move each centre to the mean of the points nearest to it, until none moves by more than ``min_distance``.

    Args:
        points: ascending, ``[n]``, in grid steps.
        counts: prefix sums of the points' weights, starting with 0, ``[n + 1]``.
        sums: prefix sums of weight times point, starting with 0, ``[n + 1]``.
        centres: initial centres, ascending.
        max_iteration: maximum number of iterations.
        min_distance: in grid steps.
    """
    centres = centres.copy()
    for _ in range(max_iteration):
        farthest = 0.0
        first = 0
        moved = centres.copy()
        for index in range(centres.size):
            last = points.size
            if index + 1 < centres.size:
                last = np.searchsorted(points, 0.5 * (centres[index] + centres[index + 1]), side="right")
            weight = counts[last] - counts[first]
            if weight > 0:
                moved[index] = (sums[last] - sums[first]) / weight
                farthest = max(farthest, abs(moved[index] - centres[index]))
            first = last
        centres = np.sort(moved)  # a centre without points does not move, so another one may pass it
        if farthest <= min_distance:
            break
    return centres


@compiled
def d2_sampling(points: Floats, counts: Floats, draws: Floats) -> Floats:
    """k-means++: draw each centre with a probability proportional to the squared distance to the centres so far."""
    chosen = np.empty(draws.size)
    distance = np.full(points.size, np.inf)
    for index in range(draws.size):
        total = 0.0
        for point in range(points.size):
            if index > 0:
                gap = points[point] - chosen[index - 1]
                distance[point] = min(distance[point], gap * gap)
            total += (counts[point + 1] - counts[point]) * (1.0 if index == 0 else distance[point])
        left = draws[index] * total
        pick = points.size - 1
        for point in range(points.size):
            left -= (counts[point + 1] - counts[point]) * (1.0 if index == 0 else distance[point])
            if left < 0:
                pick = point
                break
        chosen[index] = points[pick]
    return np.sort(chosen)


@compiled
def _fill(moments: Floats, used: NDArray[np.bool_], clusters: int) -> Integers:
    """Add candidates to the marked ones until there are ``clusters``, each time the one with the largest gain."""
    count = used.size
    for _ in range(clusters - int(used.sum())):
        best_gain, best = -np.inf, -1
        low = -1
        while low < count:
            high = low + 1
            while high < count and not used[high]:
                high += 1
            for candidate in range(low + 1, high):
                gain = _gap_cost(moments, low, high, count)
                gain -= _gap_cost(moments, low, candidate, count) + _gap_cost(moments, candidate, high, count)
                if gain > best_gain:
                    best_gain, best = gain, candidate
            low = high
        used[best] = True
    return np.nonzero(used)[0] - LIMIT


@compiled
def _gap_cost(moments: Floats, low: int, high: int, count: int) -> float:
    """Return the cost between two candidates; low = -1: no centre below, high = ``count``: no centre above."""
    if low < 0:
        return _left_cost(moments, high - LIMIT)
    if high >= count:
        return _right_cost(moments, low - LIMIT)
    return _pair_cost(moments, low - LIMIT, high - LIMIT)


@compiled
def snap(moments: Floats, centres: Floats, clusters: int) -> Integers:
    """Round real centres to different integers, fill them up to ``clusters``, then move them while the cost falls."""
    used = np.zeros(2 * LIMIT + 1, np.bool_)
    for centre in centres:
        used[min(max(int(np.rint(centre)), -LIMIT), LIMIT) + LIMIT] = True
    best = _fill(moments, used, clusters)
    cost = total_cost(moments, best)
    while True:
        used[:] = False
        after = -1
        for index in range(clusters):
            upto = best[index] + best[index + 1] + _ZERO if index + 1 < clusters else 2 * _ZERO
            weight = moments[0, upto] - (moments[0, after] if after >= 0 else 0.0)
            if weight > 0:
                mean = (moments[1, upto] - (moments[1, after] if after >= 0 else 0.0)) / weight
                used[min(max(int(np.rint(mean)), -LIMIT), LIMIT) + LIMIT] = True
            after = upto
        moved = _fill(moments, used, clusters)
        moved_cost = total_cost(moments, moved)
        if not moved_cost < cost:
            return best
        best, cost = moved, moved_cost


@compiled
def nearest(values: NDArray[np.float32], scale: float, centres: Integers, found: NDArray[np.uint8]) -> None:
    """Write the index of the centre nearest to each ``values / scale`` to ``found``; ties go to the lower centre."""
    table = np.zeros(2 * _ZERO + 1, np.uint8)
    for index in range(centres.size - 1):
        table[centres[index] + centres[index + 1] + _ZERO + 1 :] += np.uint8(1)
    for index in range(values.size):
        column = int(np.ceil(2.0 * (np.float64(values[index]) / scale))) + _ZERO
        found[index] = table[min(max(column, 0), 2 * _ZERO)]
