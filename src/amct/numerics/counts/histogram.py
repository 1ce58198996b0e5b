"""Histogram of float32 values with one bin per bit pattern of the top bits: constant memory, no range to choose.

The index of a bin is sign, exponent and the first mantissa bits of a float, so the width of a bin is a fixed fraction
of the value (2^-9 or 2^-11 of its power of two per tensor), and every float has a bin from the start. In a linear
histogram with a growing range one outlier of 1e30 would put all other data into a single bin; here it uses one more
bin. Counts are integers, so the result does not depend on the order of batches, threads or merged shards. Computing an
index is a shift without a range check, about a quarter of the cost of ``torch.histc``.

Values are taken as evenly spread inside their bin. At 8 bits a bin (of 2^-9 of its power of two) is at most half a
quantization step wide; at more bits steps are narrower than bins.

Per tensor, the outermost ``tail`` values of each sign are also stored exactly: these are the values that a range may
clip, and percentiles lie among them. Which values these are does not depend on the order either.

With ``enough``, only one run of values in 2, 4, … or 64 of a large batch is counted, with that weight
(``sampling_interval``). The choice depends on the batch alone: the order of batches does not matter, but how the data
is split into batches does. The tails and the total stay exact.

The 2^m bins of one sign and exponent are a block. Per tensor, there is a table of all 512 blocks in pages of memory
that exist once something is counted in them: real activations need about 50 blocks. Per channel, where a table each
would be too much, blocks are allocated when a value falls into them.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from amct.errors import CalibrationError
from amct.numerics.counts.loops import (
    SPLIT,
    SUGGESTED,
    UNREACHABLE,
    count_alone,
    count_first,
    count_piece,
    limits_of,
    new_room,
    outside,
    room_of,
)
from amct.numerics.counts.tables import (
    BLOCKS,
    FLOAT_MANTISSA,
    SIGN,
    Blocks,
    CountedBins,
    Counts,
    Floats,
    Limits,
    Table,
    Tallies,
    Values,
    count_by_lookup,
    counted_limits,
    cut_to_tails,
    mark_blocks,
    move_blocks,
    occupied,
    occupied_with_tails,
    sampling_interval,
    sparse_zeros,
)
from amct.numerics.observer import State, checked_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

MANTISSA_BITS = 11
"""Mantissa bits of a bin index per tensor."""
SHORT_MANTISSA_BITS = 9
"""The same for 8 bits and less: a quarter of the memory, so that counting waits less for it."""
CHANNEL_MANTISSA_BITS = 6
"""Mantissa bits per channel, where thousands of histograms exist at once."""

TAIL = 4096
"""Maximum number of largest positive and of largest negative values stored exactly."""
SHORT_TAIL = 512
"""The same for 8 bits and less, where the bins are fine enough for everything but percentiles."""

_SPARE_BLOCKS = 8
_TAIL_SLACK = 4  # the stored outer values are reduced to the tails when they exceed this many times the tail
_TAIL_ROOM = 16  # so many times the tail can be stored; if a batch has more, it is looked through once more
_LARGEST_PIECE = 1 << 31  # a table's counts have 32 bits
_LARGEST_NARROW_TOTAL = 1 << 31  # half of the uint32 range: sampled counts may exceed the number of values slightly
_THREADED_SIZE = 1 << 20  # values per thread for which starting it pays off
_NO_LIMITS = limits_of(-0.0, 0.0)  # before the first value

_idle_tables: dict[int, deque[Tallies]] = {}
"""Zeroed tables for reuse by further threads, by mantissa bits; allocating new ones would cost more."""


@dataclass(frozen=True)
class Bins:
    """The occupied bins of one channel, ascending: ``count`` values evenly spread over ``low``..``high``."""

    low: Values
    high: Values
    count: Values


class FloatHistogram:
    """Counts of float32 values by their top bits, for each of ``channels`` rows."""

    def __init__(
        self, channels: int = 1, mantissa_bits: int = MANTISSA_BITS, *, tail: int = TAIL, enough: int | None = None
    ) -> None:
        self.channels = channels
        self.tail = tail if channels == 1 else 0
        self.enough = enough if self.tail else None  # values not near zero that are counted of a batch; None: all
        self._least = -1 if self.enough is None else self.enough
        self.mantissa_bits = mantissa_bits
        self._total = 0  # number of values of one channel
        self._largest_weight = 1  # the largest weight of a counted value
        self._first_bin = np.full((channels, BLOCKS), -1, np.int64)  # start of a block in _counts; -1: not allocated
        self._counts: Tallies = self._zeros(np.uint32) if channels == 1 else np.empty(0, np.uint32)
        self._own_blocks = self._first_bin[0]  # of a single channel: kept, as views take time to make
        self._used = np.zeros(1, np.int64)
        self._room = new_room(_TAIL_ROOM * self.tail)  # all values beyond the edges: the tails, and possibly more
        self._stored = 0  # how many there are in it
        self._limits = _NO_LIMITS  # the edges, as bit patterns

    def add(self, rows: Tensor) -> None:
        """Count finite float32 values ``[channels, n]``."""
        if rows.numel() == 0:
            return
        self._widen_for(rows.shape[1])
        if rows.device.type == "cuda":
            self._total += rows.shape[1]
            self._add_by_torch(rows)
            return
        values = rows.cpu().contiguous().numpy()
        if self.channels == 1:
            self._count(values[0])
        else:
            self._total += rows.shape[1]
            self._count_by_lookup(values)

    def add_in_one_pass(self, values: Floats) -> tuple[float, float] | None:
        """Count the values of a single channel, which may be non-finite, and return their minimum and maximum.

        Returns:
            None when nothing was counted, because some value is not finite or there is no value.
        """
        if values.size == 0:
            return None
        self._widen_for(values.size)
        return self._count(values)

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
            self._move_edges(other._limits)
            self._keep_outer(other._outer)

    def state(self) -> State:
        """Return the counts of the allocated blocks and the tails."""
        if self.tail:
            self._trim_to_tails()
        blocks = np.argwhere(self._first_bin >= 0)
        tables = self._tables()[self._first_bin[self._first_bin >= 0] >> self.mantissa_bits]
        filled = tables.any(axis=1)
        return {
            "blocks": blocks[filled],
            "tables": tables[filled],
            "outer": self._outer.copy(),
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
        self._counts = self._zeros(tables.dtype) if self.channels == 1 else np.empty(0, tables.dtype)
        self._used[0] = 0
        self._reserve(len(blocks))
        for (channel, block), table in zip(blocks.tolist(), tables, strict=True):
            self._add_block(channel, block, table)
        outer = checked_array(state, "outer", np.float32, (None,))
        lower, upper = checked_array(state, "edges", np.float64, (2,)).tolist()
        if self._total < 0 or self._largest_weight < 1 or not lower <= 0 <= upper:
            raise CalibrationError("the state of an observer does not fit: its number of values, or its edges")
        self._limits, self._stored = limits_of(-abs(lower), abs(upper)), 0
        self._keep_outer(outer)

    def bins(self, channel: int = 0) -> Bins:
        """Return the non-empty bins of a channel; each value of the tails is a bin of zero width."""
        if not self.tail:
            return self._counted_bins(channel)
        self._trim_to_tails()
        total = self._total if self._largest_weight > 1 else -1  # the exact total corrects sampled counts
        return Bins(*occupied_with_tails(self._table, self._outer, self._edges, total))

    # ------------------------------------------------------------------ the tails

    @property
    def _outer(self) -> Floats:
        """The stored values, a view."""
        return self._room[: self._stored]

    @property
    def _edges(self) -> tuple[float, float]:
        """The values at which the tails begin."""
        lower, upper = np.array(self._limits, np.uint32).view(np.float32).tolist()
        return lower, upper

    def _begin_tails(self, pieces: list[Floats], limits: Limits, found: Floats) -> None:
        """Store the tails of the first batch; ``found`` are its values beyond limits that the counts suggest."""
        negative = np.count_nonzero(found < 0)
        least = 1 << (FLOAT_MANTISSA - self.mantissa_bits)
        is_short = (negative <= self.tail and limits[0] > SIGN + least) or (
            found.size - negative <= self.tail and limits[1] > least
        )
        if (self._largest_weight > 1 and is_short) or found.size > room_of(self._room):
            self._look_again(pieces)
        else:
            self._limits = limits
            self._keep_outer(found)

    def _look_again(self, pieces: list[Floats]) -> None:
        """Store the tails of a batch that was counted, with edges that the counts prove."""
        self._move_edges()
        self._keep_outer(*(outside(piece, self._limits) for piece in pieces))

    def _keep_outer(self, *found: Floats) -> None:
        """Store the values of new data beyond the edges, and possibly others.

        Edges are only moved outwards, so earlier edges select too many values, never too few. They are moved only when
        too many values are stored.
        """
        number = self._stored + sum(part.size for part in found)
        if number > room_of(self._room):
            self._trim_to_tails(np.concatenate([self._outer, *found]))
            return
        for part in found:
            self._room[self._stored : self._stored + part.size] = part
            self._stored += part.size
        if self._stored > _TAIL_SLACK * self.tail:
            self._trim_to_tails()

    def _move_edges(self, known: Limits = _NO_LIMITS) -> None:
        """Move the edges outwards as far as the counts prove that the tails lie beyond them.

        The bin just inside an edge and all bins beyond it have a count above ``tail`` times the largest weight, so they
        hold more than ``tail`` values.
        """
        proven = counted_limits(self._table, self.tail * self._largest_weight)
        self._limits = (max(proven[0], known[0], self._limits[0]), max(proven[1], known[1], self._limits[1]))

    def _trim_to_tails(self, values: Floats | None = None) -> None:
        """Move each edge outwards until at most ``tail`` values lie beyond it; store only these, sorted."""
        outer = np.sort(self._outer if values is None else values)
        self._stored, self._limits = cut_to_tails(outer, self._limits, self.tail, self.mantissa_bits, self._room)

    # ------------------------------------------------------------------ counting

    def _count(self, values: Floats) -> tuple[float, float] | None:
        """Count the values of a single channel; return their range, or None with nothing changed if not finite."""
        pieces = _pieces(values)
        if len(pieces) > 1:
            return self._count_pieces(values, pieces)
        if self._is_first:
            number, every, low, high, limits = count_first(values, self._table, self._room, self.tail, self._least)
        else:
            limits = self._limits if self.tail else UNREACHABLE
            number, every, low, high = count_alone(values, self._table, limits, self._room, self._stored, self._least)
        if every == 0:
            return None
        self._total += values.size
        self._largest_weight = max(self._largest_weight, every)
        if self._is_first:
            self._begin_tails(pieces, limits, self._room[:number])
        elif number > room_of(self._room):
            self._move_edges()
            self._keep_outer(outside(values, self._limits))
        else:
            self._stored = number
            if number > _TAIL_SLACK * self.tail:
                self._trim_to_tails()
        return low, high

    @property
    def _is_first(self) -> bool:
        """Whether the next batch is the first of one whose tails are stored."""
        return self.tail > 0 and self._limits == _NO_LIMITS

    def _count_pieces(self, values: Floats, pieces: list[Floats]) -> tuple[float, float] | None:
        """Count pieces of a batch in threads, as ``_count`` does a whole one."""
        every = 1 if self.enough is None else sampling_interval(values, self.enough)
        tables = [self._counts, *(self._idle_table() for _ in pieces[1:])]
        bins = [(table, np.zeros(BLOCKS, np.uint8), self.mantissa_bits) for table in tables]
        rooms = [new_room(_TAIL_ROOM * self.tail) for _ in pieces]
        is_first = self._is_first
        limits = UNREACHABLE if is_first or not self.tail else self._limits
        found = _count_in_threads(pieces, bins, limits, rooms, every, every)
        is_finite = all(finite for _, finite, _, _ in found)
        if is_finite:
            for table, blocks, _ in bins:
                self._take_blocks(table, blocks)
        else:
            _count_in_threads(pieces, bins, limits, rooms, every, -every)
        _idle_tables.setdefault(self.mantissa_bits, deque()).extend(tables[1:])
        if not is_finite:
            return None
        self._total += values.size
        self._largest_weight = max(self._largest_weight, every)
        if self.tail:
            outer = [room[:number] for room, (number, _, _, _) in zip(rooms, found, strict=True)]
            self._extend_tails(pieces, outer, is_first=is_first)
        return min(low for _, _, low, _ in found), max(high for _, _, _, high in found)

    def _extend_tails(self, pieces: list[Floats], found: list[Floats], *, is_first: bool) -> None:
        """Store the tails of a batch that was counted in pieces; ``found`` are their values beyond the edges before."""
        if is_first:
            many = self.tail if self._largest_weight == 1 else SUGGESTED * self.tail
            limits = counted_limits(self._table, many)
            self._begin_tails(pieces, limits, np.concatenate([outside(piece, limits) for piece in pieces]))
        elif any(part.size > _TAIL_ROOM * self.tail for part in found):
            self._look_again(pieces)
        else:
            self._keep_outer(*found)

    def _take_blocks(self, table: Tallies, blocks: Blocks) -> None:
        """Add to the own table what was counted in another one."""
        mark_blocks(self._first_bin[0], blocks, self.mantissa_bits)
        if table is self._counts:
            return
        for block in np.flatnonzero(blocks).tolist():
            move_blocks(table, self._counts, self.mantissa_bits, block, block + 1)

    @property
    def _table(self) -> Table:
        """The counts of a single channel."""
        return self._counts, self._own_blocks, self.mantissa_bits

    def _idle_table(self) -> Tallies:
        idle = _idle_tables.setdefault(self.mantissa_bits, deque())
        return idle.pop() if idle else self._zeros(np.uint32)

    def _zeros(self, dtype: Any) -> Tallies:  # noqa: ANN401  a type of NumPy
        return sparse_zeros(BLOCKS << self.mantissa_bits, dtype)

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
        if self._total + more <= _LARGEST_NARROW_TOTAL or self._counts.dtype == np.int64:
            return
        if self.channels > 1:
            self._counts = self._counts.astype(np.int64)
            return
        narrow, self._counts = self._tables(), self._zeros(np.int64)
        for block in np.flatnonzero(self._first_bin[0] >= 0):
            self._tables()[block] = narrow[block]

    def _add_block(self, channel: int, block: int, counts: NDArray[Any]) -> None:
        first = int(self._first_bin[channel, block])
        if first < 0:
            first = self._new_block(block)
            self._first_bin[channel, block] = first
        self._counts[first : first + counts.size] += counts.astype(self._counts.dtype)

    def _new_block(self, block: int) -> int:
        if self.channels == 1:
            return int(block) << self.mantissa_bits
        if self._used[0] == self._counts.size:
            self._reserve(1)
        self._used += 1 << self.mantissa_bits
        return int(self._used[0]) - (1 << self.mantissa_bits)

    def _reserve(self, blocks: int) -> None:
        """Ensure room for ``blocks`` more blocks of channels; a new allocation has some spare ones."""
        used = int(self._used[0])
        if self.channels == 1 or self._counts.size - used >= blocks << self.mantissa_bits:
            return
        room = np.zeros(used + (blocks + _SPARE_BLOCKS << self.mantissa_bits), self._counts.dtype)
        room[:used] = self._counts[:used]
        self._counts = room

    # ------------------------------------------------------------------ results

    def _counted_bins(self, channel: int) -> Bins:
        return Bins(*occupied(self._first_bin[channel], self._counts, self.mantissa_bits))

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle, e.g. for another process: the settings, and the counts without unused room."""
        settings = {name: getattr(self, name) for name in ("channels", "mantissa_bits", "tail", "enough")}
        return {**settings, "state": self.state()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        """Restore what was pickled."""
        state = pickled.pop("state")
        self.__init__(**pickled)  # type: ignore[misc]
        self.restore(state)

    def _tables(self) -> Tallies:
        """Return the counts as ``[block, bin]``."""
        return self._counts.reshape(-1, 1 << self.mantissa_bits)


def _pieces(values: Floats) -> list[Floats]:
    """Split values into one piece per thread, each small enough for the 32-bit counts of a table."""
    if values.size < 2 * _THREADED_SIZE and values.size <= _LARGEST_PIECE:
        return [values]
    threads = max(1, min(torch.get_num_threads(), values.size // _THREADED_SIZE))
    size = -(-values.size // threads // SPLIT) * SPLIT
    size = min(size, max(_LARGEST_PIECE // SPLIT, 1) * SPLIT)
    return [values[begin : begin + size] for begin in range(0, values.size, size)]


def _count_in_threads(
    pieces: list[Floats], bins: list[CountedBins], limits: Limits, rooms: list[Floats], every: int, weight: int
) -> list[tuple[int, bool, float, float]]:
    """Count pieces of a batch at the same time; what ``count_piece`` returns of each."""
    offsets = range(0, len(pieces) * pieces[0].size, pieces[0].size)
    with ThreadPoolExecutor(min(len(pieces), torch.get_num_threads())) as pool:
        counted = [
            pool.submit(count_piece, piece, own, limits, room, 0, (every, offset, weight))
            for piece, own, room, offset in zip(pieces, bins, rooms, offsets, strict=True)
        ]
        return [each.result() for each in counted]
