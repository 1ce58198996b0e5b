"""IFMR: search the range with the least mean squared quantization error.

The search multiplies a percentile range of the data, widened to contain zero, by each ratio of ``search_range``.
Asymmetric: only the upper end is scaled; symmetric: both ends are. The loss is the mean squared difference between the
values and their clipped and rounded values; as in AMCT, the offset is ignored, and the first of equal candidates wins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from amct.numerics.affine import LARGEST_SCALE, SMALLEST_SCALE, SymmetricScale, integer_range
from amct.numerics.counts.compiled import compiled, compiled_sum
from amct.numerics.counts.samples import MAX_DISTINCT_VALUES, Floats, SamplingObserver
from amct.numerics.settings import IfmrSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amct.numerics.counts.histogram import Bins
    from amct.numerics.counts.tables import Values

_EPSILON = float(np.finfo(np.float32).eps)
_VALUES_PER_LEVEL = 64  # with more, searching the border of each integer is cheaper than rounding every value
_SUM_BLOCK = 64


@dataclass(frozen=True)
class CandidateRanges:
    """Candidate ranges and the scale of each, ``[n]``."""

    lower: Values
    upper: Values
    scale: Values


@dataclass(kw_only=True, eq=False)
class IfmrObserver(SamplingObserver):
    """Observer with IFMR's search for the range: exact up to 2^20 values, on a histogram beyond."""

    settings: IfmrSettings = field(default=IfmrSettings(), kw_only=False)

    def search(self, channel: int) -> tuple[float, float]:
        """Return the range of a channel with the least loss."""
        samples = self._samples
        data = SortedValues(*samples.sorted_nonzero(channel)) if samples.exact else BinnedValues(samples.bins(channel))
        minimum = min(0.0, data.smallest(rank_of(self.settings.min_percentile, data.count)))
        maximum = max(0.0, data.largest(rank_of(self.settings.max_percentile, data.count)))
        candidates = self._candidates(minimum, maximum)
        best = 0
        # Outside these limits every candidate is near zero or too large, so a search is useless.
        if candidates.scale.max() >= SMALLEST_SCALE and candidates.scale.min() <= LARGEST_SCALE:
            best = int(np.argmin(data.losses(candidates)))
        lower, upper = float(candidates.lower[best]), float(candidates.upper[best])
        if self.asymmetric:
            return lower, upper
        return (lower, 0.0) if -minimum > maximum else (0.0, upper)

    def _candidates(self, minimum: float, maximum: float) -> CandidateRanges:
        (start, end), step = self.settings.search_range, self.settings.search_step
        ratios = np.arange(start, end, step)
        ratios = ratios[ratios < end - step * 1e-6]  # rounding may make arange include the end
        lowest, highest = integer_range(self.bits)
        if self.asymmetric:
            upper = ratios * maximum
            return CandidateRanges(np.full_like(upper, minimum), upper, (upper - minimum) / (highest - lowest))
        upper = ratios * max(maximum, -minimum)
        negative = -minimum > maximum and self.symmetric_scale is SymmetricScale.NEGATIVE_SIDE
        return CandidateRanges(-upper, upper, upper / (-lowest if negative else highest))


def rank_of(percentile: float, count: int) -> int:
    """Return the rank of a percentile, counted from the outermost value, which has rank 1.

    >>> rank_of(1.0, 100), rank_of(0.95, 100)
    (1, 5)
    """
    if 1 - percentile < _EPSILON:
        return 1
    return max(1, count - int(percentile * count))


