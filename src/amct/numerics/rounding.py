"""Rounding: so that errors cancel, for kernels that add pairs in 16 bits, and the noise that it makes.

Round weights so that rounding errors cancel: within every kernel, then within every output channel.

Neighbouring pixels, and to a degree whole channels, have similar values, so the output error depends mostly on the sum
of the weights' rounding errors. Where that sum exceeds half a step, the weights closest to a rounding tie are rounded
in the other direction. No data is needed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amct.numerics.affine import SymmetricScale, dequantize, integer_range
from amct.numerics.arq import (
    WeightKind,
    arq,
    channels_first,
    fake_quantize_weight,
    from_channels_first,
    map_rows,
    quantize_weight,
    row_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from amct.numerics.qparams import QParams


def quantize_weight_cancelling_errors(weight: Tensor, qparams: QParams, kind: WeightKind, groups: int = 1) -> Tensor:
    """Quantize a weight to int8, in its own shape, rounded so that the errors cancel.

    Raises:
        CalibrationError: the weight holds NaN.
        ArgumentError: the parameters do not fit the weight.
    """
    rows = channels_first(weight.detach(), kind, groups)
    is_refused = not 2 <= qparams.bits <= 8 or bool(torch.aminmax(rows).max.isnan())
    if is_refused or bool(qparams.offset.any()):  # errors are cancelled on symmetric grids only
        return quantize_weight(weight, qparams, kind, groups)
    scale = qparams.per_row(rows.shape[0]).scale
    kernels = rows.reshape(rows.shape[0], -1, math.prod(weight.shape[2:]))
    return from_channels_first(
        round_cancelling_errors(kernels, scale, qparams.bits).flatten(1), weight.shape, kind, groups
    )


def integer_weight(
    weight: Tensor, qparams: QParams, kind: WeightKind, groups: int = 1, *, cancel_errors: bool
) -> Tensor:
    """Quantize a weight to int8, in its own shape: to the nearest, or so that the errors cancel.

    Raises:
        CalibrationError: the weight holds NaN.
        ArgumentError: the parameters do not fit the weight.
    """
    quantized = quantize_weight_cancelling_errors if cancel_errors else quantize_weight
    return quantized(weight, qparams, kind, groups)


def bias_correction(weight: Tensor, integers: Tensor, scale: Tensor, mean: Tensor, groups: int = 1) -> Tensor:
    """What each output loses on average because the weight is rounded; added to the bias, the mean error is zero.

    Args:
        weight: ``[Cout, Cin/groups, ...]`` of a convolution or linear layer.
        integers: The rounded weight, in the same shape.
        scale: Its ``[1]`` or ``[Cout]`` scales.
        mean: The mean of each input channel ``[Cin]``.
        groups: Of a convolution.

    Returns:
        ``[Cout]`` in float64.
    """
    rows = weight.shape[0]
    steps = scale.double().reshape(-1, 1).expand(rows, 1)
    group = torch.arange(groups, device=weight.device).repeat_interleave(rows // groups)
    means = mean.to(weight.device).double().reshape(groups, -1)
    found = []
    for part in row_chunks(rows, weight.numel()):
        exact = weight[part].detach().double().flatten(1)
        errors = exact.addcmul_(integers[part].flatten(1).double(), steps[part], value=-1)
        by_channel = errors.reshape(errors.shape[0], weight.shape[1], -1).sum(2)
        found.append((by_channel * means[group[part]]).sum(1))
    return torch.cat(found)


def round_weight(weight: Tensor, qparams: QParams, kind: WeightKind, groups: int = 1, *, cancel_errors: bool) -> Tensor:
    """The weight rounded to its grid, in its own shape and dtype: to the nearest, or so that the errors cancel.

    Raises:
        CalibrationError: the weight holds NaN.
        ArgumentError: the parameters do not fit the weight.
    """
    if not cancel_errors:
        return fake_quantize_weight(weight, qparams, kind, groups)
    integers = channels_first(integer_weight(weight, qparams, kind, groups, cancel_errors=True), kind, groups)
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
            (see ``paired`` below).
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


# -- The expected noise in a layer's outputs when its data and its weights are rounded. One model for every caller -----
#
# Rounding errors are taken as spread evenly over one step and as independent of each other: their power is step² / 12.
# Dividing each input channel by a factor and multiplying its weights by it changes nothing in float, but moves noise
# between data and weights: all channels of the data have one step, all weights of an output row (or all weights)
# another.


class RoundingNoise:
    """The noise of one layer as a function of the factors of its input channels.

    Args:
        weight: ``[groups, rows, channels of a group, taps]``.
        low: The smallest value of each input channel, at most 0; channels of all groups in turn.
        high: The largest value of each input channel, at least 0.
        power: The power of each input channel: the noise of the weights is multiplied by it.
        data_steps: Number of steps between the smallest and the largest integer of the data.
        weight_steps: The largest integer of a weight.
        one_scale: Whether all rows share one weight scale.
    """

    def __init__(
        self,
        weight: Tensor,
        low: Tensor,
        high: Tensor,
        power: Tensor,
        *,
        data_steps: int = 255,
        weight_steps: int = 127,
        one_scale: bool = False,
    ) -> None:
        detached = weight.detach()
        self._low, self._high, self._power = low.double(), high.double(), power.double()
        self._taps = weight.shape[3]
        # Of a weight without taps nothing is copied: it may be large.
        self._largest = detached.abs().amax(3) if self._taps > 1 else detached[..., 0]
        parts = row_chunks(weight.shape[2], weight.numel())
        sums = [detached[:, :, part].square().sum((1, 3), dtype=torch.float64) for part in parts]
        self._energy = torch.cat(sums, 1).reshape(-1)
        self._data_steps, self._weight_steps, self._one_scale = data_steps, weight_steps, one_scale

    def power(self, factors: Tensor) -> float:
        """The power of the noise in all outputs when the input channels are divided by ``factors``.

        Zeros are rounded without an error; they are counted as other values are.
        """
        wide = factors.double()
        step = ((self._high / wide).max() - (self._low / wide).min()) / self._data_steps
        from_data = step.square() * (wide.square() * self._energy).sum()
        grouped = factors.reshape(self._largest.shape[0], 1, -1).to(self._largest.dtype)
        parts = row_chunks(self._largest.shape[1], self._largest.numel())
        largest = [(self._largest[:, part].abs() * grouped).amax(2) for part in parts]
        scales = torch.cat(largest, 1).double() / self._weight_steps
        if self._one_scale:
            scales = scales.max().expand_as(scales)
        power = (self._power / wide.square()).reshape(grouped.shape).sum(2)
        from_weights = (scales.square() * self._taps * power).sum()
        return float(from_data + from_weights) / 12


# -- Weights for kernels that add two products of uint8 and int8 in 16 bits: 8-bit integers whose pairs cannot saturate
#
# Without VNNI, x86 multiplies by ``vpmaddubsw``, which adds the products of two neighbours along the reduction in 16
# bits
# signed. ``255 · (|a| + |b|)`` fits up to ``|a| + |b| = 128``; neighbours of different sign never saturate. So pairs
# are
# bounded by ``|a + b| <= 128``, and a weight needs 7 bits only where two of its largest values are neighbours.
#
# The reduction runs over the positions of the kernel, and at each position over the inputs of the group. That is the
# order of onnxruntime's kernels, for convolutions and matrix products alike.


PAIR_LIMIT = 128
"""The largest sum of magnitudes whose products with 255 fit 16 bits signed."""
LARGEST = 127
"""The largest magnitude. -128 is left out: kernels for ARM add two products of int8, which overflow with -128 twice."""
SCALES = 8
"""Scales that are tried between the finest one and the finest that bounds no pair."""
COHERENT = 4
"""How often the error of a bounded pair counts: it shrinks large weights, and does not cancel as rounding does."""


def adds_pairs(shape: Sequence[int], groups: int) -> bool:
    """Whether kernels add pairs for a weight ``[Cout, Cin/groups, ...]``: those of depthwise convolutions do not."""
    return not (shape[1] == 1 and shape[0] == groups)


def paired(weight: Tensor) -> Tensor:
    """The values of each output ``[Cout, pairs, 2]`` that a kernel adds in 16 bits; an odd one has a zero beside it.

    Args:
        weight: ``[Cout, Cin/groups, ...]``.
    """
    rows = weight.reshape(*weight.shape[:2], -1).transpose(1, 2).flatten(1)
    if rows.shape[1] % 2:
        rows = torch.nn.functional.pad(rows, (0, 1))
    return rows.reshape(rows.shape[0], -1, 2)


def unpaired(pairs: Tensor, shape: torch.Size) -> Tensor:
    """The weight of a shape from its pairs: the inverse of ``paired``."""
    rows = pairs.flatten(1)[:, : shape[1:].numel()]
    return rows.reshape(shape[0], -1, shape[1]).transpose(1, 2).reshape(shape)


def paired_scale(weight: Tensor) -> Tensor:
    """The scale of each output ``[Cout]`` with the least expected error of weights whose pairs are bounded.

    A finer scale has smaller rounding errors, but more pairs that must be made smaller. The expected error of a scale s
    is s²/12 for each weight, and ``COHERENT`` times half of the squared excess for each pair (both move by half of it).
    At the coarse end no pair is too large: at worst two of the largest weights are neighbours, and the scale is that of
    7 bits.

    Raises:
        CalibrationError: the weight holds NaN or infinity.
        ArgumentError: it is empty.
    """
    finest = arq(weight, kind=WeightKind.CONV, bits=8, symmetric_scale=SymmetricScale.FULL_RANGE).scale

    chunks = row_chunks(weight.shape[0], weight.numel())
    return torch.cat([_least_error(weight[part].detach(), finest[part]) for part in chunks])


def within_limit(exact: Tensor) -> Tensor:
    """The nearest values, in steps of the scale, whose pairs are bounded: each of too large a pair gives up half."""
    pairs = paired(exact)
    sums = pairs.sum(-1, keepdim=True)
    return unpaired(pairs - (sums - sums.clamp(-PAIR_LIMIT, PAIR_LIMIT)) / 2, exact.shape)


def rounded_within_limit(exact: Tensor) -> Tensor:
    """The nearest integers whose pairs are bounded, of values whose pairs are; only a tie can be rounded too far."""
    rounded = paired(exact.round())
    too_large = rounded.sum(-1).abs() > PAIR_LIMIT
    if bool(too_large.any()):
        found = rounded[too_large]
        errors = found.abs() - paired(exact)[too_large].abs()
        rounded[too_large] = found - found.sign() * torch.nn.functional.one_hot(errors.argmax(-1), 2)
    return unpaired(rounded, exact.shape)


def near_limit(integers: Tensor) -> Tensor:
    """Which integers may not grow: if both of any other pair do so by one, the pair is still bounded."""
    fixed = (_sums(integers).abs() >= PAIR_LIMIT - 1).unsqueeze(-1)
    return unpaired(fixed.expand(-1, -1, 2), integers.shape)


def _sums(weight: Tensor) -> Tensor:
    """The sum of each pair ``[Cout, pairs]``."""
    first, second = paired(weight).unbind(-1)
    return first + second


def _least_error(rows: Tensor, finest: Tensor) -> Tensor:
    joint = _sums(rows.float()).abs_()
    coarsest = torch.maximum(finest, joint.amax(1) / PAIR_LIMIT)
    steps = torch.linspace(0, 1, SCALES, device=rows.device).reshape(-1, 1)
    scales = finest * (coarsest / finest) ** steps
    rounding = scales.square() / 12 * rows[0].numel()
    excess = [(joint - PAIR_LIMIT * scale.reshape(-1, 1)).clamp_(min=0) for scale in scales]
    errors = rounding + torch.stack([each.square().sum(1) for each in excess]) * (COHERENT / 2)
    # Of equal errors the coarse scale: its integers are the smaller ones.
    chosen = SCALES - 1 - errors.flip(0).argmin(0)
    return scales.gather(0, chosen.reshape(1, -1)).reshape(-1)
