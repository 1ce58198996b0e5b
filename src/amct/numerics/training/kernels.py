"""Compiled loops of the trained activation quantizer: one pass over the values forward, one backward.

Only dense float32 tensors on the CPU can be handled; everything else goes through torch's own operations, which need
four passes forward and about ten backward. Sums are formed block by block, in blocks of a fixed size, so the number of
threads does not change their bits.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from amct.numerics.affine import integer_range
from amct.numerics.counts.compiled import compiled, compiled_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Floats = NDArray[np.float32]

_BLOCK = 1 << 12
_THREADED_SIZE = 1 << 19
"""Below this number of values a second thread costs more than it saves."""


class Grid(NamedTuple):
    """The integers of a quantizer and its step, as the float32 numbers that the loops compute with."""

    inverse: np.float32
    step: np.float32
    lowest: np.float32
    """The lowest integer minus the offset."""
    highest: np.float32


def grid_of(scale: float, offset: float, bits: int) -> Grid:
    """The grid of a scale and an offset."""
    lowest, highest = integer_range(bits)
    step = np.float32(scale)
    inverse = np.float32(1) / step if step else np.float32(np.inf)
    return Grid(inverse, step, np.float32(lowest - offset), np.float32(highest - offset))


class Saturation(NamedTuple):
    """Values beyond ``lower``..``upper`` saturate; their rounding error is that of the clip they are cut to."""

    lower: np.float32
    upper: np.float32
    lower_error: np.float32
    upper_error: np.float32


class GradientSums(NamedTuple):
    """Sums of the gradient over the whole tensor."""

    rounding: float
    """Of the gradient times the rounding error in steps."""
    above: float
    """Where the value is above the upper end."""
    below: float


def can_use(x: Tensor) -> bool:
    """Whether the loops can handle a tensor; while torch compiles or transforms a function they cannot."""
    if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last))
    )


def fake_quantize(x: Tensor, grid: Grid) -> Tensor:
    """A new tensor with the values of ``x`` rounded to the grid; NaN stays NaN."""
    result = torch.empty_like(x)
    values, rounded = _flat(x), _flat(result)
    _in_threads(lambda part: _fake_quantize(values[part], rounded[part], grid), values.size)
    return result


def gradient(x: Tensor, upstream: Tensor, grid: Grid, saturation: Saturation) -> tuple[Tensor, GradientSums]:
    """The gradient of the input, and the sums that the gradients of the clips are made of."""
    if upstream.stride() != x.stride():
        upstream = torch.empty_like(x).copy_(upstream)
    result = torch.empty_like(x)
    values, given, passed = _flat(x), _flat(upstream), _flat(result)
    sums = np.zeros((-(-values.size // _BLOCK), 3), np.float32)

    def run(part: slice) -> None:
        blocks = sums[part.start // _BLOCK : -(-part.stop // _BLOCK)]
        _gradient(values[part], given[part], passed[part], blocks, (grid.inverse, *saturation))

    _in_threads(run, values.size)
    total = sums.sum(axis=0, dtype=np.float64)
    return result, GradientSums(*total.tolist())


def _flat(x: Tensor) -> Floats:
    """The values in the order of memory, without a copy."""
    x = x.detach()
    if not x.is_contiguous():
        x = x.permute(0, 2, 3, 1)
    flat: Floats = x.reshape(-1).numpy()
    return flat


def _in_threads(run: Callable[[slice], None], size: int) -> None:
    """Call a function with slices that cover ``size`` values, in as many threads as torch uses."""
    threads = max(1, min(torch.get_num_threads(), size // _THREADED_SIZE))
    if threads == 1:
        run(slice(0, size))
        return
    share = -(-size // (threads * _BLOCK)) * _BLOCK
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, [slice(start, min(start + share, size)) for start in range(0, size, share)]))


@compiled
def _fake_quantize(values: Floats, rounded: Floats, grid: Grid) -> None:
    inverse, step, lowest, highest = grid
    for place in range(values.size):
        integer = np.rint(values[place] * inverse)
        if integer < lowest:
            integer = lowest
        if integer > highest:
            integer = highest
        rounded[place] = integer * step


@compiled_sum
def _gradient(
    values: Floats,
    upstream: Floats,
    passed: Floats,
    sums: NDArray[np.float32],
    limits: tuple[np.float32, np.float32, np.float32, np.float32, np.float32],
) -> None:
    inverse, lower, upper, lower_error, upper_error = limits
    zero = np.float32(0)
    for block in range(sums.shape[0]):
        some = values[block * _BLOCK : (block + 1) * _BLOCK]
        given = upstream[block * _BLOCK : (block + 1) * _BLOCK]
        result = passed[block * _BLOCK : (block + 1) * _BLOCK]
        rounding, above, below = zero, zero, zero
        for place in range(some.size):
            value, slope = some[place], given[place]
            scaled = value * inverse
            error = np.rint(scaled) - scaled
            is_above, is_below = value > upper, value < lower
            error = upper_error if is_above else error
            error = lower_error if is_below else error
            rounding += error * slope
            above += slope if is_above else zero
            below += slope if is_below else zero
            result[place] = zero if is_above or is_below else slope
        sums[block, 0], sums[block, 1], sums[block, 2] = rounding, above, below
