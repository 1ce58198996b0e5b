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
    fake_quantize_weight,
    from_channels_first,
    map_rows,
    quantize_weight,
)
from amct.numerics.rounding.paired_weights import LARGEST, near_limit, rounded_within_limit, within_limit

if TYPE_CHECKING:
    from torch import Tensor

    from amct.numerics.qparams import QParams


def quantize_weight_cancelling_errors(weight: Tensor, qparams: QParams, kind: WeightKind, groups: int = 1) -> Tensor:
    """Quantize a weight to int8, in its own shape, rounded so that the errors cancel.

    Raises:
        CalibrationError: the weight holds NaN.
        ArgumentError: the parameters do not fit the weight.
    """
    nearest = quantize_weight(weight, qparams, kind, groups)
    if bool(qparams.offset.any()):
        return nearest  # errors are cancelled on symmetric grids only
    rows = channels_first(weight.detach(), kind, groups)
    scale = qparams.per_row(rows.shape[0]).scale
    kernels = rows.reshape(rows.shape[0], -1, math.prod(weight.shape[2:]))
    return from_channels_first(
        round_cancelling_errors(kernels, scale, qparams.bits).flatten(1), weight.shape, kind, groups
    )


def round_weight(weight: Tensor, qparams: QParams, kind: WeightKind, groups: int = 1, *, cancel_errors: bool) -> Tensor:
    """The weight rounded to its grid, in its own shape and dtype: to the nearest, or so that the errors cancel.

    Raises:
        CalibrationError: the weight holds NaN.
        ArgumentError: the parameters do not fit the weight.
    """
    if not cancel_errors:
        return fake_quantize_weight(weight, qparams, kind, groups)
    integers = channels_first(quantize_weight_cancelling_errors(weight, qparams, kind, groups), kind, groups)
    per_row = qparams.per_row(integers.shape[0])
    rows = integers.shape[0]
    scale, offset = per_row.scale.expand(rows), per_row.offset.expand(rows)
    rounded = map_rows(lambda some, part: dequantize(some, scale[part], offset[part], axis=0), integers, weight.dtype)
    return from_channels_first(rounded, weight.shape, kind, groups)


def round_cancelling_errors(weight: Tensor, scale: Tensor, bits: int, *, bounded_pairs: bool = False) -> Tensor:
    """Round a weight to int8 steps of its scale; the error of a weight is below one step unless it is clipped.

    Args:
        weight: ``[Cout, Cin/groups, ...]``.
        scale: ``[1]`` or ``[Cout]``.
        bits: 2..8.
        bounded_pairs: The sums of neighbours along the reduction fit kernels that add them in 16 bits
            (``paired_weights.py``).
    """
    lowest, highest = (-LARGEST, LARGEST) if bounded_pairs else integer_range(bits)
    per_row = scale.double().reshape(-1, *[1] * (weight.ndim - 1)).expand(weight.shape[0], *[1] * (weight.ndim - 1))
    has_kernels = math.prod(weight.shape[2:]) > 1  # a single weight has no other one to cancel its error

    def rounded(rows: Tensor, part: slice) -> Tensor:
        # Clipping errors are not cancelled by other weights.
        exact = (rows.double() / per_row[part]).clamp_(lowest, highest)
        result = rounded_within_limit(within_limit(exact)) if bounded_pairs else exact.round()
        kernels = rows.shape[0] * rows.shape[1]
        for groups in (kernels, rows.shape[0]) if has_kernels else (rows.shape[0],):
            fixed = near_limit(result.reshape(rows.shape)).reshape(groups, -1) if bounded_pairs else None
            result = _cancel_errors(exact.reshape(groups, -1), result.reshape(groups, -1), fixed)
        return result.clamp_(lowest, highest).reshape(rows.shape)

    return map_rows(rounded, weight.detach(), torch.int8)


def _cancel_errors(exact: Tensor, rounded: Tensor, fixed: Tensor | None) -> Tensor:
    """Round some values in the other direction, so that the errors of each row sum up to half a step at most.

    Those that are ``fixed`` do not grow; where they are many, a larger sum of errors is left.
    """
    errors = rounded - exact
    surplus = errors.sum(1, keepdim=True).round()
    if not bool(surplus.any()):
        return rounded
    direction = surplus.sign()
    # Changing the largest errors of the same sign costs least; an error of the other sign would exceed one step.
    errors.mul_(direction)
    if fixed is not None:
        errors.masked_fill_(fixed & (rounded * direction <= 0), 0)
    chosen = _largest(errors, surplus.abs().long().clamp_(max=errors.shape[1]))
    chosen &= errors > 0
    return rounded - chosen * direction


def _largest(values: Tensor, counts: Tensor) -> Tensor:
    """Mark the ``counts`` ``[rows, 1]`` largest values of each row, the first ones of equal values.

    Only the largest of all counts is looked for: far fewer than a row has, so sorting the rows would cost most.
    """
    most = int(counts.max())
    if most == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    limit = values.topk(most, dim=1).values.gather(1, (counts - 1).clamp_(min=0))
    chosen = values > limit
    equal = values == limit
    equal &= equal.cumsum(1) <= counts - chosen.sum(1, keepdim=True)
    # A row without any to choose has its largest value as limit: nothing is above it, and no equal one is wanted.
    return chosen | equal
