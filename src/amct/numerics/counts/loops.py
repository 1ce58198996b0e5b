"""The loops under the histogram: values looked at and counted by their bits, compiled.

Positive floats are ordered like their bits as signed integers, negative ones by size like unsigned integers. So integer
maxima, which compilers vectorize, tell the range of the values, whether all of them are finite, and whether a stretch
of them need be looked at closer. Values are taken in chunks that fit into a processor's cache: what was looked at is
counted while it is still there, and a tensor is read from memory once.

Loops begin at zero and run over slices: an index that might be negative would keep them from being vectorized.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from amct.numerics.counts.compiled import compiled

FLOAT_MANTISSA = 23
BLOCKS = 512  # signs and exponents of a float32
TABLE_MANTISSA = 11
TABLE_SIZE = BLOCKS << TABLE_MANTISSA
"""Bins of all values, infinity and NaN among them: loops count first and look whether all were finite afterwards."""
RUN = 16
"""So many values in a row are counted or left out together when not all are counted."""
MOST_LEFT_OUT = 8
"""One of so many runs is counted, at least."""
PIECE = 1 << 14
"""Tensors are cut into pieces at multiples of this, or not at all: what is counted of them then stays the same."""

_CHUNK = PIECE
_STRETCH = 64
_ZEROS = (BLOCKS // 2 - 1) << TABLE_MANTISSA  # where no finite value is counted: a block of infinity and NaN
_ZERO_PLACES = 8
_INFINITY = 255 << FLOAT_MANTISSA
_SIGN = 1 << 31
_SOME_RUNS, _ODD = 64, 37

Bits = NDArray[np.uint32]
SignedBits = NDArray[np.int32]
Counts = NDArray[np.int64]
Tallies = NDArray[np.uint32] | NDArray[np.int64]
Floats = NDArray[np.float32]
Values = NDArray[np.float64]


class Look(NamedTuple):
    """What ``look_and_count`` saw besides what it counted."""

    outside: Bits
    """The values from the limits outwards; one more than there was room for when they are too many."""
    counted: int
    """How many values."""
    largest: int
    """Bits of the largest value, signed: negative when all values are."""
    outermost: int
    """Bits of the largest unsigned integer: the smallest value when any is negative."""
    innermost: int
    """Bits of the smallest unsigned integer."""

    @property
    def is_finite(self) -> bool:
        """There was no NaN and no infinity."""
        return self.largest < _INFINITY and self.outermost < _SIGN + _INFINITY

    @property
    def ends(self) -> tuple[int, int]:
        """The blocks of the largest and of the smallest value; -1 when no value is positive or negative."""
        return self.largest >> FLOAT_MANTISSA, self.outermost >> FLOAT_MANTISSA if self.outermost >= _SIGN else -1

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        smallest = self.outermost if self.outermost >= _SIGN else self.innermost
        largest = self.largest if self.largest >= 0 else self.innermost
        low, high = np.array([smallest, largest], np.uint32).view(np.float32).tolist()
        return low, high


Limits = tuple[int, int]
"""Bits of two values, below zero and above."""


def limits_of(lower: float, upper: float) -> Limits:
    """The bits of two values."""
    below, above = np.array([lower, upper], np.float32).view(np.uint32).tolist()
    return below, above


def look_and_count(values: Floats, table: Bits, limits: Limits, room: int, runs: tuple[int, int]) -> Look:
    """Count values in a table of all bins, and look at all of them, whether they are counted or not.

    Args:
        values: when not all are counted, those behind the last whole group of runs are not.
        table: a count for each top bits of a float; when not all values are finite, it is of no use afterwards.
        limits: values from these outwards are sought.
        room: for so many of these.
        runs: of how many runs one is counted (a power of two, at most ``MOST_LEFT_OUT``), and where the values begin
            in the tensor that they are a piece of (a multiple of ``PIECE``).
    """
    return Look(*_look_and_count(values, table, limits, room, runs))


@compiled
def _look_and_count(
    values: Floats, table: Bits, limits: Limits, room: int, runs: tuple[int, int]
) -> tuple[Bits, int, int, int, int]:
    every, offset = runs
    bits, signed = values.view(np.uint32), values.view(np.int32)
    found = np.empty(room + _STRETCH, np.uint32)
    extremes = np.array([-_SIGN, 0, 2 * _SIGN - 1], np.int64)
    number = 0
    for begin in range(0, bits.size, _CHUNK):
        chunk = bits[begin : begin + _CHUNK]
        number = _look(chunk, signed[begin : begin + _CHUNK], limits, found, number, extremes)
        if every == 1:
            _count_all(chunk, table)
        else:
            _count_runs(chunk, table, every, offset + begin)
    for place in range(_ZEROS, _ZEROS + _ZERO_PLACES):
        table[0] += table[place]
        table[place] = 0
    counted = bits.size if every == 1 else bits.size // (RUN * every) * RUN
    return found[: min(number, room + 1)], counted, extremes[0], extremes[1], extremes[2]


def range_of(values: Floats) -> tuple[float, float] | None:
    """The smallest and the largest value; None when one is NaN or infinite."""
    look = Look(np.empty(0, np.uint32), 0, *_extremes(values))
    return look.range if look.is_finite else None


@compiled
def _extremes(values: Floats) -> tuple[int, int, int]:
    extremes = np.array([-_SIGN, 0, 2 * _SIGN - 1], np.int64)
    no_limits = (2 * _SIGN - 1, _SIGN - 1)
    _look(values.view(np.uint32), values.view(np.int32), no_limits, np.empty(0, np.uint32), 0, extremes)
    return extremes[0], extremes[1], extremes[2]


@compiled
def outside(values: Floats, limits: Limits) -> Floats:
    """The values from the limits outwards."""
    bits, signed = values.view(np.uint32), values.view(np.int32)
    found = np.empty(_CHUNK + _STRETCH, np.uint32)
    extremes = np.zeros(3, np.int64)
    number = 0
    for begin in range(0, bits.size, _CHUNK):
        if found.size < number + _CHUNK + _STRETCH:
            found = np.concatenate((found, found))
        number = _look(bits[begin : begin + _CHUNK], signed[begin : begin + _CHUNK], limits, found, number, extremes)
    kept: Floats = found[:number].copy().view(np.float32)
    return kept


@compiled
def _look(bits: Bits, signed: SignedBits, limits: Limits, found: Bits, number: int, extremes: Counts) -> int:
    """Widen the extremes, and add the values outside to the ``number`` found so far as long as there is room."""
    lower, upper = np.uint32(limits[0]), np.int32(limits[1])
    largest, outermost, innermost = np.int32(extremes[0]), np.uint32(extremes[1]), np.uint32(extremes[2])
    for begin in range(0, bits.size, _STRETCH):
        end = min(begin + _STRETCH, bits.size)
        high, outer, inner = np.int32(-_SIGN), np.uint32(0), np.uint32(2 * _SIGN - 1)
        for place in range(begin, end):
            high = max(high, signed[place])
            outer = max(outer, bits[place])
            inner = min(inner, bits[place])
        largest, outermost, innermost = max(largest, high), max(outermost, outer), min(innermost, inner)
        if (high >= upper or outer >= lower) and number <= found.size - _STRETCH:
            for place in range(begin, end):
                found[number] = bits[place]
                number += np.int64((signed[place] >= upper) | (bits[place] >= lower))
    extremes[0], extremes[1], extremes[2] = largest, outermost, innermost
    return number


@compiled
def one_in(values: Floats, enough: int) -> int:
    """Of how many runs one has to be counted, so that about ``enough`` values that matter are.

    The loss of a range, estimated from n random values, is off by less than one part in the root of n (the squares of
    rounding errors differ by 0.9 of their mean). Values near zero do not count, as they are rounded to zero; some
    runs of the tensor tell how many there are.
    """
    if values.size < 2 * enough:
        return 1
    step = values.size // _SOME_RUNS - _ODD  # so that runs begin in all channels
    largest, number = np.float32(0), 0
    for begin in range(0, _SOME_RUNS * step, step):
        for place in range(begin, begin + RUN):
            largest = max(largest, abs(values[place]))
    for begin in range(0, _SOME_RUNS * step, step):
        for place in range(begin, begin + RUN):
            number += np.int64(abs(values[place]) > largest / 256)
    matter = values.size * number // (_SOME_RUNS * RUN)
    every = 1
    while every < MOST_LEFT_OUT and matter >= 2 * every * enough:
        every *= 2
    return every


@compiled
def _count_all(bits: Bits, table: Bits) -> None:
    """Count every value.

    Zeros, every other value behind a ReLU, are counted in several places in turn: an increment has to wait for the one
    before it in the same place, which doubles the time.
    """
    shift = np.uint32(FLOAT_MANTISSA - TABLE_MANTISSA)
    for position in range(bits.size):
        value = bits[position]
        # Unsigned: spares the check for negative indices in the hot line.
        place = np.uint64(value >> shift)
        place = np.uint64(_ZEROS) + np.uint64(position & (_ZERO_PLACES - 1)) if value == 0 else place
        table[place] += np.uint32(1)


@compiled
def _count_runs(bits: Bits, table: Bits, every: int, begin: int) -> None:
    """Count one run of ``every``: which one changes from group to group, so that no channel or column is preferred."""
    shift = np.uint32(FLOAT_MANTISSA - TABLE_MANTISSA)
    group = RUN * every
    for position in range(0, bits.size - group + 1, group):
        # Multiples of the golden ratio, without their whole part, are spread evenly over 0..1, whatever the step.
        fraction = (np.uint64((begin + position) // group) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
        first = np.uint64(position) + (fraction * np.uint64(every) >> np.uint64(32)) * np.uint64(RUN)
        for step in range(RUN):
            value = bits[first + np.uint64(step)]
            place = np.uint64(value >> shift)
            place = np.uint64(_ZEROS) + np.uint64(step & (_ZERO_PLACES - 1)) if value == 0 else place
            table[place] += np.uint32(1)


@compiled
def count_few(bits: Bits, done: int, first_bin: Counts, counts: Tallies, used: Counts, mantissa_bits: int) -> int:
    """Count the values from position ``done`` on, and allocate their blocks.

    Returns:
        The end, or the position that needs a block when there is no room.
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
def move(table: Bits, first_bin: Counts, counts: Tallies, begin: int, weight: int) -> int:
    """Add the blocks of ``table`` that are allocated from ``begin`` on to ``counts``, and clear them.

    Returns:
        Of how many values these were the counts.
    """
    size = 1 << TABLE_MANTISSA
    moved = 0
    for block in range(table.size >> TABLE_MANTISSA):
        first = first_bin[block]
        if first < begin:
            continue
        source = table[block << TABLE_MANTISSA : (block << TABLE_MANTISSA) + size]
        target = counts[first : first + size]
        for place in range(size):
            target[place] += weight * source[place]
            moved += source[place]
            source[place] = 0
    return moved


