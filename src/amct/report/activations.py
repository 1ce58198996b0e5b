"""Sums up what a layer is given, batch by batch, in memory that does not grow with the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.numerics.affine import integer_range
from amct.numerics.counts.histogram import FloatHistogram
from amct.report.content import LARGEST_BARS, ActivationContent, Histogram

if TYPE_CHECKING:
    from torch import Tensor

    from amct.numerics.counts.histogram import Bins

_MANTISSA_BITS = 7
"""A bin is then at most half a bar wide wherever bars are drawn, and a layer needs some 100 kB."""

_SHOWN_BEYOND = 1.0
"""So many widths of the clip range are drawn on either side of it, at most."""


class InputStatistics:
    """The values of one layer's input against the grid of its scale and offset."""

    def __init__(self, scale: float, offset: int, bits: int) -> None:
        lowest, highest = integer_range(bits)
        self._scale = scale
        self._inverse = float(torch.tensor(scale, dtype=torch.float32).reciprocal())  # as fake_quantize takes it
        self._first, self._last = lowest - offset, highest - offset  # in steps from zero
        self._histogram = FloatHistogram(1, _MANTISSA_BITS)
        self._count = self._clipped = self._saturated = 0
        self._minimum, self._maximum = float("inf"), float("-inf")

    def add(self, x: Tensor) -> None:
        """Take in one batch; values that are not finite are left out."""
        values = x.detach().float().reshape(-1)
        values = values[torch.isfinite(values)]
        if values.numel() == 0:
            return
        minimum, maximum = torch.aminmax(values)
        self._minimum, self._maximum = min(self._minimum, float(minimum)), max(self._maximum, float(maximum))
        self._count += values.numel()
        self._histogram.add(values[None])
        steps = (values * self._inverse).round_()
        self._clipped += int(((steps < self._first) | (steps > self._last)).sum())
        # An outermost integer that stands for zero is no saturation; the next one beyond it is.
        self._saturated += int(((steps <= (self._first or -1)) | (steps >= (self._last or 1))).sum())

    def result(self) -> ActivationContent | None:
        """What was seen; None when nothing was."""
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
        """The clip range and all values, unless a far outlier would squeeze the rest."""
        room = _SHOWN_BEYOND * (clip_high - clip_low)
        low = max(min(self._minimum, clip_low), clip_low - room)
        high = min(max(self._maximum, clip_high), clip_high + room)
        return low, high


def bars(bins: Bins, low: float, high: float, count: int = LARGEST_BARS) -> Histogram:
    """Bins of any widths as bars of equal width; a bin over several bars is spread evenly, the total is kept.

    Args:
        bins: in ascending order.
        low: where the first bar begins.
        high: where the last bar ends; values equal to it are inside.
        count: how many bars.
    """
    edges = np.linspace(low, high, count + 1)
    width = bins.high - bins.low
    below_edge = np.empty(count + 1)
    for index, edge in enumerate(edges):
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.clip((edge - bins.low) / width, 0.0, 1.0)
        part = np.where(width > 0, part, bins.low < edge if index < count else bins.low <= edge)
        below_edge[index] = float(np.dot(part, bins.count))
    # Rounding the running sum and not each bar keeps the total.
    running = np.rint(below_edge).astype(np.int64)
    total = int(np.rint(bins.count.sum()))
    return Histogram(
        low=low,
        high=high,
        counts=tuple(int(value) for value in np.diff(running)),
        below=int(running[0]),
        above=total - int(running[-1]),
    )
