"""Counts of float32 values in bins that follow the number format itself: constant memory, no range to guess.

A bin is the top bits of a float: sign, exponent and the first mantissa bits. So bins are fine near zero and coarse far
from it, always the same fraction of the value (2^-11 of its power of two per tensor), and every float has its bin from
the start. Why not a linear histogram with a growing range? One outlier of 1e30 would leave all other data in a single
bin of it, for good; here it costs one more bin, and the percentile may still leave it out. Counts are integers, so
adding data in any order, in pieces, in threads or in merged shards gives the very same table. Indexing is a shift
instead of a multiplication and a range check: one pass at about a quarter of the cost of ``torch.histc``.

At 8 bits, a bin is at most an eighth of a quantization step wide, and values are taken as evenly spread inside their
bin; at more bits steps get narrower than bins, and the even spread is what the rounding error depends on.

Per tensor, the outermost ``tail`` values of each sign are kept as they are besides. They are the ones that a range may
cut off: at more than 8 bits they make nearly all of the loss, and of a percentile they are all that counts. Which
values the tails are depends on the counts alone, so this, too, is the same in any order.

The 2^m bins of one sign and exponent are a block. Blocks are allocated when a value falls into them: real activations
need some 50 blocks of 16 KB, no data can ever need more than 512.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amct.numerics.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

MANTISSA_BITS = 11
"""Per tensor."""
CHANNEL_MANTISSA_BITS = 6
"""Per channel, where thousands of histograms are kept at once."""

TAIL = 4096
"""At most so many of the largest positive and of the largest negative values are known exactly, where it matters."""
SHORT_TAIL = 512
"""For 8 bits and less, where the bins are fine enough for all but a percentile."""

_FLOAT_MANTISSA = 23
_BLOCKS = 512  # signs and exponents of a float32
_FIRST_BLOCKS = 16
_STRETCH = 64
_TABLE_SIZE = (
    _BLOCKS - 1
) << MANTISSA_BITS  # bins of all finite values; the last block holds negative infinity and NaN
_ZEROS = (_BLOCKS // 2 - 1) << MANTISSA_BITS  # where no finite value is counted: the block of infinity and NaN
_ZERO_PLACES = 8
_NEAREST_TO_ONE = np.array(sorted(range(_BLOCKS - 1), key=lambda block: abs(block % (_BLOCKS // 2) - 127)), np.int64)
_MOST_AT_ONCE = 1 << 31  # a table's counts have 32 bits
_THREADED_SIZE = 1 << 20  # values per thread that outweigh its start

Counts = NDArray[np.int64]
Values = NDArray[np.float64]

_idle_tables: deque[NDArray[np.uint32]] = deque()
"""All zero, one for each thread that ever counted at the same time as others; clearing them anew would cost more."""


@dataclass(frozen=True)
class Bins:
    """The occupied bins of one channel, ascending: ``count`` values evenly spread over ``low``..``high``."""

    low: Values
    high: Values
    count: Values


class FloatHistogram:
    """How often every (rounded) float32 value occurred, for each of ``channels`` rows."""

    def __init__(self, channels: int = 1, mantissa_bits: int = MANTISSA_BITS, *, tail: int = TAIL) -> None:
        self.channels = channels
        self.tail = tail if channels == 1 else 0
        self.mantissa_bits = mantissa_bits
        self._first_bin = np.full((channels, _BLOCKS), -1, np.int64)  # of a block, in _counts; -1: not allocated
        self._counts = np.zeros(channels * _FIRST_BLOCKS << mantissa_bits, np.int64)
        self._used = np.zeros(1, np.int64)
        self._outer = np.empty(0, np.float32)
        self._edges = (-0.0, 0.0)  # as of the last time they were sought; values between them are in no tail

    def add(self, rows: Tensor) -> None:
        """Count finite float32 values ``[channels, n]``."""
        if rows.device.type == "cuda":
            self._add_by_torch(rows)
            return
        values = rows.cpu().contiguous().numpy()
        threads = max(1, min(torch.get_num_threads(), values.size // _THREADED_SIZE)) if self.channels == 1 else 1
        if threads == 1:
            self._count(values)
            if self.tail:
                self._add_tails(lambda: [_outside(values[0], *self._edges, self.tail)])
            return
        parts = [self, *(FloatHistogram(self.channels, self.mantissa_bits, tail=0) for _ in range(threads - 1))]
        pieces = np.array_split(values, threads, axis=1)
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(FloatHistogram._count, parts, pieces):
                pass  # raises what a thread raised
            for part in parts[1:]:
                self._merge_counts(part)
            if self.tail:
                self._add_tails(
                    lambda: list(pool.map(lambda piece: _outside(piece[0], *self._edges, self.tail), pieces))
                )

    def add_counted(self, values: NDArray[np.float32], counts: Counts) -> None:
        """The same as ``add`` of the one channel's ``values``, each repeated ``counts`` times."""
        assert self.channels == 1
        top_bits = values.view(np.uint32).astype(np.int64) >> (_FLOAT_MANTISSA - self.mantissa_bits)
        block, place = top_bits >> self.mantissa_bits, top_bits & ((1 << self.mantissa_bits) - 1)
        for one in np.unique(block):
            table = np.zeros(1 << self.mantissa_bits, np.int64)
            np.add.at(table, place[block == one], counts[block == one])
            self._add_block(0, one, table)
        if not self.tail:
            return
        lower, upper = self._tail_edges()
        outside = (values <= lower) | (values >= upper)
        self._keep_tail(np.repeat(values[outside], counts[outside]))

    def merge(self, other: FloatHistogram) -> None:
        """Add the counts of a histogram with as many channels and bins."""
        assert (other.channels, other.mantissa_bits, other.tail) == (self.channels, self.mantissa_bits, self.tail)
        self._merge_counts(other)
        if self.tail:
            self._tail_edges()
            self._keep_tail(other._outer)

    def _merge_counts(self, other: FloatHistogram) -> None:
        tables = other._tables()
        for channel, block in np.argwhere(other._first_bin >= 0):
            self._add_block(channel, block, tables[other._first_bin[channel, block] >> other.mantissa_bits])

    def bins(self, channel: int = 0) -> Bins:
        """The occupied bins of a channel; each value of the tails is a bin of its own, without width."""
        bins = self._counted_bins(channel)
        if not self.tail:
            return bins
        lower, upper = self._tail_edges()
        self._keep_tail()
        inner = (bins.low < upper) & (bins.high > lower)
        tail = np.sort(self._outer).astype(np.float64)
        below, above = tail[tail <= lower], tail[tail >= upper]
        return Bins(
            np.concatenate([below, bins.low[inner], above]),
            np.concatenate([below, bins.high[inner], above]),
            np.concatenate([np.ones(below.size), bins.count[inner], np.ones(above.size)]),
        )

    def _tail_edges(self) -> tuple[float, float]:
        """Values from the first number down and from the second up are kept exactly."""
        self._edges = -self._edge(negative=True), self._edge(negative=False)
        return self._edges

    def _add_tails(self, outside: Callable[[], list[NDArray[np.float32] | None]]) -> None:
        """Add what ``outside`` finds beyond the edges.

        The edges only ever move outwards. So those of an earlier batch find too much, never too little, and are sought
        anew only when too much has come together.
        """
        found = outside() if self._edges[1] > 0 else [None]
        if any(part is None for part in found):
            self._tail_edges()
            found = outside()
        self._outer = np.concatenate([self._outer, *(part for part in found if part is not None)])
        if self._outer.size > 4 * self.tail:
            self._tail_edges()
            self._keep_tail()

    def _edge(self, *, negative: bool) -> float:
        """The smallest border of bins beyond which at most ``tail`` values of one sign lie; always above zero."""
        first = _BLOCKS // 2 if negative else 0
        first_bin = self._first_bin[0, first : first + _BLOCKS // 2]
        place = _tail_begin(first_bin, self._counts, self.mantissa_bits, self.tail)
        edge = float(self._value(np.array([max(place, 1)]))[0])  # zero and what shares its bin are never a tail
        return edge if edge < 2.0**128 else np.inf  # the outermost bin alone holds too many

    def _keep_tail(self, *found: NDArray[np.float32]) -> None:
        """Add values to the tails and drop those that no longer belong."""
        lower, upper = self._edges
        joined = np.concatenate([self._outer, *found])
        self._outer = joined[(joined <= lower) | (joined >= upper)]

    def _counted_bins(self, channel: int) -> Bins:
        top_bits, count = _occupied(self._first_bin[channel], self._counts, self.mantissa_bits)
        sign_bit = _BLOCKS // 2 << self.mantissa_bits
        magnitude = top_bits & (sign_bit - 1)
        inner, outer = self._value(magnitude), self._value(magnitude + 1)
        negative = top_bits >= sign_bit
        return Bins(np.where(negative, -outer, inner), np.where(negative, -inner, outer), count.astype(np.float64))

    def __getstate__(self) -> dict[str, object]:
        """For sending a shard to another process: without the room that is not used yet."""
        return {**self.__dict__, "_counts": self._counts[: int(self._used[0])].copy()}

    def _tables(self) -> Counts:
        """The counts as [block, bin]."""
        return self._counts.reshape(-1, 1 << self.mantissa_bits)

    def _value(self, magnitude: Counts) -> Values:
        """The positive float whose top bits are ``magnitude``; 2^128 for the one after the largest."""
        bits = magnitude << (_FLOAT_MANTISSA - self.mantissa_bits)
        value = bits.astype(np.uint32).view(np.float32).astype(np.float64)
        return np.where(np.isinf(value), 2.0**128, value)

    def _count(self, rows: NDArray[np.float32]) -> None:
        bits = rows.view(np.uint32)
        for row in range(self.channels):
            values = np.ascontiguousarray(bits[row])
            if self.mantissa_bits == MANTISSA_BITS and values.size >= _TABLE_SIZE // 32:
                for begin in range(0, values.size, _MOST_AT_ONCE):
                    self._count_many(row, values[begin : begin + _MOST_AT_ONCE])
                continue
            done = 0
            while done < values.size:
                done = _count_few(values, done, self._first_bin[row], self._counts, self._used, self.mantissa_bits)
                if done < values.size:
                    self._grow()

    def _count_many(self, row: int, values: NDArray[np.uint32]) -> None:
        """Count in a table of all bins, then add its blocks to the counts: without a look-up for each value."""
        try:
            table = _idle_tables.pop()
        except IndexError:
            table = np.zeros(_TABLE_SIZE, np.uint32)
        _count_in_table(values, table)
        missing = values.size - _move_known(table, self._first_bin[row], self._counts, self.mantissa_bits)
        if missing:
            blocks = table.reshape(-1, 1 << self.mantissa_bits)
            for block in _blocks_with(missing, table, self._first_bin[row], _NEAREST_TO_ONE):
                self._add_block(row, block, blocks[block].astype(np.int64))
                blocks[block] = 0
        _idle_tables.append(table)

    def _add_by_torch(self, rows: Tensor) -> None:
        """The same in torch operations, for values that should not leave their GPU: one full table per channel."""
        size = _BLOCKS << self.mantissa_bits
        for channel in range(self.channels):
            index = rows[channel].contiguous().view(torch.int32) >> (_FLOAT_MANTISSA - self.mantissa_bits)
            table = torch.bincount(index & (size - 1), minlength=size).reshape(_BLOCKS, -1)
            for block in table.any(dim=1).nonzero().reshape(-1).tolist():
                self._add_block(channel, block, table[block].cpu().numpy())
        if self.tail:
            lower, upper = self._tail_edges()
            self._keep_tail(rows[(rows >= upper) | (rows <= lower)].cpu().numpy())

    def _add_block(self, channel: int, block: int, counts: Counts) -> None:
        first = int(self._first_bin[channel, block])
        if first < 0:
            if self._used[0] == self._counts.size:
                self._grow()
            first = int(self._used[0])
            self._first_bin[channel, block] = first
            self._used += counts.size
        self._counts[first : first + counts.size] += counts

    def _grow(self) -> None:
        """Double the room for blocks."""
        room = max(self._counts.size, 1 << self.mantissa_bits)
        self._counts = np.concatenate([self._counts, np.zeros(room, np.int64)])


@compiled
def _occupied(first_bin: Counts, counts: Counts, mantissa_bits: int) -> tuple[Counts, Counts]:
    """The top bits of all values that occurred, and how often, from the smallest value to the largest."""
    size, half = 1 << mantissa_bits, first_bin.size // 2
    room = np.sum(first_bin >= 0) << mantissa_bits
    top_bits, found = np.empty(room, np.int64), np.empty(room, np.int64)
    number = 0
    for step in range(first_bin.size):
        # Negative floats follow the positive ones, from zero outwards.
        block = first_bin.size - 1 - step if step < half else step - half
        first = first_bin[block]
        if first < 0:
            continue
        for place in range(size):
            inside = size - 1 - place if step < half else place
            top_bits[number] = (block << mantissa_bits) + inside
            found[number] = counts[first + inside]
            number += np.int64(found[number] > 0)
    return top_bits[:number], found[:number]


@compiled
def _tail_begin(first_bin: Counts, counts: Counts, mantissa_bits: int, tail: int) -> int:
    """The magnitude of the first bin from which on the blocks of one sign hold at most ``tail`` values."""
    seen = 0
    for block in range(first_bin.size - 1, -1, -1):
        begin = first_bin[block]
        if begin < 0:
            continue
        total = counts[begin : begin + (1 << mantissa_bits)].sum()
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
def _count_in_table(bits: NDArray[np.uint32], table: NDArray[np.uint32]) -> None:
    """Count every value in a table of all bins.

    Zeros, every other value behind a ReLU, are counted in several places in turn: an increment has to wait for the one
    before it in the same place, which doubles the time.
    """
    shift = np.uint32(_FLOAT_MANTISSA - MANTISSA_BITS)
    for position in range(bits.size):
        value = bits[position]
        # Unsigned: spares the check for negative indices in the hot line.
        place = np.uint64(value >> shift)
        place = np.uint64(_ZEROS) + np.uint64(position & (_ZERO_PLACES - 1)) if value == 0 else place
        table[place] += np.uint32(1)
    for place in range(_ZEROS, _ZEROS + _ZERO_PLACES):
        table[0] += table[place]
        table[place] = 0


@compiled
def _move_known(table: NDArray[np.uint32], first_bin: Counts, counts: Counts, mantissa_bits: int) -> int:
    """Add the blocks of ``table`` that are allocated to ``counts``, and clear them; the number of values moved."""
    size = 1 << mantissa_bits
    moved = 0
    for block in range(table.size >> mantissa_bits):
        first = first_bin[block]
        if first < 0:
            continue
        source = table[block << mantissa_bits : (block << mantissa_bits) + size]
        target = counts[first : first + size]
        for place in range(size):
            target[place] += source[place]
            moved += source[place]
            source[place] = 0
    return moved


@compiled
def _blocks_with(missing: int, table: NDArray[np.uint32], first_bin: Counts, order: Counts) -> Counts:
    """The blocks that are not allocated yet and hold the ``missing`` values of ``table``."""
    found = np.empty(order.size, np.int64)
    number = 0
    for block in order:
        if first_bin[block] >= 0:
            continue
        count = 0
        for place in range(block << MANTISSA_BITS, (block + 1) << MANTISSA_BITS):
            count += table[place]
        if count:
            found[number] = block
            number += 1
            missing -= count
            if missing == 0:
                break
    return found[:number]


@compiled
def _count_few(
    bits: NDArray[np.uint32], done: int, first_bin: Counts, counts: Counts, used: Counts, mantissa_bits: int
) -> int:
    """Count the values from position ``done`` on, and allocate their blocks.

    Returns:
        The end, or the position that needs a block when there is no room.
    """
    shift = np.uint32(_FLOAT_MANTISSA - mantissa_bits)
    mask = np.uint32((1 << mantissa_bits) - 1)
    for position in range(done, bits.size):
        value = bits[position]
        block = value >> np.uint32(_FLOAT_MANTISSA)
        first = first_bin[block]
        if first < 0:
            if used[0] == counts.size:
                return position
            first = used[0]
            first_bin[block] = first
            used[0] += mask + 1
        counts[np.uint64(first) + np.uint64((value >> shift) & mask)] += 1
    return bits.size


def _outside(values: NDArray[np.float32], lower: float, upper: float, tail: int) -> NDArray[np.float32] | None:
    """The values from ``lower`` down and from ``upper`` up; None when they are more than ``tail`` of each."""
    signed, unsigned = values.view(np.int32), values.view(np.uint32)
    limits = np.array([upper, lower], np.float32)
    places = _places_outside(signed, unsigned, limits.view(np.int32)[0], limits.view(np.uint32)[1], 2 * tail)
    return values[places] if places.size <= 2 * tail else None


@compiled
def _places_outside(
    signed: NDArray[np.int32], unsigned: NDArray[np.uint32], upper: np.int32, lower: np.uint32, room: int
) -> Counts:
    """Where the bits, as integers, reach one of two limits.

    Positive floats are ordered like their bits as signed integers, negative ones by size like unsigned integers. So two
    integer maxima, which compilers vectorize, tell whether a stretch of values need be looked at at all.
    """
    found = np.empty(room + _STRETCH, np.int64)  # more than ``room`` tell that there was no room
    number = 0
    for begin in range(0, signed.size, _STRETCH):
        end = min(begin + _STRETCH, signed.size)
        largest, smallest = np.int32(-1), np.uint32(0)
        for place in range(begin, end):
            largest = max(largest, signed[place])
            smallest = max(smallest, unsigned[place])
        if largest >= upper or smallest >= lower:
            for place in range(begin, end):
                found[number] = place
                number += np.int64((signed[place] >= upper) | (unsigned[place] >= lower))
            if number > room:
                break
    return found[:number]
