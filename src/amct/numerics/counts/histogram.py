"""Histogram of float32 values with one bin per bit pattern of the top bits: constant memory, no range to choose.

The index of a bin is sign, exponent and the first mantissa bits of a float, so the width of a bin is a fixed fraction
of the value (2^-11 of its power of two per tensor), and every float has a bin from the start. In a linear histogram
with a growing range one outlier of 1e30 would put all other data into a single bin; here it uses one more bin. Counts
are integers, so the result does not depend on the order of batches, threads or merged shards. Computing an index is a
shift without a range check, about a quarter of the cost of ``torch.histc``.

At 8 bits, a bin is at most an eighth of a quantization step wide, and values are taken as evenly spread inside their
bin; at more bits steps are narrower than bins, and the rounding error depends on this assumption.

Per tensor, the outermost ``tail`` values of each sign are also stored exactly: these are the values that a range may
clip, and percentiles lie among them. Which values these are does not depend on the order either.

Unless ``counts_all``, only one run of values in 2, 4 or 8 of a large batch is counted, with that weight
(``sampling_interval``). The choice depends on the batch alone: the order of batches does not matter, but how the data
is split into batches does. The tails and the total stay exact.

The 2^m bins of one sign and exponent are a block. Blocks are allocated when a value falls into them: real activations
need about 50 blocks of 8 KB; the maximum is 512.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from amct.errors import CalibrationError
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
    Scan,
    Tallies,
    Values,
    add_table,
    allocate,
    count_by_lookup,
    limits_of,
    occupied,
    outside,
    sampling_interval,
    scan_and_count,
    tail_begin,
)
from amct.numerics.observer import State, checked_array

MANTISSA_BITS = TABLE_MANTISSA
"""Mantissa bits of a bin index per tensor."""
CHANNEL_MANTISSA_BITS = 6
"""Mantissa bits per channel, where thousands of histograms exist at once."""

TAIL = 4096
"""Maximum number of largest positive and of largest negative values stored exactly."""
SHORT_TAIL = 512
"""The same for 8 bits and less, where the bins are fine enough for everything but percentiles."""

SAMPLING_TARGET = 1 << 17
"""Number of values not near zero that are counted of a large batch when sampling."""

_TABLE_THRESHOLD = TABLE_SIZE // 32  # from so many values on, one pass over a table beats a block look-up per value
_SPARE_BLOCKS = 8
_TAIL_SLACK = 8  # the stored outer values are reduced to the tails when they exceed this many times the tail
_LARGEST_PIECE = 1 << 31  # a table's counts have 32 bits
_LARGEST_NARROW_TOTAL = 1 << 31  # half of the uint32 range: sampled counts may exceed the number of values slightly
_THREADED_SIZE = 1 << 20  # values per thread for which starting it pays off
_UNREACHABLE = limits_of(-np.inf, np.inf)  # no finite value reaches these limits
_NO_EDGES = (-0.0, 0.0)

_idle_tables: deque[Bits] = deque()
"""Zeroed tables for reuse, as many as ever counted concurrently; allocating new ones would cost more."""


@dataclass(frozen=True)
class Bins:
    """The occupied bins of one channel, ascending: ``count`` values evenly spread over ``low``..``high``."""

    low: Values
    high: Values
    count: Values


class FloatHistogram:
    """Counts of float32 values by their top bits, for each of ``channels`` rows."""

    def __init__(
        self, channels: int = 1, mantissa_bits: int = MANTISSA_BITS, *, tail: int = TAIL, counts_all: bool = True
    ) -> None:
        self.channels = channels
        self.tail = tail if channels == 1 else 0
        self.counts_all = counts_all or not self.tail
        self.mantissa_bits = mantissa_bits
        self._total = 0  # number of values of one channel
        self._largest_weight = 1  # the largest weight of a counted value
        self._first_bin = np.full((channels, BLOCKS), -1, np.int64)  # start of a block in _counts; -1: not allocated
        self._counts: Tallies = np.empty(0, np.uint32)
        self._used = np.zeros(1, np.int64)
        self._outer = np.empty(0, np.float32)  # all values beyond the edges: the tails, and possibly more
        self._edges = _NO_EDGES
        self._limits = limits_of(*_NO_EDGES)

    def add(self, rows: Tensor) -> None:
        """Count finite float32 values ``[channels, n]``."""
        self._widen_for(rows.shape[1])
        self._total += rows.shape[1]
        if rows.device.type == "cuda":
            self._add_by_torch(rows)
            return
        values = rows.cpu().contiguous().numpy()
        if self._use_table(values):
            self._add_by_table(values[0], one_pass=False)
            return
        self._count_by_lookup(values)
        if self.tail:
            if self._edges == _NO_EDGES:
                self._move_edges()
            self._keep_outer(outside(values[0], self._limits))

    def add_in_one_pass(self, rows: Tensor) -> tuple[float, float] | None:
        """Count float32 values ``[1, n]`` that may be non-finite, and return their minimum and maximum.

        Returns:
            None when nothing was counted, because some value is not finite or more than one pass is needed.
        """
        if rows.device.type == "cuda":
            return None
        values = rows.contiguous().numpy()
        if not self._use_table(values):
            return None
        self._widen_for(values.size)
        found = self._add_by_table(values[0], one_pass=True)
        self._total += values.size if found else 0
        return found

    def add_counted(self, values: Floats, counts: Counts) -> None:
        """Count ``values`` of a single channel, each ``counts`` times."""
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
            self._keep_outer(np.repeat(values[beyond], counts[beyond]))

    def merge(self, other: FloatHistogram) -> None:
        """Add the counts of a histogram with the same channels, bins and tail."""
        assert (other.channels, other.mantissa_bits, other.tail) == (self.channels, self.mantissa_bits, self.tail)
        self._widen_for(other._total)
        self._total += other._total
        self._largest_weight = max(self._largest_weight, other._largest_weight)
        tables = other._tables()
        for channel, block in np.argwhere(other._first_bin >= 0):
            self._add_block(channel, block, tables[other._first_bin[channel, block] >> other.mantissa_bits])
        if self.tail:
            self._move_edges(other._edges)
            self._keep_outer(other._outer)

    def state(self) -> State:
        """Return the counts of the allocated blocks and the tails."""
        if self.tail:
            self._trim_to_tails()
        blocks = np.argwhere(self._first_bin >= 0)
        return {
            "blocks": blocks,
            "tables": self._tables()[self._first_bin[self._first_bin >= 0] >> self.mantissa_bits],
            "outer": self._outer,
            "edges": np.array(self._edges, np.float64),
            "totals": np.array([self._total, self._largest_weight], np.int64),
        }

    def restore(self, state: State) -> None:
        """Replace everything by a state; its block numbers are checked, because compiled loops do not."""
        blocks = checked_array(state, "blocks", np.int64, (None, 2))
        wide = state["tables"].dtype == np.int64 if "tables" in state else False
        tables = checked_array(
            state, "tables", np.int64 if wide else np.uint32, (blocks.shape[0], 1 << self.mantissa_bits)
        )
        if ((blocks < 0) | (blocks >= [self.channels, BLOCKS])).any():
            raise CalibrationError("the state of an observer does not fit: it has counts of blocks that do not exist")
        self._total, self._largest_weight = checked_array(state, "totals", np.int64, (2,)).tolist()
        self._first_bin.fill(-1)
        self._counts = np.empty(0, tables.dtype)
        self._used[0] = 0
        self._reserve(len(blocks))
        for (channel, block), table in zip(blocks.tolist(), tables, strict=True):
            self._add_block(channel, block, table)
        self._outer = checked_array(state, "outer", np.float32, (None,)).copy()
        lower, upper = checked_array(state, "edges", np.float64, (2,)).tolist()
        if self._total < 0 or self._largest_weight < 1 or not lower <= 0 <= upper:
            raise CalibrationError("the state of an observer does not fit: its number of values, or its edges")
        self._set_edges(lower, upper)

    def bins(self, channel: int = 0) -> Bins:
        """Return the non-empty bins of a channel; each value of the tails is a bin of zero width."""
        bins = self._counted_bins(channel)
        if not self.tail:
            return bins
        self._trim_to_tails()
        lower, upper = self._edges
        tail = self._outer.astype(np.float64)
        below, above = np.split(tail, [np.searchsorted(tail, 0.0)])
        inner = slice(np.searchsorted(bins.high, lower, side="right"), np.searchsorted(bins.low, upper))
        count = bins.count[inner]
        if self._largest_weight > 1 and count.size:
            count = count * ((self._total - tail.size) / count.sum())  # the exact total corrects sampled counts
        return Bins(
            np.concatenate([below, bins.low[inner], above]),
            np.concatenate([below, bins.high[inner], above]),
            np.concatenate([np.ones(below.size), count, np.ones(above.size)]),
        )

    # ------------------------------------------------------------------ the tails

    def _keep_outer(self, *found: Floats) -> None:
        """Store the values of new data beyond the edges, and possibly others.

        Edges are only moved outwards, so earlier edges select too many values, never too few. They are moved only when
        too many values are stored.
        """
        self._outer = np.concatenate([self._outer, *found])
        if self._outer.size > _TAIL_SLACK * self.tail:
            self._trim_to_tails()

    def _move_edges(self, known: tuple[float, float] = _NO_EDGES) -> None:
        """Move the edges outwards as far as the counts prove that the tails lie beyond them.

        The bin just inside an edge and all bins beyond it have a count above ``tail`` times the largest weight, so they
        hold more than ``tail`` values.
        """
        lower, upper = (-self._counted_edge(negative=True), self._counted_edge(negative=False))
        self._set_edges(min(lower, known[0], self._edges[0]), max(upper, known[1], self._edges[1]))

    def _set_edges(self, lower: float, upper: float) -> None:
        self._edges = lower, upper
        self._limits = limits_of(lower, upper)

    def _counted_edge(self, *, negative: bool) -> float:
        first = BLOCKS // 2 if negative else 0
        first_bin = self._first_bin[0, first : first + BLOCKS // 2]
        return self._border(tail_begin(first_bin, self._counts, self.mantissa_bits, self.tail * self._largest_weight))

    def _border(self, place: int) -> float:
        """Return the lower end of the bin ``place``; always positive: the bin of zero never belongs to a tail."""
        bits = np.array(max(place, 1) << (FLOAT_MANTISSA - self.mantissa_bits), np.uint32)
        return float(bits.view(np.float32))  # infinity when the outermost bin alone exceeds the tail

    def _trim_to_tails(self) -> None:
        """Move each edge outwards until at most ``tail`` values lie beyond it; store only these, sorted."""
        outer = np.sort(self._outer)
        lower, upper = self._edges
        negative = int(np.searchsorted(outer, np.float32(0)))
        if negative > self.tail:
            lower = min(lower, -self._next_border(-outer[self.tail]))
        if outer.size - negative > self.tail:
            upper = max(upper, self._next_border(outer[-self.tail - 1]))
        self._set_edges(lower, upper)
        below, above = (
            np.searchsorted(outer, np.float32(lower), side="right"),
            np.searchsorted(outer, np.float32(upper)),
        )
        self._outer = np.concatenate([outer[:below], outer[above:]])

    def _next_border(self, magnitude: np.float32) -> float:
        """Return the lower end of the bin after the one that holds a value."""
        return self._border((int(magnitude.view(np.uint32)) >> (FLOAT_MANTISSA - self.mantissa_bits)) + 1)

    # ------------------------------------------------------------------ counting

    def _use_table(self, values: Floats) -> bool:
        return self.channels == 1 and self.mantissa_bits == TABLE_MANTISSA and values.size >= _TABLE_THRESHOLD

    def _add_by_table(self, values: Floats, *, one_pass: bool) -> tuple[float, float] | None:
        """Count in a table of all bins and add its blocks to the counts, without a block look-up per value."""
        every = 1 if self.counts_all else sampling_interval(values, SAMPLING_TARGET)
        pieces = _pieces(values)
        tables = [_idle_tables.pop() if _idle_tables else np.zeros(TABLE_SIZE, np.uint32) for _ in pieces]
        limits = _UNREACHABLE if self._edges == _NO_EDGES else self._limits
        scans = _scan_all(pieces, tables, limits, _TAIL_SLACK * self.tail, every)
        if one_pass and not all(scan.is_finite for scan in scans):
            for table in tables:
                table.fill(0)
            _idle_tables.extend(tables)
            return None
        self._largest_weight = max(self._largest_weight, every)
        for table, scan in zip(tables, scans, strict=True):
            self._add_table(table, scan, every)
        _idle_tables.extend(tables)
        if self.tail:
            found = [scan.outside.view(np.float32) for scan in scans]
            if limits == _UNREACHABLE or any(part.size > _TAIL_SLACK * self.tail for part in found):
                self._move_edges()
                found = [outside(piece, self._limits) for piece in pieces]
            self._keep_outer(*found)
        ranges = [scan.range for scan in scans]
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    def _add_table(self, table: Bits, scan: Scan, weight: int) -> None:
        """Add a table to the counts with a weight, and clear it."""
        first_bin = self._first_bin[0]
        left = scan.counted - add_table(table, first_bin, self._counts, 0, weight)
        if left:
            used = int(self._used[0])
            end = allocate(left, table, first_bin, used, scan.ends)
            self._reserve((end - used) >> TABLE_MANTISSA)
            self._used[0] = end
            add_table(table, first_bin, self._counts, used, weight)

    def _count_by_lookup(self, rows: Floats) -> None:
        bits = rows.view(np.uint32)
        for row in range(self.channels):
            values = np.ascontiguousarray(bits[row])
            done = 0
            while done < values.size:
                done = count_by_lookup(values, done, self._first_bin[row], self._counts, self._used, self.mantissa_bits)
                if done < values.size:
                    self._reserve(max(self.channels, int(self._used[0]) >> self.mantissa_bits))

    def _add_by_torch(self, rows: Tensor) -> None:
        """Count on the GPU, without copying the values to the CPU; uses one full table per channel."""
        size = BLOCKS << self.mantissa_bits
        for channel in range(self.channels):
            index = rows[channel].contiguous().view(torch.int32) >> (FLOAT_MANTISSA - self.mantissa_bits)
            table = torch.bincount(index & (size - 1), minlength=size).reshape(BLOCKS, -1)
            for block in table.any(dim=1).nonzero().reshape(-1).tolist():
                self._add_block(channel, block, table[block].cpu().numpy())
        if self.tail:
            self._move_edges()
            lower, upper = self._edges
            self._keep_outer(rows[(rows >= upper) | (rows <= lower)].cpu().numpy())

    def _widen_for(self, more: int) -> None:
        """Switch the counts from 32 to 64 bits before ``more`` values might overflow one."""
        if self._total + more > _LARGEST_NARROW_TOTAL and self._counts.dtype != np.int64:
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
        """Ensure room for ``blocks`` more blocks; a new allocation has some spare ones."""
        used = int(self._used[0])
        if self._counts.size - used >= blocks << self.mantissa_bits:
            return
        room = np.zeros(used + (blocks + _SPARE_BLOCKS << self.mantissa_bits), self._counts.dtype)
        room[:used] = self._counts[:used]
        self._counts = room

    # ------------------------------------------------------------------ results

    def _counted_bins(self, channel: int) -> Bins:
        return Bins(*occupied(self._first_bin[channel], self._counts, self.mantissa_bits))

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle, e.g. for another process, without unused room."""
        return {**self.__dict__, "_counts": self._counts[: int(self._used[0])].copy()}

    def _tables(self) -> Tallies:
        """Return the counts as ``[block, bin]``."""
        return self._counts.reshape(-1, 1 << self.mantissa_bits)


def _pieces(values: Floats) -> list[Floats]:
    """Split values into one piece per thread, each small enough for the 32-bit counts of a table."""
    threads = max(1, min(torch.get_num_threads(), values.size // _THREADED_SIZE))
    size = -(-values.size // threads // PIECE) * PIECE
    size = min(size, max(_LARGEST_PIECE // PIECE, 1) * PIECE)
    return [values[begin : begin + size] for begin in range(0, values.size, size)]


def _scan_all(pieces: list[Floats], tables: list[Bits], limits: Limits, room: int, every: int) -> list[Scan]:
    if len(pieces) == 1:
        return [scan_and_count(pieces[0], tables[0], limits, room, (every, 0))]
    size = pieces[0].size
    with ThreadPoolExecutor(min(len(pieces), torch.get_num_threads())) as pool:
        scans = [
            pool.submit(scan_and_count, piece, table, limits, room, (every, number * size))
            for number, (piece, table) in enumerate(zip(pieces, tables, strict=True))
        ]
        return [scan.result() for scan in scans]
