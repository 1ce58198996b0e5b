"""Storage of observed values: exact values while they are few, counts beyond.

Up to ``EXACT_LIMIT`` values per layer are stored, so that a search over them is exact and equals AMCT's; fewer where
memory must not depend on the number of batches (``keeps_few``: Caffe's calibration layers). Beyond the limit all
values, or as many of each batch as are ``enough``, are counted: by distinct value (``ValueCounts``) while these are
few, otherwise, and always per channel, in a ``FloatHistogram``. Neither grows with the data. Minimum and maximum are
always exact. Stored values are in the order of their batches, whose numbers a caller can tell (``begin_batch``); counts
do not depend on any order. So it does not matter how batches are divided among several collections that are merged.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amct.errors import CalibrationError
from amct.numerics.counts.compiled import compiled
from amct.numerics.counts.histogram import (
    CHANNEL_MANTISSA_BITS,
    MANTISSA_BITS,
    SHORT_MANTISSA_BITS,
    SHORT_TAIL,
    TAIL,
    Bins,
    FloatHistogram,
)
from amct.numerics.counts.tables import sampling_interval
from amct.numerics.observer import RangeObserver, RunningRange, State, check_mergeable, checked_array, flat_values

if TYPE_CHECKING:
    from amct.numerics.counts.tables import Bits, Counts
    from amct.numerics.settings import ActivationSettings

EXACT_LIMIT = 1 << 20
SMALL_EXACT_LIMIT = 1 << 16
"""The limit with ``keeps_few``: this many values take as much memory as their counts would."""

SAMPLING_TARGET = 1 << 18
"""How many values not near zero of all batches together are enough for a search.

