"""ULQ: an activation quantizer whose clips are trained.

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

from amct.numerics.affine import integer_range, round_scale_to_fp16, trained_factors
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
