"""Affine quantization: the one definition of scale and offset, quantize, dequantize and fake-quantize.

``q = clamp(round(x · (1/scale)) + offset, -2^(b-1), 2^(b-1)-1)`` and ``x' = (q - offset) · scale``; halves are rounded
to even. The reciprocal is computed first, because the Ascend hardware multiplies by it. Float64 values are computed in
float64, all others in float32. Scales are float32, offsets int32, both 0-d, or ``[C]`` together with an ``axis``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError

SMALLEST_BITS = 2
LARGEST_BITS = 16
SMALLEST_SCALE = float(torch.finfo(torch.float32).eps)
"""A smaller scale means that the data is practically zero; such a scale is replaced by 1."""
LARGEST_SCALE = 1.0 / SMALLEST_SCALE

_FUSED_LIMIT = 2.0**31
_SHOWN_CHANNELS = 5


class SymmetricScale(Enum):
    """The divisor that turns the largest magnitude of a symmetric range into its scale."""

    FULL_RANGE = "full_range"
    """Always 2^(b-1)-1 (AMCT for Caffe)."""
    NEGATIVE_SIDE = "negative_side"
    """2^(b-1) where ``|minimum| > |maximum|``, else 2^(b-1)-1 (AMCT for PyTorch)."""


def integer_range(bits: int) -> tuple[int, int]:
    """Return the smallest and the largest signed integer of ``bits`` bits.

    >>> integer_range(8)
    (-128, 127)
    """
    if not SMALLEST_BITS <= bits <= LARGEST_BITS:
        raise ArgumentError(f"bits: expected {SMALLEST_BITS}..{LARGEST_BITS}, got {bits}")
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def scale_and_offset(
    minimum: Tensor, maximum: Tensor, bits: int, *, asymmetric: bool, symmetric_scale: SymmetricScale
) -> tuple[Tensor, Tensor]:
    """Return the scale (float32) and offset (int32) that cover the range ``minimum``..``maximum``.

    An asymmetric range is widened to contain zero, so zero is always exact. A range whose scale would be below
    ``SMALLEST_SCALE`` gets scale 1 and offset -2^(b-1) (asymmetric) or 0; see ``is_near_zero``.

    Args:
        minimum: smallest value, 0-d or ``[C]``.
        maximum: largest value, of the same shape.
        bits: 2..16.
        asymmetric: whether to compute an offset; otherwise the offset is 0.
        symmetric_scale: divisor of a symmetric range; not used when asymmetric.

    Raises:
        CalibrationError: a limit is NaN or infinite, the range is empty, or its scale exceeds ``LARGEST_SCALE``.
    """
    minimum, maximum = _checked_range(minimum, maximum)
    scale = _raw_scale(minimum, maximum, bits, asymmetric, symmetric_scale)
    too_large = scale > LARGEST_SCALE
    if bool(too_large.any()):
        raise CalibrationError(
            f"the range is too large for {bits} bits: the scale must not exceed {LARGEST_SCALE:g}, got "
            f"{_describe(too_large, minimum=minimum, maximum=maximum, scale=scale)}; "
            "look for a diverged layer or an outlier in the data, or leave this layer in float"
        )
    return _legal_factors(scale, minimum, bits, asymmetric=asymmetric)


def scalar_factors(
    minimum: float, maximum: float, bits: int, *, asymmetric: bool, symmetric_scale: SymmetricScale
) -> tuple[np.float32, int, bool] | None:
    """``scale_and_offset`` and ``is_near_zero`` of one range, in a tenth of the time that tensors of one number take.

    Returns:
        None where ``scale_and_offset`` raises.
    """
    if not (isfinite(minimum) and isfinite(maximum) and minimum <= maximum):
        return None
    lowest, highest = integer_range(bits)
    below = min(minimum, 0.0)
    if asymmetric:
        exact = (max(maximum, 0.0) - below) / (highest - lowest)
    else:
        is_negative = symmetric_scale is SymmetricScale.NEGATIVE_SIDE and abs(minimum) > abs(maximum)
        exact = max(abs(minimum), abs(maximum)) / (-lowest if is_negative else highest)
    if exact >= LARGEST_SCALE:
        return None
    scale = np.float32(exact)
    if scale < SMALLEST_SCALE:
        return np.float32(1), lowest if asymmetric else 0, True
    return scale, lowest - int(np.rint(np.float32(below) / scale)) if asymmetric else 0, False


def trained_factors(
    minimum: Tensor,
    maximum: Tensor,
    bits: int,
    *,
    asymmetric: bool,
    symmetric_scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE,
) -> tuple[Tensor, Tensor]:
    """``scale_and_offset`` without the checks, which would make every training step wait.

    What is trained is checked elsewhere; NaN gives a scale of NaN.
    """
    minimum, maximum = minimum.detach().double(), maximum.detach().double()
    scale = _raw_scale(minimum, maximum, bits, asymmetric, symmetric_scale)
    return _legal_factors(scale, minimum, bits, asymmetric=asymmetric)


def _legal_factors(scale: Tensor, minimum: Tensor, bits: int, *, asymmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and offset from the scale of a range and its lower end; a scale of practically nothing becomes 1."""
    lowest, _ = integer_range(bits)
    near_zero = scale < SMALLEST_SCALE
    scale = torch.where(near_zero, torch.ones_like(scale), scale)
    if not asymmetric:
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    steps_below_zero = torch.round(minimum.clamp(max=0).float() / scale)
    offset = torch.where(near_zero, torch.full_like(scale, lowest), lowest - steps_below_zero)
    return scale, offset.to(torch.int32)