A loss estimated from m values has a relative standard error of 0.9 / sqrt(m): that is the standard deviation of squared
rounding errors, in units of their mean. What lies in the tails, where few values make up much of the loss, is exact. So
the difference of two losses is known to 1.3 / sqrt(m) = 0.25 %, and a choice that is 1 % worse than the best one would
take an error of four standard deviations."""
LEAST_SAMPLES = 1 << 13
"""How many are counted of each batch at least."""

Floats = NDArray[np.float32]


class ObservedValues:
    """The observed values of one activation, per tensor or per channel (with equally many values per channel)."""

    def __init__(
        self,
        channel_axis: int | None = None,
        *,
        bits: int = 16,
        enough: int | None = None,
        keeps_few: bool = False,
    ) -> None:
        self.range = RunningRange(channel_axis)
        self.enough = enough
        """How many values not near zero are counted of a batch at least; None: all."""
        self._bits, self._keeps_few = bits, keeps_few
        self._pieces: list[Floats] = []
        self._numbers: list[int] = []  # of the batch that each piece is from
        self._number: int | None = None
        self._counts: ValueCounts | FloatHistogram | None = None

    @property
    def exact(self) -> bool:
        """Whether all values are stored."""
        return self._counts is None

    @property
    def _exact_limit(self) -> int:
        return min(EXACT_LIMIT, SMALL_EXACT_LIMIT) if self._keeps_few else EXACT_LIMIT

    def begin_batch(self, number: int) -> None:
        """Tell the number of the batch that is added next; without numbers, batches have the order of their adding."""
        self._number = number

    def expect(self, values: int) -> None:
        """Tell the total number of values of all processes: if it exceeds the limit, all are counted."""
        if values <= self._exact_limit or self._counts is not None:
            return
        if self._pieces:
            self._switch_to_counts()
        elif self.range.channel_axis is None:
            self._counts = ValueCounts.empty()

    @property
    def next_number(self) -> int:
        """The number of the batch that is added next."""
        return self.range.batches if self._number is None else self._number

    def add(self, x: Tensor) -> None:
        """Add one batch; a batch that raises changes nothing."""
        if self._add_to_histogram(x):
            return
        number = self.next_number
        rows = self.range.add(x)
        if rows.numel() == 0:
            return
        if self.exact and self.range.count <= self._exact_limit:
            self._pieces.append(rows.cpu().numpy().copy())
            self._numbers.append(number)
        else:
            self._switch_to_counts()
            self._count(rows)

    def _add_to_histogram(self, x: Tensor) -> bool:
        """Check and count a batch in one pass; return False, with nothing changed, where that is not possible."""
        counts = self._counts
        if self.range.channel_axis is not None or counts is None or x.device.type == "cuda":
            return False
        values = flat_values(x)
        if isinstance(counts, ValueCounts):
            if counts.bits.size or not self._is_varied(values):
                return False
            counts = self._new_histogram()
        found = counts.add_in_one_pass(values)
        if found is None:
            return False
        self._counts = counts
        self.range.add_known(values.size, *found)
        return True

    def merge(self, other: ObservedValues) -> None:
        """Add the values of ``other``, which is not changed; of batches with the same number, its own come first."""
        self.range.merge(other.range)
        if self.exact and other.exact and self.range.count <= self._exact_limit:
            numbered = [
                *zip(self._numbers, self._pieces, strict=True),
                *zip(other._numbers, other._pieces, strict=True),
            ]
            numbered.sort(key=itemgetter(0))
            self._numbers = [number for number, _ in numbered]
            self._pieces = [piece for _, piece in numbered]
            return
        self._switch_to_counts()
        if other._counts is None:
            for piece in other._pieces:
                self._count(torch.from_numpy(piece))
        elif isinstance(other._counts, ValueCounts):
            self._join(other._counts)
        else:
            self._histogram().merge(other._counts)

    def state(self) -> State:
        """Return everything as arrays: the range, and the stored values or their counts."""
        if self._counts is not None:
            return {**self.range.state(), **self._counts.state()}
        empty = np.empty((self.range.channels, 0), np.float32)
        return {
            **self.range.state(),
            "values": np.concatenate([empty, *self._pieces], axis=1),
            "sizes": np.array([piece.shape[1] for piece in self._pieces], np.int64),
            "numbers": np.array(self._numbers, np.int64),
        }

    def restore(self, state: State) -> None:
        """Replace everything by a state."""
        self.range.restore(state)
        self._pieces, self._numbers, self._counts = [], [], None
        if "values" in state:
            self._restore_pieces(state)
        elif "value_bits" in state:
            self._counts = ValueCounts.restored(state)
        else:
            histogram = self._new_histogram()
            histogram.restore(state)
            self._counts = histogram

    def _restore_pieces(self, state: State) -> None:
        channels, count = self.range.channels, self.range.count
        values = checked_array(state, "values", np.float32, (channels, count // max(channels, 1)))
        sizes = checked_array(state, "sizes", np.int64, (None,))
        if (sizes < 0).any() or sizes.sum() != values.shape[1]:
            raise CalibrationError("the state of an observer does not fit: the sizes of its batches")
        self._numbers = checked_array(state, "numbers", np.int64, sizes.shape).tolist()
        self._pieces = [piece.copy() for piece in np.split(values, np.cumsum(sizes)[:-1], axis=1)] if sizes.size else []

    def batches_of(self, channel: int) -> list[Floats]:
        """Return the values of a channel batch by batch; requires ``exact``."""
        assert self.exact
        return [piece[channel] for piece in self._pieces]

    def sorted_nonzero(self, channel: int) -> tuple[Floats, int]:
        """Return the sorted non-zero values and the number of zeros; half the time of sorting all after a ReLU."""
        nonzero, zeros = _nonzero(np.concatenate(self.batches_of(channel)))
        nonzero.sort()
        return nonzero, zeros

    def bins(self, channel: int) -> Bins:
        """Return the bins of a channel, limited to the exact minimum and maximum; requires not ``exact``."""
        assert self._counts is not None
        bins = self._counts.bins() if isinstance(self._counts, ValueCounts) else self._counts.bins(channel)
        minimum, maximum = self.range.ends(channel)
        if bins.low[0] >= minimum and bins.high[-1] <= maximum:
            return bins
        return Bins(bins.low.clip(minimum, maximum), bins.high.clip(minimum, maximum), bins.count)

    def _switch_to_counts(self) -> None:
        """Switch from stored values to counts."""
        if self._counts is not None:
            return
        self._counts = ValueCounts.empty() if self.range.channels == 1 else self._new_histogram()
        pieces, self._pieces, self._numbers = self._pieces, [], []
        for piece in pieces:
            self._count(torch.from_numpy(piece))

    def _new_histogram(self) -> FloatHistogram:
        if self.range.channel_axis is not None and self.range.channels != 1:
            return FloatHistogram(self.range.channels, CHANNEL_MANTISSA_BITS)
        if self._bits > 8:
            return FloatHistogram(1, MANTISSA_BITS, tail=TAIL, enough=self.enough)
        return FloatHistogram(1, SHORT_MANTISSA_BITS, tail=SHORT_TAIL, enough=self.enough)

    def _count(self, rows: Tensor) -> None:
        found = None
        if isinstance(self._counts, ValueCounts) and (
            rows.device.type == "cuda" or not self._is_sampled(rows.numpy()[0])
        ):
            found = ValueCounts.of(rows)
        if found is None:
            self._histogram().add(rows)
        else:
            self._join(found)

    def _is_sampled(self, values: Floats) -> bool:
        """Whether only a part of a batch is counted, which the batch alone decides, not those before it."""
        return self.enough is not None and sampling_interval(values, self.enough) > 1

    def _is_varied(self, values: Floats) -> bool:
        """Whether a batch has too many distinct values to count each of them, or is sampled."""
        return self._is_sampled(values) or ValueCounts.of(torch.from_numpy(values)) is None

    def _join(self, found: ValueCounts) -> None:
        joined = self._counts.plus(found) if isinstance(self._counts, ValueCounts) else None
        if joined is None:
            self._histogram().add_counted(found.values, found.counts)
        else:
            self._counts = joined

    def _histogram(self) -> FloatHistogram:
        """Return the histogram, after switching to it if values were counted by distinct value."""
        if not isinstance(self._counts, FloatHistogram):
            histogram = self._new_histogram()
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

    settings: ActivationSettings = field(kw_only=False)
    bits: int = field(init=False)
    asymmetric: bool = field(init=False)
    keeps_few: bool = False
    """Store fewer values exactly."""
    _samples: ObservedValues = field(init=False, repr=False)
    _planned_batches: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self.bits, self.asymmetric = self.settings.num_bits, self.settings.asymmetric
        super().__post_init__()
        self._samples = ObservedValues(self.channel_axis, bits=self.bits, keeps_few=self.keeps_few)
        self._range = self._samples.range

    def sample_for(self, batches: int | None) -> None:
        """Count only as much of large batches as a result from this many batches needs; to be called first.

        The result then depends on how the data is split into batches. The size of the first of all batches gives the
        expected number of values: above the limit they are counted from the start.

        Args:
            batches: the number of all batches; None: it is not known.
        """
        self._planned_batches = batches
        self._samples.enough = max(SAMPLING_TARGET // (batches or 1), LEAST_SAMPLES)

    @property
    def exact(self) -> bool:
        """Whether the search runs on the values themselves, not on their counts."""
        return self._samples.exact

    def begin_batch(self, number: int) -> None:
        """Tell the number of the next batch."""
        self._samples.begin_batch(number)

    def expect(self, values: int) -> None:
        """Tell the number of values of all processes: above a limit the stored ones are counted."""
        self._samples.expect(values)

    def observe(self, x: Tensor) -> None:
        """Add one tensor; no reference to it is kept, and it is not changed."""
        if self._planned_batches is not None and self._samples.next_number == 0:
            self.expect(x.numel() * self._planned_batches)
        self._samples.add(x)

    def look_at(self, other: SamplingObserver) -> None:
        """Search over what ``other`` has observed, which is not copied."""
        self._samples, self._range = other._samples, other._range

    def merge(self, other: SamplingObserver) -> None:
        """Add all data observed by ``other``, an observer with the same settings."""
        check_mergeable(self, other)
        self._samples.merge(other._samples)

    def state(self) -> State:
        """Return everything observed so far."""
        return self._samples.state()

    def restore(self, state: State) -> None:
        """Replace everything observed so far by a state."""
        self._samples.restore(state)

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the range of every channel that the search finds."""
        ranges = np.array([self.search(channel) for channel in range(self._range.channels)])
        return torch.from_numpy(ranges[:, 0]), torch.from_numpy(ranges[:, 1])

    @abstractmethod
    def search(self, channel: int) -> tuple[float, float]:
        """Return the range (minimum, maximum) with the least quantization error of a channel."""