class SortedValues:
    """Exact values: the non-zero ones, ascending, and the number of zeros."""

    def __init__(self, nonzero: Floats, zeros: int) -> None:
        self._values = nonzero
        self._negative = int(np.searchsorted(nonzero, np.float32(0)))  # a float64 would make NumPy copy the array
        self._zeros = zeros
        self.count = nonzero.size + zeros

    def smallest(self, rank: int) -> float:
        """Return the value of this rank from below."""
        place = rank - 1
        if place >= self._negative:
            place -= self._zeros
            if place < self._negative:
                return 0.0
        return float(self._values[place])

    def largest(self, rank: int) -> float:
        """Return the value of this rank from above."""
        return self.smallest(self.count + 1 - rank)

    def losses(self, candidates: CandidateRanges) -> Values:
        """Return the mean squared error of every candidate; rounded in float32 as AMCT does, summed in float64."""
        limits = (candidates.lower, candidates.upper, candidates.scale)
        lower, upper, scale = (limit.astype(np.float32) for limit in limits)
        values = self._values
        levels = float(((candidates.upper - candidates.lower) / candidates.scale).max())
        if values.size < _VALUES_PER_LEVEL * levels:
            return _exact_losses(values, lower, upper, scale) / self.count
        sums, squares = _prefix_sums(values)
        losses = _level_losses(values, sums, squares, lower, upper, scale)
        # Candidates close to the best are computed value by value, so that the choice is exact.
        near = losses <= losses.min() * (1 + 1e-6) + 1e-9 * squares[-1]
        losses[near] = _exact_losses(values, lower[near], upper[near], scale[near])
        return losses / self.count


class BinnedValues:
    """Values of a histogram, taken as evenly spread within their bins."""

    def __init__(self, bins: Bins) -> None:
        self._bins = bins
        self.count = round(bins.count.sum())

    def smallest(self, rank: int) -> float:
        """Return the value of this rank from below; exact for rank 1."""
        bins = self._bins
        return _value_at_rank(bins.low, bins.high, bins.count, rank)

    def largest(self, rank: int) -> float:
        """Return the value of this rank from above; exact for rank 1."""
        bins = self._bins
        return _value_at_rank(bins.high[::-1], bins.low[::-1], bins.count[::-1], rank)

    def losses(self, candidates: CandidateRanges) -> Values:
        """Return the expected mean squared error of every candidate, integrated exactly over each bin."""
        bins, least = self._bins, candidates.scale.min()
        below = int(np.searchsorted(bins.low, -0.5 * least))
        above = max(below, int(np.searchsorted(bins.high, 0.5 * least, side="right")))
        limits = (candidates.lower, candidates.upper, candidates.scale)
        losses = _binned_losses((bins.low, bins.high, bins.count), (below, above), limits, least / 8)
        losses /= self.count
        return losses


@compiled
def _binned_losses(
    bins: tuple[Values, Values, Values], near_zero: tuple[int, int], limits: tuple[Values, Values, Values], width: float
) -> Values:
    """Return the summed squared error of every candidate for the values of ascending bins.

    Bins near zero are far finer than the search needs: neighbours are merged up to a total of ``width``, an eighth of a
    step. Few bins are not merged: that would save no time, and they may be exact values, which are bins of no width.

    Args:
        bins: lower end, upper end and count of each bin.
        near_zero: the first, and the one after the last, of the bins whose values every candidate rounds to zero. They
            have the same loss for all candidates, so they do not affect the choice. They are more than half of all.
        limits: lower end, upper end and scale of each candidate.
        width: of merged bins.
    """
    low, high, count = bins
    below, above = near_zero
    lower, upper, scale = limits
    size = below + low.size - above
    begins, ends, inside = np.empty(size), np.empty(size), np.empty(size)
    number, cell = 0, np.nan
    for index in range(size):
        place = index if index < below else index + above - below
        own = np.floor(low[place] / width) if size > MAX_DISTINCT_VALUES else np.nan
        if own == cell:
            ends[number - 1] = high[place]
            inside[number - 1] += count[place]
        else:
            begins[number], ends[number], inside[number], cell = low[place], high[place], count[place], own
            number += 1
    value, points = np.empty(number), np.empty(number)
    spread = exact = 0
    for place in range(number):
        begin, end, within = begins[place], ends[place], inside[place]
        if begin < end:
            begins[spread], ends[spread], inside[spread] = begin, end, within / (end - begin)
            spread += 1
        else:
            value[exact], points[exact] = begin, within
            exact += 1
    losses = _spread_losses(begins[:spread], ends[:spread], inside[:spread], lower, upper, scale)
    return losses + _point_losses(value[:exact], points[:exact], lower, upper, scale)


