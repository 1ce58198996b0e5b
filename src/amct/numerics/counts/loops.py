"""Compiled loops of the histogram: values are scanned and counted by their bit patterns.

Positive floats are ordered like their bits as signed integers, negative ones by magnitude like unsigned integers. So
vectorized integer maxima give the range of the values, whether all are finite, and whether a block holds values
beyond the limits. Values are processed in blocks that fit the processor's cache, so a tensor is read from memory once.

Loops start at zero and run over slices: an index that might be negative would prevent vectorization.
"""

from __future__ import annotations

import numpy as np

from amct.numerics.counts.compiled import compiled
from amct.numerics.counts.tables import (
    BLOCKS,
    FLOAT_MANTISSA,
    RUN,
    SIGN,
    Bits,
    Blocks,
    CountedBins,
    Floats,
    Limits,
    SignedBits,
    Table,
    counted_limits,
    mark_blocks,
    sampling_interval,
)

SPLIT = 1 << 14
"""Tensors are split at multiples of this only, so that splitting does not change which values are sampled."""

_COUNT_BLOCK = 1 << 13  # scanned, then counted; fits the cache, and is a multiple of the longest group of runs
_SCAN_BLOCK = 1 << 9  # so few values that most of these blocks lie within the limits
_FINE_BLOCK = 32  # scanned again, where a scan block does not
_SAMPLES = 1 << 14  # sampled values that are counted together
_INFINITY = 255 << FLOAT_MANTISSA
UNREACHABLE = (SIGN + _INFINITY, _INFINITY)
"""Limits that no finite value reaches."""
SUGGESTED = 2
"""So many times the tail should lie beyond limits that sampled counts suggest."""


def limits_of(lower: float, upper: float) -> Limits:
    """Return the bit patterns of two values."""
    below, above = np.array([lower, upper], np.float32).view(np.uint32).tolist()
    return below, above


@compiled
def count_piece(
    values: Floats, bins: CountedBins, limits: Limits, outer: Floats, stored: int, runs: tuple[int, int, int]
) -> tuple[int, bool, float, float]:
    """Scan all values of a tensor or of a piece of it, and count all or a sample of them, block by block.

    Args:
        values: when sampling, values after the last whole group of runs are not counted.
        bins: updated. If some value is not finite, counting again with the negative weight undoes it.
        limits: values at or beyond these are collected.
        outer: room for the collected values, of which ``stored`` are there.
        stored: number of values in ``outer``.
        runs: the sampling interval, a power of two of at most ``LARGEST_INTERVAL``; the index of the first value in the
            tensor, a multiple of ``SPLIT``; what a counted value adds to its bin.

    Returns:
        The number of values in ``outer`` (more than ``room_of(outer)``: there was no room for all), whether all values
        are finite, and then minimum and maximum.
    """
    every, offset, weight = runs
    bits, signed, found = values.view(np.uint32), values.view(np.int32), outer.view(np.uint32)
    number, high, outermost = stored, np.int32(-SIGN), np.uint32(0)
    samples, sampled = np.empty(_SAMPLES if every > 1 else 0, np.uint32), 0
    for begin in range(0, bits.size, _COUNT_BLOCK):
        part = bits[begin : begin + _COUNT_BLOCK]
        number, largest, farthest = _scan_all(part, signed[begin : begin + _COUNT_BLOCK], limits, found, number)
        high, outermost = max(high, largest), max(outermost, farthest)
        sampled = _count_block(part, bins, (every, offset + begin, weight), samples, sampled)
    _count_all(samples[:sampled], bins, weight)
    is_finite, low, top = _range_of(values, np.int64(high), np.int64(outermost))
    return number, is_finite, low, top


@compiled
def _count_block(bits: Bits, bins: CountedBins, runs: tuple[int, int, int], samples: Bits, sampled: int) -> int:
    """Count all values of a block, or add one run of each group to the first ``sampled`` of ``samples``.

    Samples are counted when they are many: scanning takes the table out of the fastest cache.

    Returns:
        The new ``sampled``.
    """
    every, begin, weight = runs
    if every == 1:
        _count_all(bits, bins, weight)
        return 0
    if sampled + _COUNT_BLOCK // 2 > samples.size:
        _count_all(samples[:sampled], bins, weight)
        sampled = 0
    return _copy_runs(bits, every, begin, samples, sampled)