def is_near_zero(
    minimum: Tensor, maximum: Tensor, bits: int, *, asymmetric: bool, symmetric_scale: SymmetricScale
) -> Tensor:
    """Return True where a range is so small that ``scale_and_offset`` falls back to scale 1; callers warn then."""
    integer_range(bits)
    return _raw_scale(*_checked_range(minimum, maximum), bits, asymmetric, symmetric_scale) < SMALLEST_SCALE


def _raw_scale(
    minimum: Tensor, maximum: Tensor, bits: int, asymmetric: bool, symmetric_scale: SymmetricScale
) -> Tensor:
    """Return the scale before any legality check: float64 limits divided in float64, rounded once to float32."""
    lowest, highest = integer_range(bits)
    if asymmetric:
        return ((maximum.clamp(min=0) - minimum.clamp(max=0)) / (highest - lowest)).float()
    bound = torch.maximum(maximum.abs(), minimum.abs())
    scale = bound / highest
    if symmetric_scale is SymmetricScale.NEGATIVE_SIDE:
        scale = torch.where(minimum.abs() > maximum.abs(), bound / -lowest, scale)
    return scale.float()


def _checked_range(minimum: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Return both limits in float64, after checking that they are finite and ``minimum <= maximum``."""
    if minimum.shape != maximum.shape:
        raise ArgumentError(
            f"minimum and maximum must have the same shape, got {list(minimum.shape)} and {list(maximum.shape)}"
        )
    minimum, maximum = minimum.detach().double(), maximum.detach().double()
    bad = ~(torch.isfinite(minimum) & torch.isfinite(maximum)) | (minimum > maximum)
    if bool(bad.any()):
        raise CalibrationError(
            "a range must be finite with minimum <= maximum, got "
            f"{_describe(bad, minimum=minimum, maximum=maximum)}; the data holds NaN or infinity, or is empty"
        )
    return minimum, maximum


def _describe(where: Tensor, **values: Tensor) -> str:
    """Format ``values`` of the first channels marked in ``where``, for an error message."""

    def numbers(channel: int) -> str:
        return ", ".join(f"{name} {value.reshape(-1)[channel].item():g}" for name, value in values.items())

    if where.ndim == 0:
        return numbers(0)
    channels = where.reshape(-1).nonzero().reshape(-1).tolist()
    shown = [f"channel {channel}: {numbers(channel)}" for channel in channels[:_SHOWN_CHANNELS]]
    rest = len(channels) - len(shown)
    return "; ".join(shown) + (f" and {rest} more channels" if rest else "")


def check_factors(scale: Tensor, offset: Tensor, bits: int) -> None:
    """Raise unless every scale lies in FLT_EPSILON..1/FLT_EPSILON and every offset in the integers of ``bits``.

    Raises:
        CalibrationError: an illegal scale or offset; the message names the first illegal channels.
    """
    lowest, highest = integer_range(bits)
    illegal = ~((scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE))
    if bool(illegal.any()):
        raise CalibrationError(
            f"scale is illegal: expected {SMALLEST_SCALE:g}..{LARGEST_SCALE:g}, got {_describe(illegal, scale=scale)}"
        )
    illegal = (offset < lowest) | (offset > highest)
    if bool(illegal.any()):
        raise CalibrationError(
            f"offset is illegal: expected {lowest}..{highest}, got {_describe(illegal, offset=offset)}"
        )


def quantize(x: Tensor, scale: Tensor, offset: Tensor, bits: int, *, axis: int | None = None) -> Tensor:
    """Quantize ``x`` to int8 (up to 8 bits) or int16. Infinity saturates.

    Raises:
        CalibrationError: ``x`` holds NaN, which cannot be quantized.
    """
    integer_range(bits)
    _check_floating(x)
    inverse, _, shift = _broadcast(x, scale, offset, axis)
    steps = (x.detach().to(inverse.dtype) * inverse).round_()
    grid = _clamp_steps(steps, shift, bits).add_(shift)
    if bool(torch.isnan(grid.sum())):  # clamped values are finite, so their sum is NaN only if one of them is
        raise CalibrationError(
            f"NaN cannot be quantized: {int(torch.isnan(x).sum())} of {x.numel()} values are NaN; "
            "look for the layer where they first appear"
        )
    return grid.to(torch.int8 if bits <= 8 else torch.int16)


def dequantize(q: Tensor, scale: Tensor, offset: Tensor, *, axis: int | None = None) -> Tensor:
    """Return ``(q - offset) · scale`` in float32 (float64 when the scale is float64)."""
    if q.dtype.is_floating_point:
        raise ArgumentTypeError(f"q: expected integers, got {q.dtype}")
    _, step, shift = _broadcast(q, scale, offset, axis)
    if q.dtype.itemsize < 4:  # a difference of small integers is exact in float32: no further tensor is needed
        return q.to(step.dtype).sub_(shift.to(step.dtype)).mul_(step)
    return (q.to(torch.int64) - shift.to(torch.int64)).to(step.dtype).mul_(step)  # it may overflow int32


def fake_quantize(x: Tensor, scale: Tensor, offset: Tensor, bits: int, *, axis: int | None = None) -> Tensor:
    """Quantize and dequantize ``x``, in the dtype of ``x``; NaN stays NaN.

    Straight-through gradient: 1 inside the integer range, 0 outside.

    On the CPU four vectorized in-place passes take less than half the time of torch's fused kernels, so the fused
    kernels are used on other devices only. They compute the same ``nearbyint(x · inverse) + offset`` in float32, but
    convert it to an integer before clamping, so results are bit-exact only while every ``|x| / scale`` is below 2^31.
    """
    integer_range(bits)
    _check_floating(x)
    inverse, step, shift = _broadcast(x, scale, offset, axis)
    if x.device.type != "cpu" and _fused_is_exact(x, inverse, shift, bits):
        return _fused(x, step, shift, bits, axis)
    result: Tensor = _FakeQuantize.apply(x, inverse, step, shift, bits)  # type: ignore[no-untyped-call]
    return result


class _FakeQuantize(torch.autograd.Function):
    """The formula of ``fake_quantize``, with the gradient of torch's fused kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: Tensor, step: Tensor, shift: Tensor, bits: int) -> Tensor:  # noqa: ANN401  torch's untyped context
        steps = (x.to(inverse.dtype) * inverse).round_()
        if ctx.needs_input_grad[0]:
            lowest, highest = integer_range(bits)
            ctx.save_for_backward((steps >= lowest - shift) & (steps <= highest - shift))
        return _clamp_steps(steps, shift, bits).mul_(step).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  torch's untyped context
        (inside,) = ctx.saved_tensors
        return gradients[0] * inside, None, None, None, None


def _clamp_steps(steps: Tensor, shift: Tensor, bits: int) -> Tensor:
    """Clamp ``steps`` in place so that ``steps + shift`` lies in the integers of ``bits``."""
    lowest, highest = integer_range(bits)
    if shift.ndim == 0:  # clamping by Python numbers is faster than by tensors
        return steps.clamp_(lowest - float(shift), highest - float(shift))
    return steps.clamp_(lowest - shift, highest - shift)


def _fused(x: Tensor, step: Tensor, shift: Tensor, bits: int, axis: int | None) -> Tensor:
    lowest, highest = integer_range(bits)
    if step.ndim == 0:
        return torch.fake_quantize_per_tensor_affine(x, step, shift.to(torch.int32), lowest, highest)
    assert axis is not None  # _broadcast refuses several factors without one
    return torch.fake_quantize_per_channel_affine(
        x, step.reshape(-1), shift.to(torch.int32).reshape(-1), axis % x.ndim, lowest, highest
    )


def _fused_is_exact(x: Tensor, inverse: Tensor, shift: Tensor, bits: int) -> bool:
    if inverse.dtype is not torch.float32 or x.numel() == 0:
        return False
    lowest, highest = integer_range(bits)
    if not lowest <= float(shift.min()) <= float(shift.max()) <= highest:
        return False  # torch's per-channel kernel raises for such offsets
    minimum, maximum = torch.aminmax(x.detach())
    largest = max(abs(float(minimum)), abs(float(maximum))) * float(inverse.abs().max())
    return largest < _FUSED_LIMIT  # False for NaN too


def _check_floating(x: Tensor) -> None:
    if not x.dtype.is_floating_point:
        raise ArgumentTypeError(f"x: expected a floating-point tensor, got {x.dtype}")


def _broadcast(x: Tensor, scale: Tensor, offset: Tensor, axis: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1/scale, scale and offset as float tensors that broadcast against ``x``."""
    wide = torch.float64 in (x.dtype, scale.dtype) and x.dtype not in (torch.float32, torch.float16, torch.bfloat16)
    dtype = torch.float64 if wide else torch.float32
    step = _align_to_axis(scale.detach(), x, axis, "scale").to(dtype)
    shift = _align_to_axis(offset.detach(), x, axis, "offset").to(dtype)
    shape = step.shape if step.ndim else shift.shape
    step, shift = step.expand(shape), shift.expand(shape)
    return step.reciprocal(), step, shift


def _align_to_axis(factor: Tensor, x: Tensor, axis: int | None, name: str) -> Tensor:
    """Reshape one factor to 0-d, or several so that they broadcast along ``axis`` of ``x``."""
    if factor.numel() == 1:
        return factor.reshape(())
    if axis is None:
        raise ArgumentError(f"{name}: {factor.numel()} values need an axis, got axis=None")
    if not -x.ndim <= axis < x.ndim or x.shape[axis] != factor.numel():
        raise ArgumentError(f"{name}: {factor.numel()} values do not fit axis {axis} of shape {list(x.shape)}")
    shape = [1] * x.ndim
    shape[axis] = factor.numel()
    return factor.reshape(shape)


def round_scale_to_fp16(scale: Tensor) -> Tensor:
    """Round the scale to a float16 value, returned as float32 (``FORCE_FP16_QUANT``).

    Outside float16's normal numbers (2^-14..65504) the square root is rounded to float16 and squared again, which is
    exact in float32 (22 mantissa bits).
    """
    limits = torch.finfo(torch.float16)
    scale = scale.detach().float()
    through_root = scale.sqrt().half().float().square()
    outside = (scale > limits.max) | (scale < limits.smallest_normal)
    return torch.where(outside, through_root, scale.half().float())


@dataclass(frozen=True)
class BiasFit:
    """Weight scales with which every bias fits int32, and the channels (indices into the scale) that were raised."""

    scale_weight: Tensor
    raised: tuple[int, ...]


def quantize_bias(bias: Tensor, scale_weight: Tensor, scale_data: Tensor) -> Tensor:
    """Quantize the bias to int32 in steps of ``scale_weight · scale_data`` (computed in float64).

    Args:
        bias: ``[Cout]``.
        scale_weight: ``[1]`` or ``[Cout]``.
        scale_data: one value.

    Raises:
        CalibrationError: a bias is not finite or exceeds int32; ``fit_bias`` finds scales that avoid the latter.
    """
    grid = _bias_grid(bias, scale_weight, scale_data)
    limits = torch.iinfo(torch.int32)
    outside = (grid < limits.min) | (grid > limits.max)
    if bool(outside.any()):
        step = (scale_weight.double() * scale_data.double()).expand_as(grid)
        raise CalibrationError(
            f"the bias does not fit int32 ({limits.min}..{limits.max}): "
            f"{_describe(outside, bias=bias, scale=step, integer=grid)}; "
            "raise the weight scale or leave this layer in float"
        )
    return grid.to(torch.int32)


def fit_bias(bias: Tensor, scale_weight: Tensor, scale_data: Tensor) -> BiasFit:
    """Raise weight scales, where needed, just enough for the bias to fit int32 (AMCT's rule for Caffe).

    One scale for all channels is raised for the largest bias. The caller quantizes the weights with the new scale and
    logs a warning that names the layer.

    Raises:
        CalibrationError: a bias is not finite, or the raised scale would exceed ``LARGEST_SCALE``.
    """
    grid = _bias_grid(bias, scale_weight, scale_data)
    limits = torch.iinfo(torch.int32)
    needed = (bias.detach().double().abs() / scale_data.double().reshape(())) / limits.max
    excess = (grid < limits.min) | (grid > limits.max)
    if scale_weight.numel() == 1:
        needed, excess = needed.amax().reshape(scale_weight.shape), excess.any().reshape(scale_weight.shape)
    rounded_up = torch.nextafter(needed.float(), torch.tensor(torch.inf, device=needed.device))
    scale = torch.where(excess, rounded_up, scale_weight)
    too_large = excess & ~(scale <= LARGEST_SCALE)
    if bool(too_large.any()):
        raise CalibrationError(
            f"the bias needs a weight scale above {LARGEST_SCALE:g} to fit int32: {_describe(too_large, scale=scale)}; "
            "leave this layer in float"
        )
    return BiasFit(scale, tuple(excess.reshape(-1).nonzero().reshape(-1).tolist()))


def fine_where_empty(scale_weight: Tensor, empty: Tensor, bias: Tensor, scale_data: Tensor) -> Tensor:
    """Choose the scale of channels without any weight for their bias: in steps as fine as float32.

    Any scale is right for weights that are all zero; the steps of the usual 1 are far too large for a bias.

    Args:
        scale_weight: ``[1]`` or ``[Cout]``.
        empty: ``[Cout]``: whether all weights of a channel are zero.
        bias: ``[Cout]``.
        scale_data: one value.
    """
    size = bias.detach().float().abs()
    if scale_weight.numel() == 1:
        empty, size = empty.all().reshape(scale_weight.shape), size.amax().reshape(scale_weight.shape)
    wanted = size / (scale_data.reshape(()) * 2.0**23)
    return torch.where(empty & (wanted >= torch.finfo(torch.float32).smallest_normal), wanted, scale_weight)


def _bias_grid(bias: Tensor, scale_weight: Tensor, scale_data: Tensor) -> Tensor:
    """Return the bias in rounded steps, float64 ``[Cout]``, not yet limited to int32."""
    if bias.ndim != 1 or scale_weight.numel() not in (1, bias.numel()) or scale_data.numel() != 1:
        raise ArgumentError(
            "expected a bias [Cout], 1 or Cout weight scales and 1 data scale, got a bias of shape "
            f"{list(bias.shape)}, {scale_weight.numel()} and {scale_data.numel()} scales"
        )
    not_finite = ~torch.isfinite(bias.detach())
    if bool(not_finite.any()):
        raise CalibrationError(f"the bias must be finite, got {_describe(not_finite, bias=bias)}")
    step = scale_weight.detach().double().reshape(-1) * scale_data.detach().double().reshape(())
    return torch.round(bias.detach().double() / step)
