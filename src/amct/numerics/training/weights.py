"""Weight quantizers with gradients: a learned step (``ulq_retrain``), and ARQ anew in every step (``arq_retrain``).

Both have one scale per tensor or per output channel and no offset. Where a following batch norm will turn the sign of
a channel, the lowest integer must not be used: -128 would become +128. ``lowest`` tells the lowest integer by channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amct.errors import ArgumentError
from amct.numerics.affine import LARGEST_SCALE, SMALLEST_SCALE, SymmetricScale, integer_range, trained_factors
from amct.numerics.arq import channels_first, from_channels_first
from amct.numerics.training import kernels
from amct.numerics.weight_kind import WeightKind


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


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