@compiled
def count_alone(
    values: Floats, bins: Table, limits: Limits, outer: Floats, stored: int, enough: int
) -> tuple[int, int, float, float]:
    """Scan and count a batch in a single call: calls cost more than small batches.

    Args:
        values: the batch, not empty.
        bins: updated unless some value is not finite.
        limits: values at or beyond these are collected.
        outer: room for the collected values, of which ``stored`` are there; those of the batch are appended.
        stored: number of values in ``outer``.
        enough: number of values that are counted at least; negative: all are counted.

    Returns:
        The number of values in ``outer`` (more than ``room_of(outer)``: there was no room for all), the sampling
        interval (0: some value is not finite), minimum and maximum.
    """
    table, first_bin, mantissa_bits = bins
    every = 1 if enough < 0 else sampling_interval(values, enough)
    blocks = np.zeros(BLOCKS, np.uint8)
    counted = (table, blocks, mantissa_bits)
    number, is_finite, low, high = count_piece(values, counted, limits, outer, stored, (every, 0, every))
    if not is_finite:
        count_piece(values, counted, UNREACHABLE, outer, stored, (every, 0, -every))
        return stored, 0, 0.0, 0.0
    mark_blocks(first_bin, blocks, mantissa_bits)
    return number, every, low, high


@compiled
def count_first(
    values: Floats, bins: Table, outer: Floats, tail: int, enough: int
) -> tuple[int, int, float, float, Limits]:
    """``count_alone`` of the first batch: what is counted suggests limits first, beyond which values are collected.

    Returns:
        What ``count_alone`` does, and the limits. Limits that sampled counts suggest may have too few values beyond
        them, which the caller has to check; limits that sampled counts prove would leave far too many.
    """
    table, first_bin, mantissa_bits = bins
    blocks = np.zeros(BLOCKS, np.uint8)
    every = 1 if enough < 0 else sampling_interval(values, enough)
    counted = (table, blocks, mantissa_bits)
    highs, outers = _count_and_measure(values, counted, every, every)
    is_finite, low, high = _range_of(values, np.int64(highs.max()), np.int64(outers.max()))
    if not is_finite:
        _count_and_measure(values, counted, every, -every)
        return 0, 0, 0.0, 0.0, UNREACHABLE
    mark_blocks(first_bin, blocks, mantissa_bits)
    limits = counted_limits(bins, tail if every == 1 else SUGGESTED * tail)
    number = _collect(values, limits, highs, outers, outer.view(np.uint32))
    return number, every, low, high, limits


