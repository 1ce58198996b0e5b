"""Counts of float32 values in bins that follow the number format itself: constant memory, no range to guess.

A bin is the top bits of a float: sign, exponent and the first mantissa bits. So bins are fine near zero and coarse far
from it, always the same fraction of the value (2^-11 of its power of two per tensor), and every float has its bin from
the start. Why not a linear histogram with a growing range? One outlier of 1e30 would leave all other data in a single
bin of it, for good; here it costs one more bin, and the percentile may still leave it out. Counts are integers, so
adding batches in any order, in threads or in merged shards gives the very same table. Indexing is a shift instead of a
multiplication and a range check: one pass at about a quarter of the cost of ``torch.histc``.

At 8 bits, a bin is at most an eighth of a quantization step wide, and values are taken as evenly spread inside their
bin; at more bits steps get narrower than bins, and the even spread is what the rounding error depends on.

Per tensor, the outermost ``tail`` values of each sign are kept as they are besides. They are the ones that a range may
cut off: at more than 8 bits they make nearly all of the loss, and of a percentile they are all that counts. Which
values the tails are depends on the values alone, so this, too, is the same in any order.

Unless ``counts_all``, of a batch with more values than a search can make use of one run in 2, 4 or 8 is counted, as so
many (``one_in``). Which ones depends on the batch alone: the order of batches still does not matter, but how the data
is cut into batches does. The tails and the total stay exact.

The 2^m bins of one sign and exponent are a block. Blocks are allocated when a value falls into them: real activations
need some 50 blocks of 8 KB, no data can ever need more than 512.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from amct.numerics.counts.loops import (
    BLOCKS,
    FLOAT_MANTISSA,
    PIECE,
    TABLE_MANTISSA,
    TABLE_SIZE,
    Bits,
    Counts,
    Floats,
    Limits,
    Look,
    Tallies,
    Values,
    allocate,
    count_few,
    limits_of,
    look_and_count,
    move,
    occupied,
    one_in,
    outside,
    tail_begin,
)

MANTISSA_BITS = TABLE_MANTISSA
"""Per tensor."""
CHANNEL_MANTISSA_BITS = 6
"""Per channel, where thousands of histograms are kept at once."""

TAIL = 4096
"""At most so many of the largest positive and of the largest negative values are known exactly, where it matters."""
SHORT_TAIL = 512
"""For 8 bits and less, where the bins are fine enough for all but a percentile."""

ENOUGH = 1 << 17
"""So many values of a batch that are not (nearly) zero are counted, if there are as many."""

_MANY = TABLE_SIZE // 32  # values for which looking through a whole table is cheaper than a look-up for each
_SPARE_BLOCKS = 8
_WAITING = 8  # so many times the tail may come together before it is looked through
_MOST_AT_ONCE = 1 << 31  # a table's counts have 32 bits
_MOST_NARROW = 1 << 31  # half of what 32 bits hold: where only some values are counted, they stand for a few too many
_THREADED_SIZE = 1 << 20  # values per thread that outweigh its start
_NOTHING = limits_of(-np.inf, np.inf)  # no finite value reaches these
_ANYTHING = (-0.0, 0.0)

_idle_tables: deque[Bits] = deque()
"""All zero, one for each thread that ever counted at the same time as others; clearing them anew would cost more."""


@dataclass(frozen=True)
class Bins:
    """The occupied bins of one channel, ascending: ``count`` values evenly spread over ``low``..``high``."""

    low: Values
    high: Values
    count: Values


class FloatHistogram:
    """How often every (rounded) float32 value occurred, for each of ``channels`` rows."""

    def __init__(
        self, channels: int = 1, mantissa_bits: int = MANTISSA_BITS, *, tail: int = TAIL, counts_all: bool = True
    ) -> None:
        self.channels = channels
        self.tail = tail if channels == 1 else 0
        self.counts_all = counts_all or not self.tail
        self.mantissa_bits = mantissa_bits
        self._total = 0  # of one channel's values
        self._heaviest = 1  # a counted value stands for at most so many
        self._first_bin = np.full((channels, BLOCKS), -1, np.int64)  # of a block, in _counts; -1: not allocated
        self._counts: Tallies = np.empty(0, np.uint32)
        self._used = np.zeros(1, np.int64)
        self._outer = np.empty(0, np.float32)  # all values from the edges outwards: the tails, and perhaps more
        self._edges = _ANYTHING
        self._limits = limits_of(*_ANYTHING)

    def add(self, rows: Tensor) -> None:
        """Count finite float32 values ``[channels, n]``."""
        self._widen_for(rows.shape[1])
        self._total += rows.shape[1]
        if rows.device.type == "cuda":
            self._add_by_torch(rows)
            return
        values = rows.cpu().contiguous().numpy()
        if self._are_many(values):
            self._add_many(values[0], one_pass=False)
            return
        self._count_few(values)
        if self.tail:
            if self._edges == _ANYTHING:
                self._move_edges()
            self._keep(outside(values[0], self._limits))

    def add_in_one_pass(self, rows: Tensor) -> tuple[float, float] | None:
        """Count float32 values ``[1, n]`` that need not be finite, and tell their minimum and maximum.

        Returns:
            None when nothing was done, because some value is not finite, or because this takes more than one pass.
        """
        if rows.device.type == "cuda":
            return None
        values = rows.contiguous().numpy()
        if not self._are_many(values):
            return None
        self._widen_for(values.size)
        found = self._add_many(values[0], one_pass=True)
        self._total += values.size if found else 0
        return found

    def add_counted(self, values: Floats, counts: Counts) -> None:
        """The same as ``add`` of the one channel's ``values``, each repeated ``counts`` times."""
        assert self.channels == 1
        total = int(counts.sum())
        self._widen_for(total)
        self._total += total
        top_bits = values.view(np.uint32).astype(np.int64) >> (FLOAT_MANTISSA - self.mantissa_bits)
        block, place = top_bits >> self.mantissa_bits, top_bits & ((1 << self.mantissa_bits) - 1)
        for one in np.unique(block):
            table = np.zeros(1 << self.mantissa_bits, np.int64)
            np.add.at(table, place[block == one], counts[block == one])
            self._add_block(0, one, table)
        if self.tail:
            self._move_edges()
            beyond = (values <= self._edges[0]) | (values >= self._edges[1])
            self._keep(np.repeat(values[beyond], counts[beyond]))

    def merge(self, other: FloatHistogram) -> None:
        """Add the counts of a histogram with as many channels and bins."""
        assert (other.channels, other.mantissa_bits, other.tail) == (self.channels, self.mantissa_bits, self.tail)
        self._widen_for(other._total)
        self._total += other._total
        self._heaviest = max(self._heaviest, other._heaviest)
        tables = other._tables()
        for channel, block in np.argwhere(other._first_bin >= 0):
            self._add_block(channel, block, tables[other._first_bin[channel, block] >> other.mantissa_bits])
        if self.tail:
            self._move_edges(other._edges)
            self._keep(other._outer)

    def bins(self, channel: int = 0) -> Bins:
        """The occupied bins of a channel; each value of the tails is a bin of its own, without width."""
        bins = self._counted_bins(channel)
        if not self.tail:
            return bins
        self._drop_all_but_tails()
        lower, upper = self._edges
        tail = self._outer.astype(np.float64)
        below, above = np.split(tail, [np.searchsorted(tail, 0.0)])
        inner = slice(np.searchsorted(bins.high, lower, side="right"), np.searchsorted(bins.low, upper))
        count = bins.count[inner]
        if self._heaviest > 1 and count.size:
            count = count * ((self._total - tail.size) / count.sum())  # what is known of the tails corrects the rest
        return Bins(
            np.concatenate([below, bins.low[inner], above]),
            np.concatenate([below, bins.high[inner], above]),
            np.concatenate([np.ones(below.size), count, np.ones(above.size)]),
        )

    # ------------------------------------------------------------------ the tails

    def _keep(self, *found: Floats) -> None:
        """Add all values of new data beyond the edges, and perhaps others.

        The edges only ever move outwards. So those of an earlier batch find too much, never too little, and are moved
        only when too much has come together.
        """
        self._outer = np.concatenate([self._outer, *found])
        if self._outer.size > _WAITING * self.tail:
            self._drop_all_but_tails()

    def _move_edges(self, known: tuple[float, float] = _ANYTHING) -> None:
        """Move the edges outwards as far as the counts prove that the tails do not begin before.

        The bin just inside an edge and those beyond it count more than ``tail`` times the heaviest value, so they hold
        more than ``tail`` values.
        """
        lower, upper = (-self._counted_edge(negative=True), self._counted_edge(negative=False))
        self._set_edges(min(lower, known[0], self._edges[0]), max(upper, known[1], self._edges[1]))

    def _set_edges(self, lower: float, upper: float) -> None:
        self._edges = lower, upper
        self._limits = limits_of(lower, upper)

    def _counted_edge(self, *, negative: bool) -> float:
        first = BLOCKS // 2 if negative else 0
        first_bin = self._first_bin[0, first : first + BLOCKS // 2]
        return self._border(tail_begin(first_bin, self._counts, self.mantissa_bits, self.tail * self._heaviest))

    def _border(self, place: int) -> float:
        """Where the bin ``place`` begins; always above zero: zero and what shares its bin are never a tail."""
        bits = np.array(max(place, 1) << (FLOAT_MANTISSA - self.mantissa_bits), np.uint32)
        return float(bits.view(np.float32))  # infinity when the outermost bin alone holds too many

    def _drop_all_but_tails(self) -> None:
        """Move each edge to the smallest border of bins beyond which at most ``tail`` values of its sign lie; sort."""
        outer = np.sort(self._outer)
        lower, upper = self._edges
        negative = int(np.searchsorted(outer, np.float32(0)))
        if negative > self.tail:
            lower = min(lower, -self._border_behind(-outer[self.tail]))
        if outer.size - negative > self.tail:
            upper = max(upper, self._border_behind(outer[-self.tail - 1]))
        self._set_edges(lower, upper)
        below, above = (
            np.searchsorted(outer, np.float32(lower), side="right"),
            np.searchsorted(outer, np.float32(upper)),
        )
        self._outer = np.concatenate([outer[:below], outer[above:]])

    def _border_behind(self, magnitude: np.float32) -> float:
        """Where the bin behind that of a value begins."""
        return self._border((int(magnitude.view(np.uint32)) >> (FLOAT_MANTISSA - self.mantissa_bits)) + 1)

    # ------------------------------------------------------------------ counting

    def _are_many(self, values: Floats) -> bool:
        return self.channels == 1 and self.mantissa_bits == TABLE_MANTISSA and values.size >= _MANY

    def _add_many(self, values: Floats, *, one_pass: bool) -> tuple[float, float] | None:
        """Count in tables of all bins, then add their blocks to the counts: without a look-up for each value."""
        every = 1 if self.counts_all else one_in(values, ENOUGH)
        pieces = _pieces(values)
        tables = [_idle_tables.pop() if _idle_tables else np.zeros(TABLE_SIZE, np.uint32) for _ in pieces]
        limits = _NOTHING if self._edges == _ANYTHING else self._limits
        looks = _look_at_all(pieces, tables, limits, _WAITING * self.tail, every)
        if one_pass and not all(look.is_finite for look in looks):
            for table in tables:
                table.fill(0)
            _idle_tables.extend(tables)
            return None
        self._heaviest = max(self._heaviest, every)
        for table, look in zip(tables, looks, strict=True):
            self._move(table, look, every)
        _idle_tables.extend(tables)
        if self.tail:
            found = [look.outside.view(np.float32) for look in looks]
            if limits == _NOTHING or any(part.size > _WAITING * self.tail for part in found):
                self._move_edges()
                found = [outside(piece, self._limits) for piece in pieces]
            self._keep(*found)
        ranges = [look.range for look in looks]
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    def _move(self, table: Bits, look: Look, weight: int) -> None:
        """Add a table to the counts, and clear it."""
        first_bin = self._first_bin[0]
        left = look.counted - move(table, first_bin, self._counts, 0, weight)
        if left:
            used = int(self._used[0])
            end = allocate(left, table, first_bin, used, look.ends)
            self._reserve((end - used) >> TABLE_MANTISSA)
            self._used[0] = end
            move(table, first_bin, self._counts, used, weight)

    def _count_few(self, rows: Floats) -> None:
        bits = rows.view(np.uint32)
        for row in range(self.channels):
            values = np.ascontiguousarray(bits[row])
            done = 0
            while done < values.size:
                done = count_few(values, done, self._first_bin[row], self._counts, self._used, self.mantissa_bits)
                if done < values.size:
                    self._reserve(max(self.channels, int(self._used[0]) >> self.mantissa_bits))

    def _add_by_torch(self, rows: Tensor) -> None:
        """The same in torch operations, for values that should not leave their GPU: one full table per channel."""
        size = BLOCKS << self.mantissa_bits
        for channel in range(self.channels):
            index = rows[channel].contiguous().view(torch.int32) >> (FLOAT_MANTISSA - self.mantissa_bits)
            table = torch.bincount(index & (size - 1), minlength=size).reshape(BLOCKS, -1)
            for block in table.any(dim=1).nonzero().reshape(-1).tolist():
                self._add_block(channel, block, table[block].cpu().numpy())
        if self.tail:
            self._move_edges()
            lower, upper = self._edges
            self._keep(rows[(rows >= upper) | (rows <= lower)].cpu().numpy())

    def _widen_for(self, more: int) -> None:
        """Counts take 4 bytes each, and 8 before so many values come that one of them might not fit."""
        if self._total + more > _MOST_NARROW and self._counts.dtype != np.int64:
            self._counts = self._counts.astype(np.int64)

    def _add_block(self, channel: int, block: int, counts: Tallies) -> None:
        first = int(self._first_bin[channel, block])
        if first < 0:
            if self._used[0] == self._counts.size:
                self._reserve(1)
            first = int(self._used[0])
            self._first_bin[channel, block] = first
            self._used += counts.size
        self._counts[first : first + counts.size] += counts.astype(self._counts.dtype)

    def _reserve(self, blocks: int) -> None:
        """Make room for so many more blocks, and some to spare."""
        used = int(self._used[0])
        if self._counts.size - used >= blocks << self.mantissa_bits:
            return
        room = np.zeros(used + (blocks + _SPARE_BLOCKS << self.mantissa_bits), self._counts.dtype)
        room[:used] = self._counts[:used]
        self._counts = room

    # ------------------------------------------------------------------ what was counted

    def _counted_bins(self, channel: int) -> Bins:
        return Bins(*occupied(self._first_bin[channel], self._counts, self.mantissa_bits))

    def __getstate__(self) -> dict[str, object]:
        """For sending a shard to another process: without the room that is not used yet."""
        return {**self.__dict__, "_counts": self._counts[: int(self._used[0])].copy()}

    def _tables(self) -> Tallies:
        """The counts as [block, bin]."""
        return self._counts.reshape(-1, 1 << self.mantissa_bits)


def _pieces(values: Floats) -> list[Floats]:
    """One for each thread, none too large for a table."""
    threads = max(1, min(torch.get_num_threads(), values.size // _THREADED_SIZE))
    size = -(-values.size // threads // PIECE) * PIECE
    size = min(size, max(_MOST_AT_ONCE // PIECE, 1) * PIECE)
    return [values[begin : begin + size] for begin in range(0, values.size, size)]


def _look_at_all(pieces: list[Floats], tables: list[Bits], limits: Limits, room: int, every: int) -> list[Look]:
    if len(pieces) == 1:
        return [look_and_count(pieces[0], tables[0], limits, room, (every, 0))]
    size = pieces[0].size
    with ThreadPoolExecutor(min(len(pieces), torch.get_num_threads())) as pool:
        looks = [
            pool.submit(look_and_count, piece, table, limits, room, (every, number * size))
            for number, (piece, table) in enumerate(zip(pieces, tables, strict=True))
        ]
        return [look.result() for look in looks]
