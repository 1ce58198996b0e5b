"""Accumulates statistics of a layer's input over batches, in constant memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.numerics.affine import integer_range
from amct.numerics.counts.histogram import FloatHistogram
from amct.numerics.counts.loops import range_of, steps_beyond
from amct.report.content import LARGEST_BARS, ActivationContent, Histogram

if TYPE_CHECKING:
    from torch import Tensor

    from amct.numerics.counts.histogram import Bins
    from amct.numerics.qparams import QParams

_MANTISSA_BITS = 7
"""With this resolution a bin is at most half a bar wide, and a layer needs about 100 kB."""

_SHOWN_BEYOND = 1.0
"""The maximum range drawn on each side of the clip range, in widths of the clip range."""


class InputStatistics:
    """Statistics of one layer input: range, histogram, and the fractions of clipped and saturated values."""

    def __init__(self, qparams: QParams) -> None:
        lowest, highest = integer_range(qparams.bits)
        self._scale = qparams.step
        self._inverse = float(qparams.scale.reciprocal())  # as fake_quantize computes it
        # In multiples of the scale.
        self._first, self._last = lowest - qparams.zero_point, highest - qparams.zero_point
        self._histogram = FloatHistogram(1, _MANTISSA_BITS)
        self._count = self._clipped = self._saturated = 0
        self._minimum, self._maximum = float("inf"), float("-inf")

    def add(self, x: Tensor) -> None:
        """Add one batch; values that are not finite are ignored."""
        values = x.detach().float().reshape(-1).cpu().contiguous().numpy()
        limits = range_of(values)
        if limits is None:
            values = values[np.isfinite(values)]
            limits = range_of(values)
        if limits is None or values.size == 0:
            return
        self._minimum, self._maximum = min(self._minimum, limits[0]), max(self._maximum, limits[1])
        self._count += values.size
        self._histogram.add(torch.from_numpy(values)[None])
        self._clipped += steps_beyond(values, self._inverse, self._first, self._last)
        # If the lowest or highest integer represents zero, values on it do not count as saturated.
        inner = (self._first or -1) + 1, (self._last or 1) - 1
        self._saturated += steps_beyond(values, self._inverse, *inner)

    def result(self) -> ActivationContent | None:
        """Return the statistics; None if there were no finite values."""
        if self._count == 0:
            return None
        clip_low, clip_high = self._first * self._scale, self._last * self._scale
        return ActivationContent(
            minimum=self._minimum,
            maximum=self._maximum,
            clip_low=clip_low,
            clip_high=clip_high,
            clipped=self._clipped / self._count,
            saturated=self._saturated / self._count,
            histogram=bars(self._histogram.bins(), *self._shown(clip_low, clip_high)),
        )

    def _shown(self, clip_low: float, clip_high: float) -> tuple[float, float]:
        """Return the range to draw: the clip range and all values, except outliers more than one clip range away."""
        room = _SHOWN_BEYOND * (clip_high - clip_low)
        low = max(min(self._minimum, clip_low), clip_low - room)
        high = min(max(self._maximum, clip_high), clip_high + room)
        return low, high


def bars(bins: Bins, low: float, high: float, count: int = LARGEST_BARS) -> Histogram:
    """Convert bins of any width to bars of equal width; counts are distributed evenly, and their total is kept.

    Args:
        bins: The bins, in ascending order.
        low: The lower edge of the first bar.
        high: The upper edge of the last bar, inclusive.
        count: The number of bars.
    """
    edges = np.linspace(low, high, count + 1)
    width = bins.high - bins.low
    below_edge = np.empty(count + 1)
    for index, edge in enumerate(edges):
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.clip((edge - bins.low) / width, 0.0, 1.0)
        part = np.where(width > 0, part, bins.low < edge if index < count else bins.low <= edge)
        below_edge[index] = float(np.dot(part, bins.count))
    # The cumulative sum is rounded, not each bar, so that the total is kept.
    running = np.rint(below_edge).astype(np.int64)
    total = int(np.rint(bins.count.sum()))
    return Histogram(
        low=low,
        high=high,
        counts=tuple(int(value) for value in np.diff(running)),
        below=int(running[0]),
        above=total - int(running[-1]),
    )