# -- Exact counts of data with few distinct values: pixels, outputs of a quantized layer, masks ------------------------
#
# A histogram takes values as evenly spread within a bin, which is wrong for such data and matters above 8 bits. Whether
# data has few distinct values does not depend on its order, and most other data exceeds the limit within a few thousand
# values, so checking costs little.


MAX_DISTINCT_VALUES = 4096

_HASH_BITS = 14  # four times as many slots as distinct values


@dataclass(frozen=True)
class ValueCounts:
    """Bit patterns of at most ``MAX_DISTINCT_VALUES`` distinct float32 values, and the count of each."""

    bits: Bits
    counts: Counts

    @staticmethod
    def empty() -> ValueCounts:
        """Return counts without any value."""
        return ValueCounts(np.empty(0, np.uint32), np.empty(0, np.int64))

    @staticmethod
    def of(x: Tensor) -> ValueCounts | None:
        """Count finite float32 values; ``None`` when there are too many distinct ones."""
        if x.device.type == "cuda":
            bits, counts = _count_by_torch(x)
        else:
            bits, counts = _count_values(x.contiguous().numpy().reshape(-1).view(np.uint32), MAX_DISTINCT_VALUES)
        return ValueCounts(bits, counts) if bits.size <= MAX_DISTINCT_VALUES else None

    @property
    def values(self) -> NDArray[np.float32]:
        """The distinct values, unordered."""
        return self.bits.view(np.float32)

    def plus(self, other: ValueCounts) -> ValueCounts | None:
        """Return the sum of both counts; ``None`` when there are too many distinct values."""
        bits, counts = _joined((self.bits, self.counts), (other.bits, other.counts))
        return ValueCounts(bits, counts) if bits.size <= MAX_DISTINCT_VALUES else None

    def state(self) -> State:
        """Return the counts as arrays."""
        return {"value_bits": self.bits, "value_counts": self.counts}

    @staticmethod
    def restored(state: State) -> ValueCounts:
        """Return the counts of a state."""
        bits = checked_array(state, "value_bits", np.uint32, (None,))
        counts = checked_array(state, "value_counts", np.int64, bits.shape)
        if bits.size > MAX_DISTINCT_VALUES or (counts < 0).any():
            raise CalibrationError("the state of an observer does not fit: the counts of its values")
        return ValueCounts(bits, counts)

    def bins(self) -> Bins:
        """Return one bin of zero width per value, ascending."""
        order = np.argsort(self.values, kind="stable")
        values = self.values[order].astype(np.float64)
        return Bins(values, values, self.counts[order].astype(np.float64))


