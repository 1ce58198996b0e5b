"""HFMG: clip the tails of a linear histogram, and choose the range with the least quantization error.

The histogram has ``num_of_bins`` equal bins over the range of the data. The range is narrowed step by step, each time
on the side where 1/100000 of the data covers more bins, until a quarter of the bins is left. The loss of each range is
the squared distance of the values, taken as evenly spread in their bins, to the centres of 2^bits equal cells over it.

While all values are stored, the histogram is updated batch by batch as AMCT does: over the common range, old bins split
where a new border crosses them. This depends on the order of the batches, which merged observers keep. Otherwise the
histogram is computed once from all data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.numerics.affine import LARGEST_SCALE, SMALLEST_SCALE, integer_range
from amct.numerics.counts.compiled import compiled, compiled_sum
from amct.numerics.counts.samples import SamplingObserver
from amct.numerics.settings import HfmgSettings

if TYPE_CHECKING:
    from amct.numerics.counts.histogram import Bins
    from amct.numerics.counts.samples import Floats
    from amct.numerics.counts.tables import Counts, Values

_STEPS = 100_000  # each narrowing step removes 1/_STEPS of the data
_KEPT = 4  # narrowing stops when 1/_KEPT of the bins is left


@dataclass(frozen=True)
class LinearHistogram:
    """Counts in equal bins over ``minimum``..``maximum``."""

    count: Values
    minimum: float
    maximum: float

    @property
    def width(self) -> float:
        """Width of one bin."""
        return (self.maximum - self.minimum) / self.count.size

    @classmethod
    def of(cls, values: Floats, bins: int, minimum: float, maximum: float) -> LinearHistogram:
        """Count values, all of which lie in ``minimum``..``maximum``."""
        # float32 counts of torch.histc are exact: exact samples are at most 2^20 values.
        count = torch.histc(torch.from_numpy(values), bins, minimum, maximum)
        return cls(count.numpy().astype(np.float64), minimum, maximum)

    @classmethod
    def spread(cls, bins: Bins, count: int, minimum: float, maximum: float) -> LinearHistogram:
        """Convert bins of any widths to ``count`` equal ones, spreading each evenly over those that it covers."""
        at = np.stack([bins.low, bins.high], axis=1).reshape(-1)
        after = np.cumsum(bins.count)
        below = np.stack([after - bins.count, after], axis=1).reshape(-1)
        cumulative = np.interp(np.linspace(minimum, maximum, count + 1), at, below)
        cumulative[0], cumulative[-1] = 0.0, after[-1]
        return cls(np.diff(cumulative), minimum, maximum)

    def plus(self, values: Floats) -> LinearHistogram:
        """Return the histogram with one more batch, over the common range; old bins are re-binned by AMCT's rule."""
        minimum, maximum = min(self.minimum, float(values.min())), max(self.maximum, float(values.max()))
        added = LinearHistogram.of(values, self.count.size, minimum, maximum)
        if (minimum, maximum) == (self.minimum, self.maximum):
            moved = self.count
        else:
            moved = _rebin(self.count, self.minimum, self.width, minimum, added.width)
        return LinearHistogram(moved + added.count, minimum, maximum)


