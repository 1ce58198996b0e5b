"""Tables of counts by top bits, in blocks of one sign and exponent, and compiled loops over them."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amct.numerics.counts.compiled import compiled

FLOAT_MANTISSA = 23
SIGN = 1 << 31
"""The bit pattern of the negative zero."""
BLOCKS = 512
"""Signs and exponents of a float32. A table has bins for all of them, those of infinity and NaN included: loops count
first and check for finite values afterwards."""

Bits = NDArray[np.uint32]
SignedBits = NDArray[np.int32]
Counts = NDArray[np.int64]
Tallies = NDArray[np.uint32] | NDArray[np.int64]
Table = tuple[Tallies, Counts, int]
"""Counts by top bits, the start of each block in which something may be counted (else -1), and the mantissa bits."""
Floats = NDArray[np.float32]
Values = NDArray[np.float64]
Blocks = NDArray[np.uint8]
"""1 for each block in which something may have been counted: from the smallest to the largest exponent of a sign."""
CountedBins = tuple[Tallies, Blocks, int]
"""Counts by top bits, the blocks of a batch, and the mantissa bits."""
Limits = tuple[int, int]
"""Bit patterns of a negative and a positive limit."""


@compiled
def mark_blocks(first_bin: Counts, blocks: Blocks, mantissa_bits: int) -> None:
    """Note the blocks of a batch in those of a table."""
    for block in range(BLOCKS):
        if blocks[block]:
            first_bin[block] = block << mantissa_bits


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
def occupied_with_tails(
    bins: Table, tails: Floats, edges: tuple[float, float], total: int
) -> tuple[Values, Values, Values]:
    """Return ``occupied`` bins between the edges, and each value of the tails beyond them as a bin of zero width.

    Args:
        bins: the counts of a tensor.
        tails: the values beyond the edges, ascending.
        edges: where the tails begin.
        total: the number of all values, to which sampled counts are scaled; negative: the counts are exact.
    """
    counts, first_bin, mantissa_bits = bins
    low, high, count = occupied(first_bin, counts, mantissa_bits)
    first, last = np.searchsorted(high, edges[0], side="right"), np.searchsorted(low, edges[1])
    inner = max(last - first, 0)
    factor = 1.0
    if total >= 0 and inner > 0:
        factor = (total - tails.size) / count[first:last].sum()
    below = _first_from(tails, np.float32(0))
    size = tails.size + inner
    lows, highs, numbers = np.empty(size), np.empty(size), np.ones(size)
    for place in range(below):
        lows[place] = highs[place] = tails[place]
    for place in range(inner):
        lows[below + place], highs[below + place] = low[first + place], high[first + place]
        numbers[below + place] = count[first + place] * factor
    for place in range(below, tails.size):
        lows[inner + place] = highs[inner + place] = tails[place]
    return lows, highs, numbers


@compiled
def _tail_begin(first_bin: Counts, counts: Tallies, mantissa_bits: int, tail: int) -> int:
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


@compiled
def counted_limits(bins: Table, tail: int) -> Limits:
    """Return the limits beyond which the bins of each sign hold at most ``tail`` values.

    They are never zero: the bin of zero never belongs to a tail. A limit is infinity when its outermost bin alone holds
    more.
    """
    counts, first_bin, mantissa_bits = bins
    half, shift = BLOCKS // 2, FLOAT_MANTISSA - mantissa_bits
    below = max(_tail_begin(first_bin[half:], counts, mantissa_bits, tail), 1) << shift
    above = max(_tail_begin(first_bin[:half], counts, mantissa_bits, tail), 1) << shift
    return SIGN + below, above


@compiled
def cut_to_tails(outer: Floats, limits: Limits, tail: int, mantissa_bits: int, room: Floats) -> tuple[int, Limits]:
    """Move each limit outwards to the next border of a bin beyond which there are at most ``tail`` ascending values.

    Returns:
        How many values beyond the limits are stored in ``room``, ascending, and the limits.
    """
    (lower, upper), shift = limits, FLOAT_MANTISSA - mantissa_bits
    bits = outer.view(np.uint32)
    negative = _first_from(outer, np.float32(0))
    if negative > tail:
        lower = max(lower, SIGN + ((((np.int64(bits[tail]) - SIGN) >> shift) + 1) << shift))
    if outer.size - negative > tail:
        upper = max(upper, ((np.int64(bits[outer.size - tail - 1]) >> shift) + 1) << shift)
    ends = np.empty(2, np.uint32)
    ends[0], ends[1] = lower, upper
    edges = ends.view(np.float32)
    above = _first_from(outer, edges[1])
    stored = 0
    while stored < negative and outer[stored] <= edges[0]:
        room[stored] = outer[stored]
        stored += 1
    for place in range(above, outer.size):
        room[stored] = outer[place]
        stored += 1
    return stored, (lower, upper)


@compiled
def _first_from(values: Floats, bound: float) -> int:
    """Return the index of the first of ascending values that is not below a bound."""
    begin, end = 0, values.size
    while begin < end:
        middle = (begin + end) // 2
        if values[middle] < bound:
            begin = middle + 1
        else:
            end = middle
    return begin


# -- How much of a large batch is counted: one run of values in 2, 4, … or 64, or all of them --------------------------


RUN = 16
"""Length of a run: consecutive values that are counted or skipped together when sampling."""
LARGEST_INTERVAL = 64
"""The largest sampling interval."""

_PROBED_RUNS, _ODD = 64, 37
_PROBE_BITS = 11  # twice as many slots as probed values


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


# -- Large arrays of zeros of which only the parts that are written to take memory -------------------------------------


def sparse_zeros(size: int, dtype: Any) -> NDArray[Any]:  # noqa: ANN401  a type of NumPy
    """Return zeros in pages of their own, which the system provides when they are first written to.

    ``np.zeros`` may take them from the heap, where freed memory has to be cleared, and asks for huge pages.
    """
    number_of_bytes = size * np.dtype(dtype).itemsize
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, whose anonymous memory is private
        return np.frombuffer(mmap.mmap(-1, number_of_bytes), dtype)
    memory = mmap.mmap(-1, number_of_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype)