def _count_by_torch(x: Tensor) -> tuple[Bits, Counts]:
    """Count on the GPU, without copying the values to the CPU."""
    bits, counts = torch.unique(x.contiguous().view(torch.int32), return_counts=True)
    return bits.cpu().numpy().view(np.uint32), counts.cpu().numpy()


@compiled
def _count_values(bits: Bits, most: int) -> tuple[Bits, Counts]:
    """Count every bit pattern in a hash table; stop when there are more than ``most``."""
    keys, counts = np.empty(1 << _HASH_BITS, np.uint32), np.zeros(1 << _HASH_BITS, np.int64)
    used = 0
    for position in range(bits.size):
        slot = _slot_of(bits[position], keys, counts)
        if counts[slot] == 0:
            keys[slot] = bits[position]
            used += 1
        counts[slot] += 1
        if used > most:
            return keys[:used], counts[:used]  # the caller uses only their number
    found = counts > 0
    return keys[found], counts[found]


@compiled
def _joined(one: tuple[Bits, Counts], other: tuple[Bits, Counts]) -> tuple[Bits, Counts]:
    """Return the sum of two counts, each of at most ``MAX_DISTINCT_VALUES`` bit patterns, in the order of these."""
    keys, counts = np.empty(1 << _HASH_BITS, np.uint32), np.zeros(1 << _HASH_BITS, np.int64)
    for bits, amounts in (one, other):
        for position in range(bits.size):
            slot = _slot_of(bits[position], keys, counts)
            keys[slot] = bits[position]
            counts[slot] += amounts[position]
    slots = np.flatnonzero(counts)
    slots = slots[np.argsort(keys[slots])]
    return keys[slots], counts[slots]


@compiled
def _slot_of(key: int, keys: Bits, counts: Counts) -> np.uint64:
    """Return the slot of a bit pattern in a hash table, or the free one for it."""
    mask = np.uint64((1 << _HASH_BITS) - 1)
    # Fibonacci hashing: multiplication by 2^32 / golden ratio scatters evenly spaced keys.
    slot: np.uint64 = (np.uint64(key) * np.uint64(0x9E3779B1) >> np.uint64(32 - _HASH_BITS)) & mask
    while counts[slot] != 0 and keys[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return slot
