"""Compiled loops of the histogram: values are scanned and counted by their bit patterns.

Positive floats are ordered like their bits as signed integers, negative ones by magnitude like unsigned integers. So
vectorized integer maxima give the range of the values, whether all are finite, and whether a stretch holds values
beyond the limits. Values are processed in chunks that fit the processor's cache, so a tensor is read from memory once.

Loops start at zero and run over slices: an index that might be negative would prevent vectorization.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from amct.numerics.counts.compiled import compiled

FLOAT_MANTISSA = 23
BLOCKS = 512
"""Signs and exponents of a float32. A table has bins for all of them, those of infinity and NaN included: loops count
first and check for finite values afterwards."""
RUN = 16
"""Length of a run: consecutive values that are counted or skipped together when sampling."""
LARGEST_INTERVAL = 64
"""The largest sampling interval."""
PIECE = 1 << 14
"""Tensors are split at multiples of this only, so that splitting does not change which values are sampled."""

_CHUNK = 1 << 10  # so few values that most chunks lie within the limits; a multiple of the longest group of runs
_STRETCH = 64
_NOT_FINITE = BLOCKS // 2 - 1  # a block where no finite value is counted
_ZERO_PLACES = 8
_INFINITY = 255 << FLOAT_MANTISSA
_SIGN = 1 << 31
_PROBED_RUNS, _ODD = 64, 37
_PROBE_BITS = 11  # twice as many slots as probed values

Bits = NDArray[np.uint32]
SignedBits = NDArray[np.int32]
Counts = NDArray[np.int64]
Tallies = NDArray[np.uint32] | NDArray[np.int64]
Floats = NDArray[np.float32]
Values = NDArray[np.float64]


class Scan(NamedTuple):
    """Result of ``scan_and_count`` besides the counts."""

    outside: Bits
    """The values at or beyond the limits; one more than ``room`` when there are too many."""
    counted: int
    """Number of counted values."""
    largest: int
    """Largest bit pattern as a signed integer: the largest value if any is positive."""
    outermost: int
    """Largest bit pattern as an unsigned integer: the smallest value if any is negative."""
    innermost: int
    """Smallest bit pattern as an unsigned integer."""
    least: int
    """Bit pattern of the smallest magnitude that is not zero, less one; of all ones when there is none."""

    @property
    def is_finite(self) -> bool:
        """Whether there is no NaN and no infinity."""
        return self.largest < _INFINITY and self.outermost < _SIGN + _INFINITY

    @property
    def blocks(self) -> tuple[slice, slice]:
        """Between which blocks all values but zeros lie, the positive and the negative ones."""
        first = self.least + 1 >> FLOAT_MANTISSA
        positive = slice(first, (self.largest >> FLOAT_MANTISSA) + 1 if self.largest > 0 else first)
        return positive, slice(BLOCKS // 2 + first, max(self.outermost >> FLOAT_MANTISSA, BLOCKS // 2 - 1) + 1)

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        smallest = self.outermost if self.outermost >= _SIGN else self.innermost
        largest = self.largest if self.largest >= 0 else self.innermost
        low, high = np.array([smallest, largest], np.uint32).view(np.float32).tolist()
        return low, high


Limits = tuple[int, int]
"""Bit patterns of a negative and a positive limit."""


def limits_of(lower: float, upper: float) -> Limits:
    """Return the bit patterns of two values."""
    below, above = np.array([lower, upper], np.float32).view(np.uint32).tolist()
    return below, above


class Runs(NamedTuple):
    """Which values are counted, and how often each."""

    every: int = 1
    """The sampling interval: a power of two, at most ``LARGEST_INTERVAL``."""
    offset: int = 0
    """The index of the first value in the tensor, a multiple of ``PIECE``."""
    weight: int = 1
    """What a counted value adds to its bin."""


def scan_and_count(values: Floats, table: Tallies, mantissa_bits: int, limits: Limits, room: int, runs: Runs) -> Scan:
    """Scan all values, and count all or a sample of them in a table of all bins.

    Args:
        values: when sampling, values after the last whole group of runs are not counted.
        table: counts by top bits, updated. If some value is not finite, counting again with the negative weight undoes
            it.
        mantissa_bits: of the bins.
        limits: values at or beyond these are collected.
        room: maximum number of collected values.
        runs: which values are counted.
    """
    return Scan(*_scan_and_count(values, table, mantissa_bits, limits, room, runs))


@compiled
def _scan_and_count(
    values: Floats, table: Tallies, mantissa_bits: int, limits: Limits, room: int, runs: tuple[int, int, int]
) -> tuple[Bits, int, int, int, int, int]:
    every, offset, weight = runs
    bits, signed = values.view(np.uint32), values.view(np.int32)
    found = np.empty(room + _STRETCH, np.uint32)
    extremes = _no_extremes()
    number = 0
    for begin in range(0, bits.size, _CHUNK):
        chunk = bits[begin : begin + _CHUNK]
        number = _scan(chunk, signed[begin : begin + _CHUNK], limits, found, number, extremes)
        if every == 1:
            _count_all(chunk, table, mantissa_bits, weight)
        else:
            _count_runs(chunk, table, mantissa_bits, every, offset + begin, weight)
    zeros = _NOT_FINITE << mantissa_bits
    for place in range(zeros, zeros + min(_ZERO_PLACES, 1 << mantissa_bits)):
        table[0] += table[place]
        table[place] = 0
    counted = bits.size if every == 1 else bits.size // (RUN * every) * RUN
    return found[: min(number, room + 1)], counted, extremes[0], extremes[1], extremes[2], extremes[3]


@compiled
def count_alone(
    values: Floats, table: Tallies, first_bin: Counts, mantissa_bits: int, limits: Limits, room: int, enough: int
) -> tuple[Bits, int, float, float]:
    """Scan and count a batch in a single call, as ``scan_and_count`` does in many: calls cost more than small batches.

    Args:
        values: the batch, not empty.
        table: counts by top bits, updated unless some value is not finite.
        first_bin: start of each block in which something may be counted, updated.
        mantissa_bits: of the bins.
        limits: values at or beyond these are collected.
        room: maximum number of collected values.
        enough: number of values that are counted at least; negative: all are counted.

    Returns:
        The collected values as in ``Scan``, the sampling interval (0: some value is not finite), minimum and maximum.
    """
    every = 1 if enough < 0 else sampling_interval(values, enough)
    found, _, largest, outermost, innermost, least = _scan_and_count(
        values, table, mantissa_bits, limits, room, (every, 0, every)
    )
    if largest >= _INFINITY or outermost >= _SIGN + _INFINITY:
        _scan_and_count(values, table, mantissa_bits, limits, room, (every, 0, -every))
        return found, 0, 0.0, 0.0
    first, half = (least + 1) >> FLOAT_MANTISSA, BLOCKS // 2
    first_bin[0], first_bin[half] = 0, half << mantissa_bits  # of the two zeros
    for block in range(first, (largest >> FLOAT_MANTISSA) + 1):
        first_bin[block] = block << mantissa_bits
    for block in range(half + first, (outermost >> FLOAT_MANTISSA) + 1):
        first_bin[block] = block << mantissa_bits
    ends = np.empty(2, np.uint32)
    ends[0] = outermost if outermost >= _SIGN else innermost
    ends[1] = largest if largest >= 0 else innermost
    low_and_high = ends.view(np.float32)
    return found, every, np.float64(low_and_high[0]), np.float64(low_and_high[1])


def range_of(values: Floats) -> tuple[float, float] | None:
    """Return the smallest and the largest value; None when one is NaN or infinite."""
    scan = Scan(np.empty(0, np.uint32), 0, *_extremes(values))
    return scan.range if scan.is_finite else None


@compiled
def _extremes(values: Floats) -> tuple[int, int, int, int]:
    return _extremes_of(values.view(np.uint32), values.view(np.int32))


@compiled
def _extremes_of(bits: Bits, signed: SignedBits) -> tuple[int, int, int, int]:
    """Return ``largest``, ``outermost``, ``innermost`` and ``least`` of a ``Scan``."""
    high, outer = np.int32(-_SIGN), np.uint32(0)
    inner, least = np.uint32(2 * _SIGN - 1), np.uint32(2 * _SIGN - 1)
    for place in range(bits.size):
        high = max(high, signed[place])
        outer = max(outer, bits[place])
        inner = min(inner, bits[place])
        least = min(least, (bits[place] & np.uint32(_SIGN - 1)) - np.uint32(1))  # less one, zero is the largest
    return high, outer, inner, least


@compiled
def _no_extremes() -> Counts:
    return np.array([-_SIGN, 0, 2 * _SIGN - 1, 2 * _SIGN - 1], np.int64)


@compiled
def outside(values: Floats, limits: Limits) -> Floats:
    """Return the values at or beyond the limits."""
    bits, signed = values.view(np.uint32), values.view(np.int32)
    found = np.empty(_CHUNK + _STRETCH, np.uint32)
    extremes = _no_extremes()
    number = 0
    for begin in range(0, bits.size, _CHUNK):
        if found.size < number + _CHUNK + _STRETCH:
            found = np.concatenate((found, found))
        number = _scan(bits[begin : begin + _CHUNK], signed[begin : begin + _CHUNK], limits, found, number, extremes)
    kept: Floats = found[:number].copy().view(np.float32)
    return kept


@compiled
def _scan(bits: Bits, signed: SignedBits, limits: Limits, found: Bits, number: int, extremes: Counts) -> int:
    """Update the extremes, and append the values at or beyond the limits to the first ``number`` of ``found``."""
    lower, upper = np.uint32(limits[0]), np.int32(limits[1])
    largest, outermost, innermost, least = _extremes_of(bits, signed)
    if (largest >= upper or outermost >= lower) and number <= found.size - _STRETCH:
        for begin in range(0, bits.size, _STRETCH):
            part, part_signed = bits[begin : begin + _STRETCH], signed[begin : begin + _STRETCH]
            hits = np.int32(0)
            for place in range(part.size):
                hits += np.int32((part_signed[place] >= upper) | (part[place] >= lower))
            if hits and number <= found.size - _STRETCH:
                for place in range(part.size):
                    found[number] = part[place]
                    number += np.int64((part_signed[place] >= upper) | (part[place] >= lower))
    extremes[0] = max(extremes[0], np.int64(largest))
    extremes[1] = max(extremes[1], np.int64(outermost))
    extremes[2] = min(extremes[2], np.int64(innermost))
    extremes[3] = min(extremes[3], np.int64(least))
    return number


@compiled
def steps_beyond(values: Floats, inverse: float, first: int, last: int) -> int:
    """Count the values that are rounded to less than ``first`` or more than ``last`` steps of 1 / ``inverse``."""
    low, high, factor = np.float32(first), np.float32(last), np.float32(inverse)
    number = 0
    for begin in range(0, values.size, _CHUNK):
        part, inside = values[begin : begin + _CHUNK], np.int32(0)
        for place in range(part.size):
            step = np.rint(part[place] * factor)
            inside += np.int32((step >= low) & (step <= high))
        number += part.size - inside
    return number


@compiled
def sampling_interval(values: Floats, enough: int) -> int:
    """Return n such that counting one run in n counts ``enough`` values that are not near zero, or up to twice as many.

    Values near zero are excluded, as they are rounded to zero; their number is estimated from some runs of the tensor.
    Data with few distinct values, such as pixels, is counted completely.
    """
    if values.size < 2 * enough:
        return 1
    step = values.size // _PROBED_RUNS - _ODD  # odd, so that the probed runs start in all channels
    largest, number = np.float32(0), 0
    for begin in range(0, _PROBED_RUNS * step, step):
        for place in range(begin, begin + RUN):
            largest = max(largest, abs(values[place]))
    for begin in range(0, _PROBED_RUNS * step, step):
        for place in range(begin, begin + RUN):
            number += np.int64(abs(values[place]) > largest / 256)
    matter = values.size * number // (_PROBED_RUNS * RUN)
    every = 1
    while every < LARGEST_INTERVAL and matter >= 2 * every * enough:
        every *= 2
    return 1 if every > 1 and _few_distinct(values, step, largest / 256) else every


@compiled
def _few_distinct(values: Floats, step: int, bound: float) -> bool:
    """Return whether values of the probed runs repeat often; neighbours may be equal, as pooling makes them."""
    mask = np.uint64((1 << _PROBE_BITS) - 1)
    keys = np.zeros(1 << _PROBE_BITS, np.uint32)  # zero is near zero, so it is none of the keys
    bits = values.view(np.uint32)
    number = distinct = 0
    for begin in range(0, _PROBED_RUNS * step, step):
        for place in range(begin, begin + RUN):
            if abs(values[place]) <= bound or (place > begin and bits[place] == bits[place - 1]):
                continue
            number += 1
            slot = (np.uint64(bits[place]) * np.uint64(0x9E3779B1) >> np.uint64(32 - _PROBE_BITS)) & mask
            while keys[slot] != 0 and keys[slot] != bits[place]:
                slot = (slot + np.uint64(1)) & mask
            distinct += np.int64(keys[slot] == 0)
            keys[slot] = bits[place]
    return 4 * distinct < 3 * number


@compiled
def _count_all(bits: Bits, table: Tallies, mantissa_bits: int, weight: int) -> None:
    """Count every value.

    Zeros, about half of the values after a ReLU, are counted in several places in turn: repeated increments of one
    place wait for each other, which doubles the time.
    """
    shift = np.uint32(FLOAT_MANTISSA - mantissa_bits)
    zeros, places = np.uint64(_NOT_FINITE << mantissa_bits), min(_ZERO_PLACES, 1 << mantissa_bits) - 1
    for position in range(bits.size):
        value = bits[position]
        # Unsigned indices avoid the check for negative ones.
        place = np.uint64(value >> shift)
        place = zeros + np.uint64(position & places) if value == 0 else place
        table[place] += weight


@compiled
def _count_runs(bits: Bits, table: Tallies, mantissa_bits: int, every: int, begin: int, weight: int) -> None:
    """Count one run of each group of ``every``; its position varies between groups, so no channel is preferred."""
    shift = np.uint32(FLOAT_MANTISSA - mantissa_bits)
    zeros, places = np.uint64(_NOT_FINITE << mantissa_bits), min(_ZERO_PLACES, 1 << mantissa_bits) - 1
    group = RUN * every
    # The fractional parts of multiples of the golden ratio are evenly spread over 0..1.
    golden = np.uint64(0x9E3779B97F4A7C15)
    fraction = np.uint64(begin // group) * golden
    for position in range(0, bits.size - group + 1, group):
        run = (fraction >> np.uint64(32)) * np.uint64(every) >> np.uint64(32)
        first = np.uint64(position) + run * np.uint64(RUN)
        fraction += golden
        for step in range(RUN):
            value = bits[first + np.uint64(step)]
            place = np.uint64(value >> shift)
            place = zeros + np.uint64(step & places) if value == 0 else place
            table[place] += weight


@compiled
def count_by_lookup(bits: Bits, done: int, first_bin: Counts, counts: Tallies, used: Counts, mantissa_bits: int) -> int:
    """Count the values from position ``done`` on, and allocate their blocks.

    Returns:
        The number of values, or the position of a value whose block needs more room.
    """
    shift = np.uint32(FLOAT_MANTISSA - mantissa_bits)
    mask = np.uint32((1 << mantissa_bits) - 1)
    for position in range(done, bits.size):
        value = bits[position]
        block = value >> np.uint32(FLOAT_MANTISSA)
        first = first_bin[block]
        if first < 0:
            if used[0] == counts.size:
                return position
            first = used[0]
            first_bin[block] = first
            used[0] += mask + 1
        counts[np.uint64(first) + np.uint64((value >> shift) & mask)] += 1
    return bits.size


@compiled
def move_blocks(table: Tallies, counts: Tallies, mantissa_bits: int, first: int, end: int) -> None:
    """Add the blocks ``first`` to ``end`` of a table to another one of the same bins, and clear them."""
    for place in range(first << mantissa_bits, end << mantissa_bits):
        counts[place] += table[place]
        table[place] = 0


@compiled
def occupied(first_bin: Counts, counts: Tallies, mantissa_bits: int) -> tuple[Values, Values, Values]:
    """Return lower end, upper end and count of all non-empty bins, ascending."""
    size, half = 1 << mantissa_bits, first_bin.size // 2
    room = np.sum(first_bin >= 0) << mantissa_bits
    inner, found = np.empty(room, np.uint32), np.empty(room, np.float64)
    number = negative = 0
    for step in range(first_bin.size):
        if step == half:
            negative = number
        # The blocks of negative floats follow those of positive ones, from zero outwards.
        block = first_bin.size - 1 - step if step < half else step - half
        first = first_bin[block]
        if first < 0:
            continue
        magnitude = (block % half) << mantissa_bits
        for place in range(size):
            inside = size - 1 - place if step < half else place
            inner[number] = (magnitude + inside) << (FLOAT_MANTISSA - mantissa_bits)
            found[number] = counts[first + inside]
            number += np.int64(counts[first + inside] > 0)
    outer = inner + np.uint32(1 << (FLOAT_MANTISSA - mantissa_bits))
    near, far = inner.view(np.float32), outer.view(np.float32)
    low, high = np.empty(number), np.empty(number)
    for place in range(number):
        begin, end = (
            np.float64(near[place]),
            min(np.float64(far[place]), 2.0**128),
        )  # the bin after the largest is infinity
        low[place], high[place] = (-end, -begin) if place < negative else (begin, end)
    return low, high, found[:number].copy()


@compiled
def tail_begin(first_bin: Counts, counts: Tallies, mantissa_bits: int, tail: int) -> int:
    """Return the index of the first bin from which on the blocks of one sign hold at most ``tail`` values."""
    seen = 0
    for block in range(first_bin.size - 1, -1, -1):
        begin = first_bin[block]
        if begin < 0:
            continue
        total = np.int64(counts[begin : begin + (1 << mantissa_bits)].sum())
        if seen + total <= tail:
            seen += total
            continue
        place = (1 << mantissa_bits) - 1
        while seen + counts[begin + place] <= tail:
            seen += counts[begin + place]
            place -= 1
        return (block << mantissa_bits) + place + 1
    return 0
