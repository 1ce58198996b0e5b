"""How much of a large batch is counted: one run of values in 2, 4, … or 64, or all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from amct.numerics.counts.compiled import compiled

if TYPE_CHECKING:
    from amct.numerics.counts.tables import Floats

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
