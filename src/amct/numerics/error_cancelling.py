"""Round weights so that rounding errors cancel: within every kernel, then within every output channel.

Neighbouring pixels, and to a degree whole channels, have similar values, so the output error depends mostly on the sum
of the weights' rounding errors. Where that sum exceeds half a step, the weights closest to a rounding tie are rounded
in the other direction. No data is needed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amct.numerics.affine import dequantize, integer_range
from amct.numerics.arq import (
    WeightKind,
    channels_first,
    factors_per_row,
    fake_quantize_weight,
    from_channels_first,
    quantize_weight,
)

if TYPE_CHECKING:
    from torch import Tensor

    from amct.numerics.arq import WeightFactors


def quantize_weight_cancelling_errors(
    weight: Tensor, factors: WeightFactors, kind: WeightKind, bits: int = 8, groups: int = 1
) -> Tensor:
    """Quantize a weight to int8, in its own shape, rounded so that the errors cancel.

    Raises:
        CalibrationError: the weight holds NaN.
        ArgumentError: the factors do not fit the weight.
    """
    nearest = quantize_weight(weight, factors, kind, bits, groups)
    if bool(factors.offset.any()):
        return nearest  # errors are cancelled on symmetric grids only
    rows = channels_first(weight.detach(), kind, groups)
    scale = factors_per_row(factors, rows.shape[0]).scale
    kernels = rows.reshape(rows.shape[0], -1, math.prod(weight.shape[2:]))
    return from_channels_first(round_cancelling_errors(kernels, scale, bits).flatten(1), weight.shape, kind, groups)


def round_weight(
    weight: Tensor, factors: WeightFactors, kind: WeightKind, bits: int = 8, groups: int = 1, *, cancel_errors: bool
) -> Tensor:
    """The weight rounded to its grid, in its own shape and dtype: to the nearest, or so that the errors cancel.

    Raises:
        CalibrationError: the weight holds NaN.
        ArgumentError: the factors do not fit the weight.
    """
    if not cancel_errors:
        return fake_quantize_weight(weight, factors, kind, bits, groups)
    integers = channels_first(quantize_weight_cancelling_errors(weight, factors, kind, bits, groups), kind, groups)
    per_row = factors_per_row(factors, integers.shape[0])
    rounded = dequantize(integers, per_row.scale, per_row.offset, axis=0).to(weight.dtype)
    return from_channels_first(rounded, weight.shape, kind, groups)


def round_cancelling_errors(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Round a weight to int8 steps of its scale; the error of a weight is below one step unless it is clipped.

    Args:
        weight: ``[Cout, Cin/groups, ...]``.
        scale: ``[1]`` or ``[Cout]``.
        bits: 2..8.
    """
    lowest, highest = integer_range(bits)
    exact = weight.detach().double() / scale.double().reshape(-1, *[1] * (weight.ndim - 1))
    # Clipping errors are not cancelled by other weights.
    exact = exact.clamp(lowest, highest)
    rounded = exact.round()
    rows, kernels = weight.shape[0], weight.shape[0] * weight.shape[1]
    for groups in (kernels, rows) if weight.ndim > 2 else (rows,):
        rounded = _cancel_errors(exact.reshape(groups, -1), rounded.reshape(groups, -1))
    return rounded.clamp(lowest, highest).reshape(weight.shape).to(torch.int8)


def _cancel_errors(exact: Tensor, rounded: Tensor) -> Tensor:
    """Round some values in the other direction, so that the errors of each row sum up to half a step at most."""
    errors = rounded - exact
    surplus = errors.sum(1, keepdim=True).round()
    direction = surplus.sign()
    # Changing the largest errors of the same sign costs least; an error of the other sign would exceed one step.
    order = (errors * direction).argsort(dim=1, descending=True, stable=True)
    chosen = torch.zeros_like(errors, dtype=torch.bool)
    chosen.scatter_(1, order, torch.arange(errors.shape[1], device=errors.device).expand_as(order) < surplus.abs())
    chosen &= errors * direction > 0
    return rounded - chosen * direction
