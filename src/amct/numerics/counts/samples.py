"""Storage of observed values: exact values while they are few, counts beyond.

Up to ``EXACT_LIMIT`` values per layer are stored, so that a search over them is exact and equals AMCT's; fewer where
memory must not depend on the number of batches (``counts_all=False``: Caffe's calibration layers). Beyond the limit all
values are counted: by distinct value (``ValueCounts``) while these are few, otherwise, and always per channel, in a
``FloatHistogram``. Neither grows with the data. Minimum and maximum are always exact, and the storage does not depend
on the order of the data.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amct.numerics.counts.compiled import compiled
from amct.numerics.counts.histogram import CHANNEL_MANTISSA_BITS, MANTISSA_BITS, SHORT_TAIL, TAIL, Bins, FloatHistogram
from amct.numerics.counts.value_counts import ValueCounts
from amct.numerics.min_max import RangeObserver, RunningRange
from amct.numerics.observer import Observer, as_rows, check_mergeable

EXACT_LIMIT = 1 << 20
SMALL_EXACT_LIMIT = 1 << 16
"""The limit unless ``counts_all``: this many values take as much memory as their counts would."""

Floats = NDArray[np.float32]


class Samples:
    """The observed values of one activation, per tensor or per channel (with equally many values per channel)."""

    def __init__(self, channel_axis: int | None = None, *, tail: int = TAIL, counts_all: bool = True) -> None:
        self.range = RunningRange(channel_axis)
        self._tail, self._counts_all = tail, counts_all
        self.merged = False
        """Whether two collections were merged, so that the batches have no order."""
        self._pieces: list[Floats] = []
        self._counts: ValueCounts | FloatHistogram | None = None

    @property
    def exact(self) -> bool:
        """Whether all values are stored."""
        return self._counts is None

    @property
    def _exact_limit(self) -> int:
        return EXACT_LIMIT if self._counts_all else min(EXACT_LIMIT, SMALL_EXACT_LIMIT)

    def expect(self, values: int) -> None:
        """Announce the total number of values: if it exceeds the limit, values are counted from the first one on."""
        if values > self._exact_limit and self._counts is None and not self._pieces:
            self._counts = ValueCounts.empty()

    def add(self, x: Tensor) -> None:
        """Add one batch; a batch that raises changes nothing."""
        if self._add_to_histogram(x):
            return
        rows = self.range.add(x)
        if rows.numel() == 0:
            return
        if self.exact and self.range.count <= self._exact_limit:
            self._pieces.append(rows.cpu().numpy().copy())
        else:
            self._switch_to_counts()
            self._count(rows)

    def _add_to_histogram(self, x: Tensor) -> bool:
        """Check and count a batch in one pass; return False, with nothing changed, where that is not possible."""
        if self.range.channel_axis is not None or not isinstance(self._counts, FloatHistogram):
            return False
        rows = as_rows(x, None)
        found = self._counts.add_in_one_pass(rows)
        if found is not None:
            self.range.add_known(rows.numel(), *found)
        return found is not None

    def merge(self, other: Samples) -> None:
        """Add the values of ``other``, which is not changed."""
        joined = self.range.count > 0 and other.range.count > 0
        self.range.merge(other.range)
        self.merged = self.merged or other.merged or joined
        if self.exact and other.exact and self.range.count <= self._exact_limit:
            self._pieces.extend(other._pieces)
            return
        self._switch_to_counts()
        if other._counts is None:
            for piece in other._pieces:
                self._count(torch.from_numpy(piece))
        elif isinstance(other._counts, ValueCounts):
            self._join(other._counts)
        else:
            self._histogram().merge(other._counts)

    def batches_of(self, channel: int) -> list[Floats]:
        """Return the values of a channel batch by batch; requires ``exact``."""
        assert self.exact
        return [piece[channel] for piece in self._pieces]

    def sorted_values(self, channel: int) -> Floats:
        """Return all values of a channel in ascending order; requires ``exact``."""
        return np.sort(np.concatenate(self.batches_of(channel)))

    def sorted_nonzero(self, channel: int) -> tuple[Floats, int]:
        """Return the sorted non-zero values and the number of zeros; half the time of sorting all after a ReLU."""
        nonzero, zeros = _nonzero(np.concatenate(self.batches_of(channel)))
        nonzero.sort()
        return nonzero, zeros

    def bins(self, channel: int) -> Bins:
        """Return the bins of a channel, limited to the exact minimum and maximum; requires not ``exact``."""
        assert self._counts is not None
        bins = self._counts.bins() if isinstance(self._counts, ValueCounts) else self._counts.bins(channel)
        minimum, maximum = float(self.range.minimum[channel]), float(self.range.maximum[channel])
        return Bins(bins.low.clip(minimum, maximum), bins.high.clip(minimum, maximum), bins.count)

    def _switch_to_counts(self) -> None:
        """Switch from stored values to counts."""
        if self._counts is not None:
            return
        channels = self.range.channels
        self._counts = ValueCounts.empty() if channels == 1 else FloatHistogram(channels, CHANNEL_MANTISSA_BITS)
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self._count(torch.from_numpy(piece))

    def _count(self, rows: Tensor) -> None:
        found = ValueCounts.of(rows) if isinstance(self._counts, ValueCounts) else None
        if found is None:
            self._histogram().add(rows)
        else:
            self._join(found)

    def _join(self, found: ValueCounts) -> None:
        joined = self._counts.plus(found) if isinstance(self._counts, ValueCounts) else None
        if joined is None:
            self._histogram().add_counted(found.values, found.counts)
        else:
            self._counts = joined

    def _histogram(self) -> FloatHistogram:
        """Return the histogram, after switching to it if values were counted by distinct value."""
        if not isinstance(self._counts, FloatHistogram):
            histogram = FloatHistogram(1, MANTISSA_BITS, tail=self._tail, counts_all=self._counts_all)
            if self._counts is not None:
                histogram.add_counted(self._counts.values, self._counts.counts)
            self._counts = histogram
        return self._counts


@compiled
def _nonzero(values: Floats) -> tuple[Floats, int]:
    """Move the non-zero values to the front of ``values``; return them and the number of zeros."""
    number = 0
    for value in values:
        values[number] = value
        number += np.int64(value != 0)
    return values[:number], values.size - number


@dataclass(kw_only=True, eq=False)
class SamplingObserver(RangeObserver):
    """Base of observers that search a range over the observed values."""

    counts_all: bool = True
    """Count all values. If False, only a part of very large batches is counted, so the result depends on how the data
    is split into batches, and fewer values are stored exactly."""
    _samples: Samples = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        tail = SHORT_TAIL if self.bits <= 8 else TAIL
        self._samples = Samples(self.channel_axis, tail=tail, counts_all=self.counts_all)
        self._range = self._samples.range

    @property
    def exact(self) -> bool:
        """Whether the search runs on the values themselves, not on their counts."""
        return self._samples.exact

    def expect(self, values: int) -> None:
        """Announce the total number of values, to avoid a peak of memory; the result does not change."""
        if self.channel_axis is None:
            self._samples.expect(values)

    def observe(self, x: Tensor) -> None:
        """Add one tensor; no reference to it is kept, and it is not changed."""
        self._samples.add(x)

    def merge(self, other: Observer) -> None:
        """Add all data observed by ``other``, an observer with the same settings."""
        check_mergeable(self, other)
        assert isinstance(other, SamplingObserver)
        self._samples.merge(other._samples)

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the range of every channel that the search finds."""
        ranges = [self.search(channel) for channel in range(self._range.channels)]
        minimum, maximum = torch.tensor(ranges, dtype=torch.float64).unbind(1)
        return minimum, maximum

    @abstractmethod
    def search(self, channel: int) -> tuple[float, float]:
        """Return the range (minimum, maximum) with the least quantization error of a channel."""