@compiled
def _value_at_rank(near: Values, far: Values, count: Values, rank: int) -> float:
    """Return the value of a rank, interpolated within its bin; bins are ordered from the outermost inwards."""
    place, below = 0, 0.0
    while below + count[place] < rank and place < count.size - 1:
        below += count[place]
        place += 1
    if rank == 1:
        return float(near[place])
    inside = rank - below - 0.5
    return float(near[place] + (far[place] - near[place]) * inside / count[place])


@compiled_sum
def _exact_losses(values: Floats, lower: Floats, upper: Floats, scale: Floats) -> Values:
    losses = np.empty(scale.size)
    for candidate in range(scale.size):
        low, high, step = lower[candidate], upper[candidate], scale[candidate]
        total = 0.0
        for position in range(values.size):
            value = values[position]
            error = np.float64(np.rint(min(max(value, low), high) / step) * step - value)
            total += error * error
        losses[candidate] = total
    return losses


@compiled
def _prefix_sums(values: Floats) -> tuple[Values, Values]:
    """Return prefix sums of the values and of their squares every ``_SUM_BLOCK`` values, and the totals at the end."""
    blocks = values.size // _SUM_BLOCK + 2
    sums, squares = np.zeros(blocks), np.zeros(blocks)
    total = total_square = 0.0
    for position in range(values.size):
        if position % _SUM_BLOCK == 0:
            sums[position // _SUM_BLOCK], squares[position // _SUM_BLOCK] = total, total_square
        value = np.float64(values[position])
        total += value
        total_square += value * value
    for place in range((values.size + _SUM_BLOCK - 1) // _SUM_BLOCK, blocks):
        sums[place], squares[place] = total, total_square
    return sums, squares


@compiled
def _level_losses(values: Floats, sums: Values, squares: Values, lower: Floats, upper: Floats, scale: Floats) -> Values:
    """Compute ``_exact_losses`` of sorted values, up to rounding: all values with the same integer at once."""
    losses = np.empty(scale.size)
    for candidate in range(scale.size):
        low, high, step = lower[candidate], upper[candidate], scale[candidate]
        level = np.rint(min(max(values[0], low), high) / step)
        last = np.rint(min(max(values[-1], low), high) / step)
        begin, sum_before, square_before, total = 0, 0.0, 0.0, 0.0
        while begin < values.size:
            end = values.size
            if level < last:
                end = _first_above(values, begin, level, low, high, step)
            if end > begin:
                block = end // _SUM_BLOCK
                sum_after, square_after = sums[block], squares[block]
                for position in range(block * _SUM_BLOCK, end):
                    value = np.float64(values[position])
                    sum_after += value
                    square_after += value * value
                real = np.float64(np.float32(level) * step)
                total += (end - begin) * real * real - 2 * real * (sum_after - sum_before)
                total += square_after - square_before
                begin, sum_before, square_before = end, sum_after, square_after
            level += 1
        losses[candidate] = max(0.0, total)
    return losses


@compiled
def _first_above(values: Floats, begin: int, level: float, low: float, high: float, step: float) -> int:
    """Return the index (at least ``begin``) of the first of the ascending values that is rounded above ``level``."""
    border = np.float32((level + np.float32(0.5)) * step)
    left, end = begin, values.size
    while left < end:
        middle = (left + end) // 2
        if values[middle] > border:
            end = middle
        else:
            left = middle + 1
    # The border above is approximate: correct it with the exact clipping and rounding.
    while end > begin and np.rint(min(max(values[end - 1], low), high) / step) > level:
        end -= 1
    while end < values.size and np.rint(min(max(values[end], low), high) / step) <= level:
        end += 1
    return end


@compiled_sum
def _point_losses(value: Values, count: Values, lower: Values, upper: Values, scale: Values) -> Values:
    """Return the summed squared error of exact values for every candidate."""
    losses = np.empty(scale.size)
    for candidate in range(scale.size):
        step, bottom, top = scale[candidate], lower[candidate], upper[candidate]
        total = 0.0
        for place in range(value.size):
            error = np.rint(min(max(value[place], bottom), top) / step) * step - value[place]
            total += count[place] * error * error
        losses[candidate] = total
    return losses


@compiled_sum
def _spread_losses(low: Values, high: Values, density: Values, lower: Values, upper: Values, scale: Values) -> Values:
    """Return the summed squared error of values evenly spread over ascending bins, for every candidate."""
    losses = np.empty(scale.size)
    starts, border, weight = _borders(low, high, density)
    for candidate in range(scale.size):
        step, bottom, top = scale[candidate], lower[candidate], upper[candidate]
        first, last = np.searchsorted(low, bottom), np.searchsorted(high, top, side="right")
        inner, steps = 0.0, 1 / step
        if first < last:  # nearly all bins: no branch, division or negative index prevents vectorization
            begin, end = starts[first] + 1, starts[last - 1] + 1
            borders, weights = border[begin:end], weight[begin:end]
            for place in range(borders.size):
                inner += weights[place] * _rounding_error_integral(borders[place] * steps)
            inner += density[last - 1] * _rounding_error_integral(high[last - 1] * steps)
            inner -= density[first] * _rounding_error_integral(low[first] * steps)
        total = inner * step**3
        for place in range(min(first, low.size)):
            total += density[place] * _clipped_bin_error(low[place], high[place], bottom, top, step)
        for place in range(max(first, last), low.size):
            total += density[place] * _clipped_bin_error(low[place], high[place], bottom, top, step)
        losses[candidate] = total
    return losses


@compiled
def _borders(low: Values, high: Values, density: Values) -> tuple[NDArray[np.int64], Values, Values]:
    """Return the borders of ascending bins, by which an integral over many bins takes half the time.

    Of the difference of an antiderivative at both ends of each bin, times its density, the terms at a border that two
    bins share are one: the antiderivative times the difference of their densities.

    Returns:
        The index of the lower border of each bin (its upper one is the next), the borders, and the weight of each.
    """
    starts = np.empty(low.size, np.int64)
    border, weight = np.empty(2 * low.size), np.empty(2 * low.size)
    number = 0
    for place in range(low.size):
        if place > 0 and low[place] == high[place - 1]:
            weight[number - 1] -= density[place]
        else:
            border[number], weight[number] = low[place], -density[place]
            number += 1
        starts[place] = number - 1
        border[number], weight[number] = high[place], density[place]
        number += 1
    return starts, border, weight


@compiled
def _clipped_bin_error(begin: float, end: float, bottom: float, top: float, step: float) -> float:
    """Return the integral of the squared error over a bin that may reach beyond the limits of the range."""
    kept_bottom, kept_top = np.rint(bottom / step) * step, np.rint(top / step) * step
    area = 0.0
    if begin < bottom:
        area += _square_integral(begin - kept_bottom, min(end, bottom) - kept_bottom)
    if end > top:
        area += _square_integral(max(begin, top) - kept_top, end - kept_top)
    inner_begin, inner_end = max(begin, bottom), min(end, top)
    if inner_begin < inner_end:
        area += step**3 * (_rounding_error_integral(inner_end / step) - _rounding_error_integral(inner_begin / step))
    return area


@compiled
def _square_integral(begin: float, end: float) -> float:
    """Return the integral of x^2 from ``begin`` to ``end``."""
    return (end - begin) * (end * end + end * begin + begin * begin) / 3


@compiled
def _rounding_error_integral(x: float) -> float:
    """Return the integral of (round(x) - x)^2 from 0 to ``x``."""
    nearest = np.rint(x)
    rest = x - nearest
    return float(nearest / 12 + rest * rest * rest / 3)
