"""Round weights so that the errors cancel: in every kernel, then over all inputs of every output.

Rounding each weight to the nearest integer leaves errors that add up by chance. Neighbouring pixels, and to a degree
whole channels, have similar values, so what counts is the sum of the errors: where it is more than half a step, the
weights nearest to a half are rounded the other way. No data is needed.
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


def quantize_weight_evenly(
    weight: Tensor, factors: WeightFactors, kind: WeightKind, bits: int = 8, groups: int = 1
) -> Tensor:
    """As ``quantize_weight``: the weight as int8, in its own shape, but rounded so that the errors cancel.

    Raises:
        CalibrationError: the weight holds NaN.
        ArgumentError: the factors do not fit the weight.
    """
    nearest = quantize_weight(weight, factors, kind, bits, groups)
    if bool(factors.offset.any()):
        return nearest  # a grid that does not count from zero
    rows = channels_first(weight.detach(), kind, groups)
    scale = factors_per_row(factors, rows.shape[0]).scale
    kernels = rows.reshape(rows.shape[0], -1, math.prod(weight.shape[2:]))
    return from_channels_first(round_evenly(kernels, scale, bits).flatten(1), weight.shape, kind, groups)


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
    integers = channels_first(quantize_weight_evenly(weight, factors, kind, bits, groups), kind, groups)
    per_row = factors_per_row(factors, integers.shape[0])
    rounded = dequantize(integers, per_row.scale, per_row.offset, axis=0).to(weight.dtype)
    return from_channels_first(rounded, weight.shape, kind, groups)


def round_evenly(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The weight in integers of its scales, int8; no weight is off by a step or more, unless it is clipped.

    Args:
        weight: ``[Cout, Cin/groups, ...]``.
        scale: one per output, ``[Cout]``, or one.
        bits: of the integers.
    """
    lowest, highest = integer_range(bits)
    exact = weight.detach().double() / scale.double().reshape(-1, *[1] * (weight.ndim - 1))
    # What is clipped has an error of its own that others cannot make good.
    exact = exact.clamp(lowest, highest)
    rounded = exact.round()
    rows, kernels = weight.shape[0], weight.shape[0] * weight.shape[1]
    for groups in (kernels, rows) if weight.ndim > 2 else (rows,):
        rounded = _cancelled(exact.reshape(groups, -1), rounded.reshape(groups, -1))
    return rounded.clamp(lowest, highest).reshape(weight.shape).to(torch.int8)


def _cancelled(exact: Tensor, rounded: Tensor) -> Tensor:
    """Round some values of each row the other way, so that the errors of a row sum up to half a step at most."""
    errors = rounded - exact
    surplus = errors.sum(1, keepdim=True).round()
    direction = surplus.sign()
    # The largest errors of the same sign cost least when they are turned round; one of a whole step would grow.
    order = (errors * direction).argsort(dim=1, descending=True, stable=True)
    chosen = torch.zeros_like(errors, dtype=torch.bool)
    chosen.scatter_(1, order, torch.arange(errors.shape[1], device=errors.device).expand_as(order) < surplus.abs())
    chosen &= errors * direction > 0
    return rounded - chosen * direction