@dataclass(kw_only=True, eq=False)
class HfmgObserver(SamplingObserver):
    """Observer with HFMG's search for the range."""

    settings: HfmgSettings = field(default=HfmgSettings(), kw_only=False)

    def search(self, channel: int) -> tuple[float, float]:
        """Return the range of a channel with the least loss."""
        minimum, maximum = self._samples.range.ends(channel)
        lowest, highest = integer_range(self.bits)
        scale = (maximum - minimum) / (highest - lowest)
        # Constant or near-zero data is not clipped; a range that stays too large when clipped raises an error later.
        if scale < SMALLEST_SCALE or scale / _KEPT > LARGEST_SCALE:
            return minimum, maximum
        histogram = self._histogram(channel, minimum, maximum)
        ranges = _ranges(histogram.count, math.ceil(histogram.count.sum() / _STEPS), self.settings.num_of_bins // _KEPT)
        losses = _losses(histogram.count, histogram.width, ranges, highest - lowest + 1)
        left, right = ranges[int(np.argmin(losses))]
        return minimum + histogram.width * int(left), minimum + histogram.width * (int(right) + 1)

    def _histogram(self, channel: int, minimum: float, maximum: float) -> LinearHistogram:
        if not self._samples.exact:
            return LinearHistogram.spread(self._samples.bins(channel), self.settings.num_of_bins, minimum, maximum)
        first, *others = self._samples.batches_of(channel)
        histogram = LinearHistogram.of(first, self.settings.num_of_bins, float(first.min()), float(first.max()))
        for batch in others:
            histogram = histogram.plus(batch)
        return histogram


@compiled
def _rebin(count: Values, minimum: float, width: float, new_minimum: float, new_width: float) -> Values:
    """Move counts to new, wider bins; a bin across a border is split, its share below the border rounded down."""
    moved = np.zeros(count.size)
    last = count.size - 1
    for place in range(count.size):
        if count[place] == 0:
            continue
        begin = minimum + width * place
        target = min(last, max(0, int((begin - new_minimum) / new_width)))
        border = new_minimum + new_width * (target + 1)
        if target == last or begin + width <= border:
            moved[target] += count[place]
        else:
            below = math.floor((border - begin) / width * count[place])
            moved[target] += below
            moved[target + 1] += count[place] - below
    return moved


@compiled
def _ranges(count: Values, step: int, kept: int) -> Counts:
    """Return the candidate ranges (first bin, last bin), ``[n, 2]``."""
    found = np.empty((count.size, 2), np.int64)
    left, right, number = 0, count.size - 1, 0
    while right - left > kept:
        next_left, passed = left, 0.0
        while passed < step and next_left < right:
            passed += count[next_left]
            next_left += 1
        next_right, passed = right, 0.0
        while passed < step and next_right > left:
            passed += count[next_right]
            next_right -= 1
        if next_left - left > right - next_right:
            left = next_left
        else:
            right = next_right
        found[number, 0], found[number, 1] = left, right
        number += 1
    return found[:number]


def _losses(count: Values, width: float, ranges: Counts, cells: int) -> Values:
    """Return the squared distance of all values to the centres of their cells, for every range."""
    by_cell = cells < count.size
    losses = _losses_by_cell(count, ranges, cells) if by_cell else _losses_by_bin(count, ranges, cells)
    cell = width * (ranges[:, 1] - ranges[:, 0] + 1) / cells
    return np.where(cell < SMALLEST_SCALE, 0.0, losses * width * width)


@compiled_sum
def _losses_by_bin(count: Values, ranges: Counts, cells: int) -> Values:
    """Compute the losses bin by bin, in units of squared bin widths; used when there are more cells than bins."""
    losses = np.empty(ranges.shape[0])
    for number in range(ranges.shape[0]):
        first = ranges[number, 0]
        cell = (ranges[number, 1] - first + 1) / cells
        whole = cell * cell * cell / 12
        total = 0.0
        for place in range(count.size):
            begin = np.float64(place - first)
            end = begin + 1
            first_cell = min(max(math.floor(begin / cell), 0.0), cells - 1.0)
            last_cell = min(max(math.floor(end / cell), 0.0), cells - 1.0)
            # The integral over a part of the first cell, whole cells, and a part of the last one. For a bin within one
            # cell (or outside the range) the parts overlap by one cell, and the sum is still the integral over the bin.
            below = begin - (first_cell + 0.5) * cell
            above = end - (last_cell + 0.5) * cell
            area = (above * above * above - below * below * below) / 3 + (last_cell - first_cell) * whole
            total += count[place] * area
        losses[number] = total
    return losses


@compiled
def _losses_by_cell(count: Values, ranges: Counts, cells: int) -> Values:
    """Compute the losses cell by cell from prefix sums over the bins, in units of squared bin widths."""
    # Prefix sums of 1, x and x² at each border of bins; x is relative to the middle, which avoids cancellation.
    sums = np.zeros((count.size + 1, 3))
    middle = count.size / 2
    for place in range(count.size):
        x = place - middle
        sums[place + 1, 0] = sums[place, 0] + count[place]
        sums[place + 1, 1] = sums[place, 1] + count[place] * (x + 0.5)
        sums[place + 1, 2] = sums[place, 2] + count[place] * (x * x + x + 1 / 3)
    losses = np.empty(ranges.shape[0])
    for number in range(ranges.shape[0]):
        first = ranges[number, 0]
        cell = (ranges[number, 1] - first + 1) / cells
        total, n0, n1, n2 = 0.0, 0.0, 0.0, 0.0
        for index in range(cells):
            if index == cells - 1:  # the first and the last cell include all values beyond the range
                m0, m1, m2 = sums[count.size, 0], sums[count.size, 1], sums[count.size, 2]
            else:
                border = first + (index + 1) * cell
                place = min(int(border), count.size - 1)
                x, part = place - middle, border - place
                share = count[place] * part
                m0 = sums[place, 0] + share
                m1 = sums[place, 1] + share * (x + part / 2)
                m2 = sums[place, 2] + share * (x * x + x * part + part * part / 3)
            centre = first + (index + 0.5) * cell - middle
            total += (m2 - n2) - 2 * centre * (m1 - n1) + centre * centre * (m0 - n0)
            n0, n1, n2 = m0, m1, m2
        losses[number] = total
    return losses
