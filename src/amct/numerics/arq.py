"""ARQ: symmetric weight quantization with one scale per tensor or per output channel.

Every weight is handled as rows ``[Cout, -1]``, one row per output channel; ``channels_first`` and its inverse convert
between the layout of a ``WeightKind`` and rows. LSTM and GRU matrices ``[gates · hidden, input]`` already are rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amct.errors import ArgumentError
from amct.numerics.affine import SymmetricScale, fake_quantize, quantize, scale_and_offset
from amct.numerics.qparams import QParams
from amct.numerics.settings import WeightKind as WeightKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor


VALUES_PER_CHUNK = 2**19
"""Weights are worked on in chunks of rows, so that no intermediate result has the size of a large weight: 4 MB in
float64 are small beside any model, large enough that the number of chunks costs no time."""


def arq(
    weight: Tensor,
    *,
    kind: WeightKind,
    bits: int = 8,
    channel_wise: bool = True,
    groups: int = 1,
    symmetric_scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE,
) -> QParams:
    """Return the parameters of a weight from its minimum and maximum: ``[1]``, ``[Cout]``, or ``[gates]``.

    Args:
        weight: floating point, in the layout of ``kind``; half precision is computed in float32.
        kind: layout of the weight.
        bits: 2..8 (AMCT uses 4, 6, 7, 8).
        channel_wise: one scale per output channel; otherwise one per tensor (RNN with ``groups`` > 1: one per gate).
        groups: groups of a transposed convolution, or gates of a recurrent layer.
        symmetric_scale: divisor of the range.

    Raises:
        CalibrationError: the weight holds NaN or infinity, or its scale would be too large.
        ArgumentError: bits, shape or groups cannot be used.
    """
    _check_bits(bits)
    rows = channels_first(weight.detach(), kind, groups)
    if not channel_wise:
        rows = rows.reshape(groups if kind is WeightKind.RNN else 1, -1)
    minimum, maximum = torch.aminmax(rows, dim=1)
    scale, offset = scale_and_offset(minimum, maximum, bits, asymmetric=False, symmetric_scale=symmetric_scale)
    return QParams(scale=scale, offset=offset, bits=bits, axis=0)


def channels_first(weight: Tensor, kind: WeightKind, groups: int = 1) -> Tensor:
    """Return the weight as rows ``[Cout, -1]``, one per output channel; a view where the layout allows it.

    Raises:
        ArgumentError: the weight is empty, has too few dimensions, or its channels do not divide by ``groups``.
    """
    check_layout(list(weight.shape), kind, groups)
    if kind is not WeightKind.CONV_TRANSPOSE:
        return weight.reshape(weight.shape[0], -1)
    inputs, outputs_per_group = weight.shape[:2]
    grouped = weight.reshape(groups, inputs // groups, outputs_per_group, -1)
    return grouped.transpose(1, 2).reshape(groups * outputs_per_group, -1)


def from_channels_first(rows: Tensor, shape: Sequence[int], kind: WeightKind, groups: int = 1) -> Tensor:
    """Convert rows ``[Cout, -1]`` back to a weight of ``shape``: the inverse of ``channels_first``.

    Raises:
        ArgumentError: as ``channels_first``, or the rows do not fit this shape.
    """
    check_layout(shape, kind, groups)
    outputs = shape[1] * groups if kind is WeightKind.CONV_TRANSPOSE else shape[0]
    if rows.ndim != 2 or rows.shape[0] != outputs or rows.numel() != math.prod(shape):
        raise ArgumentError(
            f"rows of shape {list(rows.shape)} do not fit a {kind.value} weight of shape {list(shape)} "
            f"with {groups} groups"
        )
    if kind is not WeightKind.CONV_TRANSPOSE:
        return rows.reshape(list(shape))
    grouped = rows.reshape(groups, shape[1], shape[0] // groups, -1)
    return grouped.transpose(1, 2).reshape(list(shape))


def quantize_weight(weight: Tensor, qparams: QParams, kind: WeightKind, groups: int = 1) -> Tensor:
    """Quantize a weight to int8, in its own shape.

    Raises:
        CalibrationError: the weight holds NaN.
        ArgumentError: the parameters do not fit the weight.
    """
    _check_bits(qparams.bits)
    rows = channels_first(weight.detach(), kind, groups)
    per_row = qparams.per_row(rows.shape[0])
    scale, offset = per_row.scale.expand(rows.shape[0]), per_row.offset.expand(rows.shape[0])

    def integers_of(some: Tensor, part: slice) -> Tensor:
        return quantize(some, scale[part], offset[part], qparams.bits, axis=0)

    is_finite = bool(torch.isfinite(rows.sum()))
    # Only the whole weight tells how many of its values are NaN.
    integers = map_rows(integers_of, rows, torch.int8) if is_finite else integers_of(rows, slice(None))
    return from_channels_first(integers, weight.shape, kind, groups)


def fake_quantize_weight(weight: Tensor, qparams: QParams, kind: WeightKind, groups: int = 1) -> Tensor:
    """Fake-quantize a weight, in its own shape and dtype, with straight-through gradients.

    Raises:
        ArgumentError: the parameters do not fit the weight.
    """
    _check_bits(qparams.bits)
    rows = channels_first(weight, kind, groups)
    per_row = qparams.per_row(rows.shape[0])
    rounded = fake_quantize(rows, per_row.scale, per_row.offset, qparams.bits, axis=0)
    return from_channels_first(rounded, weight.shape, kind, groups)


def row_chunks(rows: int, values: int) -> Iterator[slice]:
    """Slices that together cover ``rows`` rows with ``values`` values in all."""
    step = max(1, VALUES_PER_CHUNK * rows // max(values, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def map_rows(function: Callable[[Tensor, slice], Tensor], weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the weight's shape whose rows (along axis 0) are ``function(rows, their slice)``."""
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for part in row_chunks(weight.shape[0], weight.numel()):
        result[part] = function(weight[part], part)
    return result


def reorder_gates(rows: Tensor, order: Sequence[int]) -> Tensor:
    """Reorder the gates of a matrix, bias or factor ``[gates · hidden, ...]``: ``order`` names the old gates in turn.

    Raises:
        ArgumentError: the rows do not divide into the gates.
    """
    if rows.ndim == 0 or rows.shape[0] % len(order):
        raise ArgumentError(f"expected rows of {len(order)} gates of equal size, got shape {list(rows.shape)}")
    gates = rows.chunk(len(order))
    return torch.cat([gates[gate] for gate in order])


def _check_bits(bits: int) -> None:
    if not 2 <= bits <= 8:
        raise ArgumentError(f"bits: weights have 2..8 bits, got {bits}")


def check_layout(shape: Sequence[int], kind: WeightKind, groups: int) -> None:
    """Raise unless ``shape`` can be a weight of this kind.

    Raises:
        ArgumentError: too few dimensions, no values, or groups that do not divide the channels.
    """
    if len(shape) < 2 or math.prod(shape) == 0:
        raise ArgumentError(f"a {kind.value} weight needs at least 2 dimensions and one value, got shape {list(shape)}")
    if kind is WeightKind.LINEAR and groups != 1:
        raise ArgumentError(f"groups: expected 1 for a linear weight, got {groups}")
    if groups < 1 or shape[0] % groups:
        raise ArgumentError(
            f"groups: expected a positive divisor of the first dimension of the {kind.value} weight {list(shape)}, "
            f"got {groups}"
        )
