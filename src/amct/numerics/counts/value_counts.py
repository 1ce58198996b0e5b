"""Exact counts of data that takes few different values: pixels, outputs of a quantized layer, masks.

Such values may all sit on one side of the bins of a histogram, and a search with more than 8 bits would take the bins'
width for a spread that is not there. Whether data has few values does not depend on the order it comes in, and data
that has many shows it within the first few thousand, so looking costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from amct.numerics.counts.compiled import compiled
from amct.numerics.counts.histogram import Bins

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amct.numerics.counts.loops import Bits, Counts

MOST_VALUES = 4096

_HASH_BITS = 14  # a table four times as large as it gets full


@dataclass(frozen=True)
class ValueCounts:
    """The bits of different float32 values, and how often each occurred; at most ``MOST_VALUES``."""

    bits: Bits
    counts: Counts

    @staticmethod
    def none() -> ValueCounts:
        """No data yet."""
        return ValueCounts(np.empty(0, np.uint32), np.empty(0, np.int64))

    @staticmethod
    def of(x: Tensor) -> ValueCounts | None:
        """The counts of finite float32 values; ``None`` when too many of them differ."""
        if x.device.type == "cuda":
            bits, counts = _count_by_torch(x)
        else:
            bits, counts = _count_values(x.contiguous().numpy().reshape(-1).view(np.uint32), MOST_VALUES)
        return ValueCounts(bits, counts) if bits.size <= MOST_VALUES else None

    @property
    def values(self) -> NDArray[np.float32]:
        """The different values, in no order."""
        return self.bits.view(np.float32)

    def plus(self, other: ValueCounts) -> ValueCounts | None:
        """Both together; ``None`` when these are too many values."""
        bits, place = np.unique(np.concatenate([self.bits, other.bits]), return_inverse=True)
        if bits.size > MOST_VALUES:
            return None
        counts = np.zeros(bits.size, np.int64)
        np.add.at(counts, place, np.concatenate([self.counts, other.counts]))
        return ValueCounts(bits, counts)

    def bins(self) -> Bins:
        """Each value as a bin of its own, without width."""
        order = np.argsort(self.values, kind="stable")
        values = self.values[order].astype(np.float64)
        return Bins(values, values, self.counts[order].astype(np.float64))


def _count_by_torch(x: Tensor) -> tuple[Bits, Counts]:
    """For values that should not leave their GPU."""
    bits, counts = torch.unique(x.contiguous().view(torch.int32), return_counts=True)
    return bits.cpu().numpy().view(np.uint32), counts.cpu().numpy()


@compiled
def _count_values(bits: Bits, most: int) -> tuple[Bits, Counts]:
    """Every bit pattern and its number, by a hash table; stops at the first one beyond ``most``."""
    mask = np.uint64((1 << _HASH_BITS) - 1)
    keys = np.empty(1 << _HASH_BITS, np.uint32)
    counts = np.zeros(1 << _HASH_BITS, np.int64)
    used = 0
    for position in range(bits.size):
        key = bits[position]
        # Multiplying by 2^32 over the golden ratio scatters evenly spaced keys.
        slot = (np.uint64(key) * np.uint64(0x9E3779B1) >> np.uint64(32 - _HASH_BITS)) & mask
        while counts[slot] != 0 and keys[slot] != key:
            slot = (slot + np.uint64(1)) & mask
        if counts[slot] == 0:
            keys[slot] = key
            used += 1
        counts[slot] += 1
        if used > most:
            return keys[:used], counts[:used]  # no one looks at these
    found = counts > 0
    return keys[found], counts[found]
