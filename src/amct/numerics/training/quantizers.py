"""The quantizers that are trained: of activations, then of weights, then what is deployed of them.

ULQ: an activation quantizer whose clips are trained.

Forward: scale and offset of the range ``clip_min``..``clip_max``, then quantize and dequantize. Backward, with the
gradient g, ``U`` where x is above the largest number that can be represented, ``D`` where it is below the smallest,
v = (clip_max where U, clip_min where D, else x) / scale and e = (round(v) - v) / (2^bits - 1)::

    d clip_max = sum (e + U) g        d clip_min = sum (D - e) g        d x = g where neither U nor D, else 0

Only the input and four numbers are kept for the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from amct.errors import ArgumentError
from amct.numerics.affine import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    SymmetricScale,
    integer_range,
    round_scale_to_fp16,
    trained_factors,
)
from amct.numerics.arq import channels_first, from_channels_first
from amct.numerics.settings import WeightKind
from amct.numerics.training import kernels

if TYPE_CHECKING:
    from amct.numerics.training.kernels import GradientSums


def ulq(x: Tensor, clip_min: Tensor, clip_max: Tensor, bits: int, *, fp16_scale: bool = False) -> Tensor:
    """Quantize and dequantize ``x`` in its own dtype, with gradients for the input and both clips.

    Args:
        x: floating point; half precision is computed in float32.
        clip_min: 0-d, at most 0. Pass a constant zero where the lower clip is fixed: it costs no gradient.
        clip_max: 0-d, at least 0.
        bits: 2..16.
        fp16_scale: round the scale to a float16 value (``FORCE_FP16_QUANT``).
    """
    integer_range(bits)
    result: Tensor = _Ulq.apply(x, clip_min, clip_max, bits, fp16_scale)  # type: ignore[no-untyped-call]
    return result


def ulq_factors(clip_min: Tensor, clip_max: Tensor, bits: int, *, fp16_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Scale (float32) and offset (int32) that ``ulq`` uses for these clips."""
    scale, offset = trained_factors(clip_min, clip_max, bits, asymmetric=True)
    return (round_scale_to_fp16(scale) if fp16_scale else scale), offset


def valid_clips(clip_min: Tensor, clip_max: Tensor, valid_min: Tensor, valid_max: Tensor) -> tuple[Tensor, Tensor]:
    """The clips, with an illegal one replaced by the last legal one: an optimizer knows no limits.

    Clips that have met are both replaced; otherwise ``clip_max`` when it is negative, ``clip_min`` when it is positive.

    Args:
        clip_min: 0-d, as the optimizer left it.
        clip_max: as ``clip_min``.
        valid_min: the lower clip of the step before.
        valid_max: the upper one.
    """
    met = clip_min == clip_max
    return (
        torch.where(met | (clip_min > 0), valid_min, clip_min),
        torch.where(met | (clip_max < 0), valid_max, clip_max),
    )


class _Ulq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clip_min: Tensor, clip_max: Tensor, bits: int, fp16_scale: bool) -> Tensor:  # noqa: ANN401  torch's untyped context
        scale, offset = ulq_factors(clip_min, clip_max, bits, fp16_scale=fp16_scale)
        # Copies: the clips themselves may be corrected before the backward pass by another forward.
        factors = torch.stack([scale, offset.float(), clip_min.float(), clip_max.float()])
        ctx.save_for_backward(x, factors)
        ctx.bits = bits
        if kernels.can_use(x):
            return kernels.fake_quantize(x, kernels.grid_of(float(scale), int(offset), bits))
        lowest, highest = integer_range(bits)
        wide = _wide(x)
        scale, shift = scale.to(wide), offset.to(wide)
        steps = (x.to(wide) * scale.reciprocal()).round_()
        return steps.clamp_(lowest - shift, highest - shift).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  torch's untyped context
        x, factors = ctx.saved_tensors
        levels = 2**ctx.bits - 1
        if kernels.can_use(x) and gradients[0].dtype is x.dtype:
            dx, sums = _compiled_gradient(x, gradients[0], factors.tolist(), ctx.bits)
            total = torch.tensor(sums, dtype=torch.float64)
        else:
            dx, total = _plain_gradient(x, gradients[0], factors, ctx.bits)
        rounding, above, below = total[0] / levels, total[1], total[2]
        clip_min = (below - rounding).to(factors.dtype) if ctx.needs_input_grad[1] else None
        clip_max = (above + rounding).to(factors.dtype) if ctx.needs_input_grad[2] else None
        return dx if ctx.needs_input_grad[0] else None, clip_min, clip_max, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _compiled_gradient(x: Tensor, upstream: Tensor, factors: list[float], bits: int) -> tuple[Tensor, GradientSums]:
    grid = kernels.grid_of(factors[0], factors[1], bits)
    clips = [np.float32(clip) * grid.inverse for clip in factors[2:]]
    errors = [np.rint(clip) - clip for clip in clips]
    saturation = kernels.Saturation(grid.step * grid.lowest, grid.step * grid.highest, *errors)
    return kernels.gradient(x, upstream, grid, saturation)


