"""Exact counts of data with few distinct values: pixels, outputs of a quantized layer, masks.

A histogram takes values as evenly spread within a bin, which is wrong for such data and matters above 8 bits. Whether
data has few distinct values does not depend on its order, and most other data exceeds the limit within a few thousand
values, so checking costs little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from amct.errors import CalibrationError
from amct.numerics.counts.compiled import compiled
from amct.numerics.counts.histogram import Bins
from amct.numerics.observer import State, checked_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amct.numerics.counts.tables import Bits, Counts

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