@compiled
def allocate(left: int, table: Bits, first_bin: Counts, used: int, ends: tuple[int, int]) -> int:
    """Allocate the blocks that hold the ``left`` values of ``table``, from the outermost values inwards.

    Args:
        left: so many were not moved.
        table: with these values alone in blocks that are not allocated.
        first_bin: where each block begins, to be extended.
        used: where the first new block begins.
        ends: the blocks of the outermost values, positive and negative; -1 when there is none.

    Returns:
        Where the next block would begin.
    """
    size = 1 << TABLE_MANTISSA
    for step in range(BLOCKS // 2):
        for sign in range(2):
            block = ends[sign] - step
            if ends[sign] < 0 or block < sign * BLOCKS // 2 or first_bin[block] >= 0:
                continue
            count = table[block << TABLE_MANTISSA : (block << TABLE_MANTISSA) + size].sum()
            if count:
                first_bin[block] = used
                used += size
                left -= count
                if left == 0:
                    return used
    return used


@compiled
def occupied(first_bin: Counts, counts: Tallies, mantissa_bits: int) -> tuple[Values, Values, Values]:
    """Where the bins of all values that occurred begin and end, and how many each holds, ascending."""
    size, half = 1 << mantissa_bits, first_bin.size // 2
    room = np.sum(first_bin >= 0) << mantissa_bits
    inner, found = np.empty(room, np.uint32), np.empty(room, np.float64)
    number = negative = 0
    for step in range(first_bin.size):
        if step == half:
            negative = number
        # Negative floats follow the positive ones, from zero outwards.
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
        begin, end = np.float64(near[place]), min(np.float64(far[place]), 2.0**128)  # behind the largest is infinity
        low[place], high[place] = (-end, -begin) if place < negative else (begin, end)
    return low, high, found[:number].copy()


@compiled
def tail_begin(first_bin: Counts, counts: Tallies, mantissa_bits: int, tail: int) -> int:
    """The magnitude of the first bin from which on the blocks of one sign hold at most ``tail`` values."""
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