def _plain_gradient(x: Tensor, upstream: Tensor, factors: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The gradient of the input, and the three sums of ``GradientSums`` as a tensor ``[3]``."""
    lowest, highest = integer_range(bits)
    wide = _wide(x)
    values, given = x.to(wide), upstream.to(wide)
    scale, offset, clip_min, clip_max = factors.to(wide).unbind()
    above, below = values > scale * (highest - offset), values < scale * (lowest - offset)
    scaled = torch.where(above, clip_max, torch.where(below, clip_min, values)).mul_(scale.reciprocal())
    rounding = (scaled.round() - scaled).mul_(given).sum()
    total = torch.stack([rounding, (given * above).sum(), (given * below).sum()])
    return upstream.masked_fill(above | below, 0), total


# -- Weight quantizers with gradients: a learned step (``ulq_retrain``), and ARQ anew in every step (``arq_retrain``) --
#
# Both have one scale per tensor or per output channel and no offset. Where a following batch norm will turn the sign of
# a channel, the lowest integer must not be used: -128 would become +128. ``lowest`` tells the lowest integer by
# channel.


def learned_step(
    weight: Tensor, scale: Tensor, bits: int, *, kind: WeightKind, groups: int = 1, lowest: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize a weight with a scale that has a gradient (that of LSQ).

    With g the gradient of the result and N weights per output channel: ``d weight = g`` everywhere, and ``d scale`` is
    the sum of g · (round(w/s) - w/s inside the range, the lowest or highest integer outside), divided by
    sqrt(N (2^(bits-1) - 1)). AMCT takes the N of one channel also where all channels share a scale.

    Args:
        weight: in the layout of ``kind``.
        scale: ``[1]``, ``[Cout]``, or ``[gates]`` of a recurrent layer; positive.
        bits: 2..8.
        kind: layout of the weight.
        groups: groups of a transposed convolution.
        lowest: the lowest integer by output channel ``[Cout]``; None: that of ``bits``.
    """
    rows = channels_first(weight, kind, groups)
    rounded: Tensor = _LearnedStep.apply(rows, scale, lowest, bits)  # type: ignore[no-untyped-call]
    return from_channels_first(rounded, weight.shape, kind, groups)


def arq_step(
    weight: Tensor,
    bits: int,
    *,
    kind: WeightKind,
    groups: int = 1,
    channel_wise: bool = True,
    lowest: Tensor | None = None,
    symmetric_scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE,
) -> Tensor:
    """Quantize and dequantize a weight with the scale of its own range; the gradient passes unchanged.

    Args:
        weight: in the layout of ``kind``.
        bits: 2..8.
        kind: layout of the weight.
        groups: groups of a transposed convolution, or gates of a recurrent layer.
        channel_wise: one scale per output channel; otherwise one per tensor, or per gate.
        lowest: as for ``learned_step``.
        symmetric_scale: divisor of the range.
    """
    rows = channels_first(weight, kind, groups)
    count = scale_count(rows.shape[0], kind, groups, channel_wise=channel_wise)
    rounded: Tensor = _ArqStep.apply(rows, count, lowest, bits, symmetric_scale)  # type: ignore[no-untyped-call]
    return from_channels_first(rounded, weight.shape, kind, groups)


def scale_count(outputs: int, kind: WeightKind, groups: int, *, channel_wise: bool) -> int:
    """How many scales a weight has: one per output channel, per tensor, or per gate of a recurrent layer."""
    if channel_wise:
        return outputs
    return groups if kind is WeightKind.RNN else 1


def arq_scale(
    rows: Tensor, bits: int, count: int, symmetric_scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE
) -> Tensor:
    """The scales ``[count]`` of rows ``[Cout, -1]`` by their range, as ``arq`` computes them, without its checks."""
    minimum, maximum = torch.aminmax(rows.detach().reshape(count, -1), dim=1)
    return trained_factors(minimum, maximum, bits, asymmetric=False, symmetric_scale=symmetric_scale)[0]


def valid_scale(scale: Tensor, valid: Tensor) -> Tensor:
    """The scales, with those that an optimizer moved out of the legal range replaced by the last legal ones."""
    return torch.where((scale < SMALLEST_SCALE) | (scale > LARGEST_SCALE), valid, scale)


def _per_row(factor: Tensor, rows: int) -> Tensor:
    """Factors as a column that broadcasts against rows: one for all, or repeated for the rows of each gate."""
    count = factor.numel()
    if count not in (1, rows):
        if count == 0 or rows % count:
            raise ArgumentError(f"{count} scales do not fit {rows} output channels")
        factor = factor.repeat_interleave(rows // count)
    return factor.reshape(-1, 1)


def _limits(lowest: Tensor | None, bits: int, like: Tensor) -> tuple[Tensor | int, int]:
    low, high = integer_range(bits)
    return (low if lowest is None else lowest.to(like.dtype).reshape(-1, 1)), high


def _round(rows: Tensor, step: Tensor, lowest: Tensor | None, bits: int) -> Tensor:
    if lowest is None and step.numel() == 1 and kernels.can_use(rows):
        return kernels.fake_quantize(rows, kernels.grid_of(float(step), 0, bits))
    low, high = _limits(lowest, bits, step)
    steps = (rows.to(step.dtype) * step.reciprocal()).round_()
    steps = steps.clamp_(min=low).clamp_(max=high)
    return steps.mul_(step).to(rows.dtype)


class _LearnedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, scale: Tensor, lowest: Tensor | None, bits: int) -> Tensor:  # noqa: ANN401  torch's untyped context
        kept = scale.detach().clone()  # the scale itself may be corrected before the backward pass
        ctx.save_for_backward(rows, kept, lowest)
        ctx.bits = bits
        return _round(rows, _per_row(kept.to(_wide(rows)), rows.shape[0]), lowest, bits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  torch's untyped context
        rows, scale, lowest = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return gradients[0], None, None, None
        step = _per_row(scale.to(_wide(rows)), rows.shape[0])
        low, high = _limits(lowest, ctx.bits, step)
        # Divided, as AMCT does: times 1/s, the very weight that gave the scale its value can fall outside of the range.
        scaled = rows.to(step.dtype) / step
        rounded = scaled.round()
        inside = (scaled >= low) & (scaled <= high)
        slope = torch.where(inside, rounded - scaled, rounded.clamp_(min=low).clamp_(max=high))
        per_scale = slope.mul_(gradients[0].to(step.dtype)).sum(dim=1).reshape(scale.numel(), -1).sum(dim=1)
        share = (rows.shape[1] * (2 ** (ctx.bits - 1) - 1)) ** -0.5
        return gradients[0], (per_scale * share).to(scale.dtype).reshape(scale.shape), None, None


class _ArqStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401, ARG004  torch's untyped context
        rows: Tensor,
        count: int,
        lowest: Tensor | None,
        bits: int,
        symmetric_scale: SymmetricScale,
    ) -> Tensor:
        scale = arq_scale(rows, bits, count, symmetric_scale).to(_wide(rows))
        return _round(rows, _per_row(scale, rows.shape[0]), lowest, bits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, ARG004  torch's untyped context
        return gradients[0], None, None, None, None


# -- From trained weights to deployed ones: what a folded batch norm does to integers and scales -----------------------
#
# A batch norm multiplies output channel c by m = gamma / sqrt(variance + epsilon). The integers of a trained weight
# stay
# as they are, the scale becomes scale · |m|, and a negative m turns their sign: quantizing the unfolded weight and
# folding afterwards is exact.


def fold_into_integers(integers: Tensor, scale: Tensor, multiplier: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The integers and scales of a trained weight behind which channels are multiplied.

    Where the multiplier is 0 the integers become 0 and the scale stays what it was, which is legal. Where the new scale
    would be illegal it becomes the nearest legal one, and the integers are rounded again.

    Args:
        integers: ``[Cout, -1]``.
        scale: ``[1]`` or ``[Cout]``.
        multiplier: ``[Cout]``.
        bits: of the integers.

    Returns:
        The integers, and the scales ``[Cout]`` in float32.
    """
    multiplier = multiplier.double()
    before = scale.double().expand(integers.shape[0])
    wanted = before * multiplier.abs()
    after = torch.where(multiplier == 0, before, wanted.clamp(SMALLEST_SCALE, LARGEST_SCALE)).float()
    ratio = torch.where(
        after.double() == wanted.float().double(), multiplier.sign(), multiplier * before / after.double()
    )
    lowest, highest = integer_range(bits)
    return (integers * ratio[:, None]).round().clamp(lowest, highest).to(integers.dtype), after
