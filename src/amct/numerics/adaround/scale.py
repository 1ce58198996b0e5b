"""The weight scale of AdaRound, chosen before the rounding is learned.

At 8 bits, as in AMCT, the histogram of the weight is clipped at both ends such that the rest, merged to 255 levels, has
the least Kullback-Leibler divergence from it. At fewer bits this measure is too coarse; there the scale with the
smallest squared rounding error is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amct.errors import ArgumentError, CalibrationError
from amct.numerics.affine import LARGEST_SCALE, SMALLEST_SCALE, integer_range
from amct.numerics.arq import WeightKind, channels_first
from amct.numerics.counts.compiled import compiled, compiled_sum
from amct.numerics.qparams import QParams

if TYPE_CHECKING:
    from collections.abc import Callable

_KL_BITS = 8
_BINS = 512
_LEVELS = 255
_CUTS = 20
_TIE = 1e-9  # divergences closer than this differ by rounding only

_COARSE = np.arange(0.1, 1.205, 0.01)
_FINE = np.arange(-0.01, 0.0105, 0.001)

Rows = NDArray[np.float32]
Values = NDArray[np.float64]


def initial_scale(
    weight: Tensor, *, kind: WeightKind, bits: int = 8, channel_wise: bool = True, groups: int = 1
) -> QParams:
    """Return one scale for the tensor, or one per output channel.

    Raises:
        CalibrationError: the weight holds NaN or infinity, or its scale would be too large.
        ArgumentError: bits are outside 2..8, or the shape does not fit ``kind`` and ``groups``.
    """
    if not 2 <= bits <= _KL_BITS:
        raise ArgumentError(f"bits: AdaRound expects 2..{_KL_BITS}, got {bits}")
    choose = _kl_scales if bits == _KL_BITS else _mse_scales
    return _searched(weight, choose, kind=kind, bits=bits, channel_wise=channel_wise, groups=groups)


def least_error_scale(
    weight: Tensor, *, kind: WeightKind, bits: int = 8, channel_wise: bool = True, groups: int = 1
) -> QParams:
    """As ``initial_scale``, but the scale with the smallest squared rounding error for every number of bits."""
    return _searched(weight, _mse_scales, kind=kind, bits=bits, channel_wise=channel_wise, groups=groups)


def _searched(
    weight: Tensor,
    choose: Callable[[Rows, Values, int], Values],
    *,
    kind: WeightKind,
    bits: int,
    channel_wise: bool,
    groups: int,
) -> QParams:
    tensor = channels_first(weight.detach().float(), kind, groups)
    gates = groups if kind is WeightKind.RNN else 1
    rows: Rows = (tensor if channel_wise else tensor.reshape(gates, -1)).cpu().contiguous().numpy()
    largest = np.abs(rows).max(axis=1).astype(np.float64)
    if not np.isfinite(largest).all() or largest.max() / integer_range(bits)[1] > LARGEST_SCALE:
        raise CalibrationError(
            f"the weight cannot be quantized: its largest magnitude is {largest.max():g}, expected a finite value "
            f"whose scale is at most {LARGEST_SCALE:g}; look for a diverged layer"
        )
    scale = np.ones(largest.size)
    usable = largest / integer_range(bits)[1] >= SMALLEST_SCALE
    scale[usable] = choose(rows[usable], largest[usable], bits)
    scale[scale < SMALLEST_SCALE] = 1.0
    factor = torch.from_numpy(scale.astype(np.float32)).to(weight.device)
    return QParams.symmetric(factor, bits)


def _kl_scales(rows: Rows, largest: Values, bits: int) -> Values:
    scales = np.empty(largest.size)
    for number, (row, bound) in enumerate(zip(rows, largest, strict=True)):
        divergences = _divergences(_histogram(row, bound))
        cut = int(np.argmax(divergences <= divergences.min() + _TIE))
        scales[number] = (bound - cut * (2 * bound / _BINS)) / -integer_range(bits)[0]
    return scales


@compiled
def _histogram(row: Rows, bound: float) -> Values:
    count = np.zeros(_BINS)
    for value in row:
        count[min(_BINS - 1, int((np.float64(value) + bound) / (2 * bound) * _BINS))] += 1
    return count


@compiled
def _divergences(histogram: Values) -> Values:
    """Return KL(p‖q) for every number of bins clipped at each end; p adds the clipped counts to its end bins."""
    found = np.empty(_CUTS)
    for cut in range(_CUTS):
        p = histogram[cut : _BINS - cut].copy()
        p[0] += histogram[:cut].sum()
        p[-1] += histogram[_BINS - cut :].sum()
        mass, members = np.zeros(_LEVELS), np.zeros(_LEVELS)
        for place in range(p.size):
            level = place * _LEVELS // p.size
            mass[level] += p[place]
            members[level] += p[place] > 0
        # q spreads the mass of a level over its non-empty bins, so it is positive where p is; empty bins add nothing.
        total = 0.0
        for place in range(p.size):
            if p[place] > 0:
                level = place * _LEVELS // p.size
                total += p[place] * np.log(p[place] * members[level] / mass[level])
        found[cut] = total / p.sum()
    return found


def _mse_scales(rows: Rows, largest: Values, bits: int) -> Values:
    lowest, highest = integer_range(bits)
    full = largest / highest
    coarse = _squared_errors(rows, full[:, None] * _COARSE, lowest, highest)
    best = _COARSE[coarse.argmin(axis=1)]
    candidates = full[:, None] * (best[:, None] + _FINE)
    fine = _squared_errors(rows, candidates, lowest, highest)
    return np.take_along_axis(candidates, fine.argmin(axis=1)[:, None], axis=1)[:, 0]


@compiled_sum
def _squared_errors(rows: Rows, scales: Values, lowest: int, highest: int) -> Values:
    """Return the summed squared rounding error of each row for each candidate scale, ``[rows, candidates]``."""
    errors = np.empty(scales.shape)
    low, high = np.float32(lowest), np.float32(highest)
    for number in range(rows.shape[0]):
        row = rows[number]
        for candidate in range(scales.shape[1]):
            scale = np.float32(scales[number, candidate])
            inverse = np.float32(1) / scale
            total = np.float64(0)
            for place in range(row.size):
                value = row[place]
                error = np.float64(min(max(np.rint(value * inverse), low), high) * scale - value)
                total += error * error
            errors[number, candidate] = total
    return errors