@compiled
def _count_and_measure(values: Floats, bins: CountedBins, every: int, weight: int) -> tuple[SignedBits, Bits]:
    """Count a batch, and return the largest and the outermost bit pattern of each scan block."""
    bits, signed = values.view(np.uint32), values.view(np.int32)
    scanned = (bits.size + _SCAN_BLOCK - 1) // _SCAN_BLOCK
    highs, outers = np.empty(scanned, np.int32), np.empty(scanned, np.uint32)
    samples, sampled = np.empty(_SAMPLES if every > 1 else 0, np.uint32), 0
    for begin in range(0, bits.size, _COUNT_BLOCK):
        part = bits[begin : begin + _COUNT_BLOCK]
        for block in range(begin // _SCAN_BLOCK, (begin + part.size + _SCAN_BLOCK - 1) // _SCAN_BLOCK):
            first, end = block * _SCAN_BLOCK, (block + 1) * _SCAN_BLOCK
            highs[block], outers[block] = _extremes(bits[first:end], signed[first:end])
        sampled = _count_block(part, bins, (every, begin, weight), samples, sampled)
    _count_all(samples[:sampled], bins, weight)
    return highs, outers


@compiled
def _collect(values: Floats, limits: Limits, highs: SignedBits, outers: Bits, found: Bits) -> int:
    """Collect the values at or beyond the limits; only the blocks that have some are read again."""
    bits, signed = values.view(np.uint32), values.view(np.int32)
    lower, upper = np.uint32(limits[0]), np.int32(limits[1])
    number = 0
    for block in range(highs.size):
        if highs[block] >= upper or outers[block] >= lower:
            first, end = block * _SCAN_BLOCK, (block + 1) * _SCAN_BLOCK
            number = _scan(bits[first:end], signed[first:end], limits, found, number)[0]
    return number


def room_of(outer: Floats) -> int:
    """Return how many values can be collected in ``outer`` for sure."""
    return outer.size - _SCAN_BLOCK


def new_room(values: int) -> Floats:
    """Return memory in which this many values can be collected."""
    return np.empty(values + _SCAN_BLOCK, np.float32)


def range_of(values: Floats) -> tuple[float, float] | None:
    """Return the smallest and the largest value; None when one is NaN or infinite."""
    is_finite, low, high = _checked_range(values)
    return (low, high) if is_finite else None


@compiled
def _checked_range(values: Floats) -> tuple[bool, float, float]:
    largest, outermost = _extremes(values.view(np.uint32), values.view(np.int32))
    return _range_of(values, np.int64(largest), np.int64(outermost))


@compiled
def _range_of(values: Floats, largest: int, outermost: int) -> tuple[bool, float, float]:
    """Return whether all values are finite, and then the smallest and the largest one.

    Args:
        values: the values.
        largest: their largest bit pattern as a signed integer: the largest value if any is positive.
        outermost: the largest bit pattern as an unsigned integer: the smallest value if any is negative.
    """
    if largest >= _INFINITY or outermost >= SIGN + _INFINITY:
        return False, 0.0, 0.0
    innermost = _innermost(values, largest, outermost)
    ends = np.empty(2, np.uint32)
    ends[0] = outermost if outermost >= SIGN else innermost
    ends[1] = largest if largest >= 0 else innermost
    low_and_high = ends.view(np.float32)
    return True, np.float64(low_and_high[0]), np.float64(low_and_high[1])


@compiled
def _extremes(bits: Bits, signed: SignedBits) -> tuple[int, int]:
    """Return the largest bit pattern as a signed and as an unsigned integer."""
    high, outer = np.int32(-SIGN), np.uint32(0)
    for place in range(bits.size):
        high = max(high, signed[place])
        outer = max(outer, bits[place])
    return high, outer


@compiled
def _innermost(values: Floats, largest: int, outermost: int) -> int:
    """Return the smallest bit pattern where it is an end of the range; values of both signs need no such end."""
    bits = values.view(np.uint32)
    inner = np.uint32(2 * SIGN - 1)
    if largest >= 0 and outermost >= SIGN:
        return int(inner)
    for begin in range(0, bits.size, _SCAN_BLOCK):
        part = bits[begin : begin + _SCAN_BLOCK]
        for place in range(part.size):
            inner = min(inner, part[place])
        if inner == 0:  # there is nothing smaller; after a ReLU it is found at once
            break
    return int(inner)


@compiled
def outside(values: Floats, limits: Limits) -> Floats:
    """Return the values at or beyond the limits."""
    bits, signed = values.view(np.uint32), values.view(np.int32)
    found = np.empty(2 * _SCAN_BLOCK, np.uint32)
    number = 0
    for begin in range(0, bits.size, _SCAN_BLOCK):
        if found.size < number + 2 * _SCAN_BLOCK:
            found = np.concatenate((found, found))
        number = _scan(bits[begin : begin + _SCAN_BLOCK], signed[begin : begin + _SCAN_BLOCK], limits, found, number)[0]
    kept: Floats = found[:number].copy().view(np.float32)
    return kept


@compiled
def _scan_all(bits: Bits, signed: SignedBits, limits: Limits, found: Bits, number: int) -> tuple[int, int, int]:
    high, outer = np.int32(-SIGN), np.uint32(0)
    for begin in range(0, bits.size, _SCAN_BLOCK):
        part = bits[begin : begin + _SCAN_BLOCK]
        number, largest, outermost = _scan(part, signed[begin : begin + _SCAN_BLOCK], limits, found, number)
        high, outer = max(high, largest), max(outer, outermost)
    return number, np.int64(high), np.int64(outer)


@compiled
def _scan(bits: Bits, signed: SignedBits, limits: Limits, found: Bits, number: int) -> tuple[int, int, int]:
    """Append the values of a scan block at or beyond the limits to the first ``number`` of ``found``.

    Returns:
        The new ``number``, and the largest and the outermost bit pattern. They tell that most scan blocks hold none,
        and those of fine blocks do so for the others.
    """
    lower, upper = np.uint32(limits[0]), np.int32(limits[1])
    largest, outermost = _extremes(bits, signed)
    if (largest >= upper or outermost >= lower) and number <= found.size - _SCAN_BLOCK:
        for begin in range(0, bits.size, _FINE_BLOCK):
            part, part_signed = bits[begin : begin + _FINE_BLOCK], signed[begin : begin + _FINE_BLOCK]
            high, outer = _extremes(part, part_signed)
            if high >= upper or outer >= lower:
                for place in range(part.size):
                    if part_signed[place] >= upper or part[place] >= lower:
                        found[number] = part[place]
                        number += 1
    return number, largest, outermost


@compiled
def steps_beyond(values: Floats, inverse: float, first: int, last: int) -> int:
    """Count the values that are rounded to less than ``first`` or more than ``last`` steps of 1 / ``inverse``."""
    low, high, factor = np.float32(first), np.float32(last), np.float32(inverse)
    number = 0
    for begin in range(0, values.size, _SCAN_BLOCK):
        part, inside = values[begin : begin + _SCAN_BLOCK], np.int32(0)
        for place in range(part.size):
            step = np.rint(part[place] * factor)
            inside += np.int32((step >= low) & (step <= high))
        number += part.size - inside
    return number


@compiled
def _count_all(bits: Bits, bins: CountedBins, weight: int) -> None:
    """Count every value.

    Zeros, about half of the values after a ReLU, are removed first: repeated increments of one place wait for each
    other, and to tell them apart while counting takes longer.
    """
    table, blocks, mantissa_bits = bins
    shift = np.uint32(FLOAT_MANTISSA - mantissa_bits)
    zeros = _mark_exponents(bits, blocks)
    counted = bits
    if zeros > 0:
        table[0] += zeros * weight
        counted = _without_zeros(bits)
    for position in range(counted.size):
        table[np.uint64(counted[position] >> shift)] += weight  # a signed index would be checked for negative ones


@compiled
def _mark_exponents(bits: Bits, blocks: Blocks) -> int:
    """Mark the blocks from the smallest to the largest exponent of each sign, and return the number of zeros.

    Marking the block of each value would take a quarter of the time of counting; blocks between are rarely empty.
    """
    zeros, largest, outermost = np.uint32(0), np.int32(-SIGN), np.uint32(0)
    smallest, innermost = np.uint32(2 * SIGN - 1), np.uint32(2 * SIGN - 1)
    for position in range(bits.size):
        value = bits[position]
        zeros += np.uint32(value == 0)
        largest = max(largest, np.int32(value))
        outermost = max(outermost, value)
        smallest = min(smallest, np.uint32(value - np.uint32(1)))  # zero becomes the largest of all
        innermost = min(innermost, np.uint32(value - np.uint32(SIGN)))  # positive values become larger than these
    if zeros > 0:
        blocks[0] = 1
    if largest > 0:
        blocks[(np.int64(smallest) + 1) >> FLOAT_MANTISSA : (np.int64(largest) >> FLOAT_MANTISSA) + 1] = 1
    if outermost >= SIGN:
        blocks[(np.int64(innermost) + SIGN) >> FLOAT_MANTISSA : (np.int64(outermost) >> FLOAT_MANTISSA) + 1] = 1
    return int(zeros)


@compiled
def _without_zeros(bits: Bits) -> Bits:
    kept = np.empty(bits.size, np.uint32)
    number = np.uint64(0)
    for position in range(bits.size):
        kept[number] = bits[position]
        number += np.uint64(bits[position] != 0)
    return kept[:number]


@compiled
def _copy_runs(bits: Bits, every: int, begin: int, samples: Bits, sampled: int) -> int:
    """Add one run of each group of ``every`` to the first ``sampled`` of ``samples``, and return their new number.

    The position of the run varies between groups, so no channel is preferred.
    """
    group = RUN * every
    # The fractional parts of multiples of the golden ratio are evenly spread over 0..1.
    golden = np.uint64(0x9E3779B97F4A7C15)
    fraction = np.uint64(begin // group) * golden
    number = np.uint64(sampled)
    for position in range(0, bits.size - group + 1, group):
        run = (fraction >> np.uint64(32)) * np.uint64(every) >> np.uint64(32)
        first = np.uint64(position) + run * np.uint64(RUN)
        fraction += golden
        for step in range(RUN):
            samples[number + np.uint64(step)] = bits[first + np.uint64(step)]
        number += np.uint64(RUN)
    return sampled + bits.size // group * RUN
