"""Scale, offset, rounding: against float64 and float32 NumPy formulas, and by laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError
from amct.numerics import affine
from amct.numerics.affine import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    SymmetricScale,
    check_factors,
    dequantize,
    fake_quantize,
    integer_range,
    is_near_zero,
    quantize,
    round_scale_to_fp16,
    scale_and_offset,
)
from amct.numerics.qparams import Observed

FULL, NEGATIVE = SymmetricScale.FULL_RANGE, SymmetricScale.NEGATIVE_SIDE
BITS = [2, 4, 7, 8, 9, 12, 15, 16]
values32 = st.floats(-1e6, 1e6, width=32)
scales32 = st.floats(2.0**-20, 2.0**10, width=32)
bits_strategy = st.sampled_from(BITS)


def numpy_quantize(x, scale, offset, bits):
    """The contract, in float32 NumPy: reciprocal first, half to even."""
    inverse = np.float32(1) / np.float32(scale)
    rounded = np.rint(np.asarray(x, np.float32) * inverse).astype(np.float64) + offset
    return np.clip(rounded, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def numpy_fake_quantize(x, scale, offset, bits):
    steps = numpy_quantize(x, scale, offset, bits) - offset
    return steps.astype(np.float32) * np.float32(scale)


def tensors(scale, offset):
    return torch.tensor(scale, dtype=torch.float32), torch.tensor(offset, dtype=torch.int32)


def test_integer_range():
    assert integer_range(2) == (-2, 1)
    assert integer_range(16) == (-32768, 32767)


@pytest.mark.parametrize("bits", [1, 17, 0, -8])
def test_bits_outside_2_to_16_are_refused(bits):
    with pytest.raises(ArgumentError, match=f"bits: expected 2..16, got {bits}"):
        integer_range(bits)


# ---- scale and offset of a range


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("policy", SymmetricScale)
@given(a=values32, b=values32)
def test_symmetric_scale_is_the_float64_formula_rounded_once(bits, policy, a, b):
    m, M = min(a, b), max(a, b)
    bound = max(abs(m), abs(M))
    divisor = 2 ** (bits - 1) if policy is NEGATIVE and abs(m) > abs(M) else 2 ** (bits - 1) - 1
    expected = np.float32(bound / divisor)
    if expected < SMALLEST_SCALE:
        expected = np.float32(1)
    scale, offset = scale_and_offset(torch.tensor(m), torch.tensor(M), bits, asymmetric=False, symmetric_scale=policy)
    assert scale.dtype is torch.float32
    assert scale.item() == expected
    assert offset.dtype is torch.int32
    assert offset.item() == 0


@pytest.mark.parametrize("bits", BITS)
@given(a=values32, b=values32)
def test_asymmetric_factors_are_the_float64_formula(bits, a, b):
    m, M = min(a, b, 0.0), max(a, b, 0.0)
    expected = np.float32((M - m) / (2**bits - 1))
    scale, offset = scale_and_offset(
        torch.tensor(min(a, b)), torch.tensor(max(a, b)), bits, asymmetric=True, symmetric_scale=FULL
    )
    lowest, highest = integer_range(bits)
    if expected < SMALLEST_SCALE:
        assert (scale.item(), offset.item()) == (1.0, lowest)
        return
    assert scale.item() == expected
    assert lowest <= offset.item() <= highest
    # offset = lowest - round(m / scale); the float32 quotient is off by at most half a unit in its last place.
    exact = lowest - m / float(expected)
    assert abs(offset.item() - exact) <= 0.5 + (2**bits) * 2.0**-24


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("policy", SymmetricScale)
@given(a=st.floats(-1e12, 1e12), b=st.floats(-1e12, 1e12), small=st.sampled_from([1.0, 1e-9, 0.0]), bits=bits_strategy)
def test_a_single_range_has_the_factors_of_a_range_among_channels(asymmetric, policy, a, b, small, bits):
    limits = small * torch.tensor([min(a, b), max(a, b)], dtype=torch.float64)
    settings = {"bits": bits, "asymmetric": asymmetric, "symmetric_scale": policy}
    try:
        channel = Observed.from_range(limits[:1], limits[1:], **settings)
    except CalibrationError:
        with pytest.raises(CalibrationError, match="too large"):
            Observed.from_range(limits[0], limits[1], **settings)
        return
    alone = Observed.from_range(limits[0], limits[1], **settings)
    for name in ("scale", "offset", "clip_min", "clip_max", "near_zero"):
        one, other = getattr(alone, name), getattr(channel, name)
        assert (one.dtype, one.ndim, one.item()) == (other.dtype, 0, other.item()), name


def test_channels_are_independent():
    minimum, maximum = torch.tensor([-1.0, 0.0, -4.0, 0.0]), torch.tensor([1.0, 3.0, 1.0, 1e-12])
    together = scale_and_offset(minimum, maximum, 8, asymmetric=True, symmetric_scale=FULL)
    for channel in range(4):
        alone = scale_and_offset(minimum[channel], maximum[channel], 8, asymmetric=True, symmetric_scale=FULL)
        assert together[0][channel] == alone[0]
        assert together[1][channel] == alone[1]


@pytest.mark.parametrize("asymmetric", [True, False])
@pytest.mark.parametrize("limits", [(0.0, 0.0), (-1e-9, 1e-9), (0.0, 1e-45), (-1e-45, 0.0)])
def test_tiny_ranges_get_scale_one(asymmetric, limits):
    minimum, maximum = map(torch.tensor, limits)
    arguments = {"asymmetric": asymmetric, "symmetric_scale": NEGATIVE}
    scale, offset = scale_and_offset(minimum, maximum, 8, **arguments)
    assert scale.item() == 1.0
    assert offset.item() == (-128 if asymmetric else 0)
    assert is_near_zero(minimum, maximum, 8, **arguments).item()


def test_a_range_is_tiny_below_epsilon_and_not_at_it():
    maximum = torch.tensor([127 * SMALLEST_SCALE, 126 * SMALLEST_SCALE])
    tiny = is_near_zero(torch.zeros(2), maximum, 8, asymmetric=False, symmetric_scale=FULL)
    assert tiny.tolist() == [False, True]
    scale, _ = scale_and_offset(torch.zeros(2), maximum, 8, asymmetric=False, symmetric_scale=FULL)
    assert scale.tolist() == [SMALLEST_SCALE, 1.0]


@pytest.mark.parametrize("asymmetric", [True, False])
@pytest.mark.parametrize(
    "limits", [(float("nan"), 1.0), (0.0, float("inf")), (float("-inf"), 0.0), (float("nan"), float("nan")), (2.0, 1.0)]
)
def test_illegal_ranges_stop_with_the_numbers(asymmetric, limits):
    minimum, maximum = map(torch.tensor, limits)
    with pytest.raises(CalibrationError, match=f"minimum {minimum.item():g}, maximum {maximum.item():g}"):
        scale_and_offset(minimum, maximum, 8, asymmetric=asymmetric, symmetric_scale=FULL)
    with pytest.raises(CalibrationError, match="range must be finite"):
        is_near_zero(minimum, maximum, 8, asymmetric=asymmetric, symmetric_scale=FULL)


def test_a_huge_outlier_stops_with_the_numbers():
    with pytest.raises(CalibrationError, match=r"channel 1: minimum -1, maximum 1e\+30, scale 3.9\S*e\+27"):
        scale_and_offset(
            torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1e30]), 8, asymmetric=True, symmetric_scale=FULL
        )


def test_many_bad_channels_are_counted_not_listed():
    with pytest.raises(CalibrationError, match="channel 4: minimum nan, maximum 1 and 3 more channels"):
        scale_and_offset(torch.full((8,), torch.nan), torch.ones(8), 8, asymmetric=True, symmetric_scale=FULL)


def test_shapes_of_the_limits_must_agree():
    with pytest.raises(ArgumentError, match=r"same shape, got \[2\] and \[\]"):
        scale_and_offset(torch.zeros(2), torch.tensor(1.0), 8, asymmetric=True, symmetric_scale=FULL)


@given(a=values32, b=values32, power=st.integers(-4, 4), bits=bits_strategy, asymmetric=st.booleans())
def test_scale_is_equivariant_under_powers_of_two(a, b, power, bits, asymmetric):
    low, high = torch.tensor(min(a, b)), torch.tensor(max(a, b))
    arguments = {"asymmetric": asymmetric, "symmetric_scale": NEGATIVE}
    factor = 2.0**power
    assume(
        not is_near_zero(low, high, bits, **arguments)
        and not is_near_zero(low * factor, high * factor, bits, **arguments)
    )
    scale, offset = scale_and_offset(low, high, bits, **arguments)
    if scale * factor > LARGEST_SCALE:
        with pytest.raises(CalibrationError, match="the range is too large"):
            scale_and_offset(low * factor, high * factor, bits, **arguments)
        return
    scaled, same_offset = scale_and_offset(low * factor, high * factor, bits, **arguments)
    assert scaled == scale * factor
    assert same_offset == offset


# ---- quantize, dequantize, fake-quantize


@given(
    x=st.lists(values32, min_size=1, max_size=40),
    scale=scales32,
    bits=bits_strategy,
    position=st.floats(0, 1, width=32),
)
def test_quantize_is_the_numpy_formula(x, scale, bits, position):
    lowest, highest = integer_range(bits)
    offset = round(lowest + position * (highest - lowest))
    result = quantize(torch.tensor(x), *tensors(scale, offset), bits)
    assert result.dtype is (torch.int8 if bits <= 8 else torch.int16)
    np.testing.assert_array_equal(result.numpy(), numpy_quantize(x, scale, offset, bits))
    back = dequantize(result, *tensors(scale, offset))
    np.testing.assert_array_equal(back.numpy(), numpy_fake_quantize(x, scale, offset, bits))
    assert torch.equal(fake_quantize(torch.tensor(x), *tensors(scale, offset), bits), back)


@pytest.mark.parametrize("bits", BITS)
def test_halves_go_to_even(bits):
    lowest, highest = integer_range(bits)
    halves = torch.arange(lowest, highest, dtype=torch.float64) + 0.5
    integers = quantize(halves.float() * 0.25, *tensors(0.25, 0), bits)
    expected = np.clip(np.rint(halves.numpy()), lowest, highest)
    np.testing.assert_array_equal(integers.numpy(), expected)
    assert not (integers[integers < highest] % 2).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8, 12, 16])
@pytest.mark.parametrize("scale", [0.1, 0.0037, 3.3e-5])
def test_fake_quantize_and_the_fused_kernels_equal_the_formula(dtype, bits, scale):
    """On every integer and every half of the range, and on the floats next to them, per tensor and per channel."""
    lowest, highest = integer_range(bits)
    grid = torch.arange(2 * lowest - 3, 2 * highest + 3, dtype=torch.float64) / 2 * float(np.float32(scale))
    exact = grid.float()
    x = torch.cat([exact, torch.nextafter(exact, exact + 1), torch.nextafter(exact, exact - 1)]).to(dtype)
    x = x[torch.isfinite(x)]
    for offset in (0, lowest, highest, -1):
        expected = torch.from_numpy(numpy_fake_quantize(x.float().numpy(), scale, offset, bits)).to(dtype)
        factors = tensors(scale, offset)
        assert torch.equal(fake_quantize(x, *factors, bits), expected)
        per_channel = [factor.repeat(3) for factor in factors]
        stacked = torch.stack([x, x, x], dim=1)
        assert torch.equal(fake_quantize(stacked, *per_channel, bits, axis=1), expected[:, None].expand(-1, 3))
        # what other devices run
        assert torch.equal(affine._fused(x, *_as_float(factors), bits, None), expected)
        fused = affine._fused(stacked, *(each.reshape(1, 3) for each in _as_float(per_channel)), bits, -1)
        assert torch.equal(fused, expected[:, None].expand(-1, 3))


def _as_float(factors):
    return [factor.float() for factor in factors]


@pytest.mark.parametrize(
    ("value", "offset", "dtype", "exact"),
    [
        (1e6, 0, torch.float32, True),
        (2.0**31 * 0.25, 0, torch.float32, False),
        (float("inf"), 0, torch.float32, False),
        (float("nan"), 0, torch.float32, False),
        (1.0, 128, torch.float32, False),
        (1.0, 0, torch.float64, False),
    ],
)
def test_fused_kernels_are_taken_only_where_they_are_exact(value, offset, dtype, exact):
    x = torch.tensor([0.0, value], dtype=dtype)
    inverse, shift = torch.tensor(4.0, dtype=dtype), torch.tensor(offset, dtype=dtype)
    assert affine._fused_is_exact(x, inverse, shift, 8) is exact
    assert not affine._fused_is_exact(x[:0], inverse, shift, 8)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_the_axis_chooses_the_channel(axis):
    x = torch.linspace(-5, 5, 3 * 4 * 5).reshape(3, 4, 5)
    channels = x.shape[axis]
    scale = torch.linspace(0.01, 0.3, channels)
    offset = torch.arange(channels, dtype=torch.int32) - 1
    whole = quantize(x, scale, offset, 8, axis=axis)
    fake = fake_quantize(x, scale, offset, 8, axis=axis)
    for channel in range(channels):
        part = x.select(axis, channel)
        integers = quantize(part, scale[channel], offset[channel], 8)
        assert torch.equal(whole.select(axis, channel), integers)
        assert torch.equal(fake.select(axis, channel), dequantize(integers, scale[channel], offset[channel]))
    assert torch.equal(dequantize(whole, scale, offset, axis=axis), fake)


def test_one_scale_may_go_with_many_offsets_and_the_reverse():
    x = torch.linspace(-3, 3, 8).reshape(4, 2)
    one_scale = fake_quantize(x, torch.tensor([0.1]), torch.tensor([0, 3], dtype=torch.int32), 8, axis=1)
    assert torch.equal(one_scale[:, 1], fake_quantize(x[:, 1], *tensors(0.1, 3), 8))
    one_offset = fake_quantize(x, torch.tensor([0.1, 0.2]), torch.tensor(3, dtype=torch.int32), 8, axis=1)
    assert torch.equal(one_offset[:, 1], fake_quantize(x[:, 1], *tensors(0.2, 3), 8))


@given(x=st.lists(values32, min_size=1, max_size=20), scale=scales32, bits=bits_strategy, offset=st.integers(-2, 1))
def test_fake_quantize_twice_is_once(x, scale, bits, offset):
    once = fake_quantize(torch.tensor(x), *tensors(scale, offset), bits)
    assert torch.equal(fake_quantize(once, *tensors(scale, offset), bits), once)


@given(x=st.lists(values32, min_size=2, max_size=40), scale=scales32, bits=bits_strategy, offset=st.integers(-2, 1))
def test_quantize_keeps_order(x, scale, bits, offset):
    integers = quantize(torch.tensor(sorted(x)), *tensors(scale, offset), bits).tolist()
    assert integers == sorted(integers)


@given(scale=scales32, bits=bits_strategy, offset=st.integers(-2, 1))
def test_zero_is_exact(scale, bits, offset):
    zero = torch.zeros(1)
    assert fake_quantize(zero, *tensors(scale, offset), bits).item() == 0.0
    assert quantize(zero, *tensors(scale, offset), bits).item() == offset


@given(x=st.lists(values32, min_size=1, max_size=20), power=st.integers(-6, 6), bits=bits_strategy)
def test_fake_quantize_is_equivariant_under_powers_of_two(x, power, bits):
    values, factor = torch.tensor(x), 2.0**power
    assume(not ((values != 0) & (values.abs() < 1e-30)).any())  # scaling must not meet denormals
    scaled = fake_quantize(values * factor, *tensors(0.37 * factor, 1), bits)
    assert torch.equal(scaled, fake_quantize(values, *tensors(0.37, 1), bits) * factor)


@given(low=st.floats(-1e4, 0, width=32), high=st.floats(0, 1e4, width=32), bits=bits_strategy, t=st.floats(0, 1))
def test_values_inside_the_range_move_by_half_a_step_at_most(low, high, bits, t):
    scale, offset = scale_and_offset(torch.tensor(low), torch.tensor(high), bits, asymmetric=True, symmetric_scale=FULL)
    x = torch.tensor(low + t * (high - low)).clamp(low, high)
    error = abs(fake_quantize(x, scale, offset, bits).double() - x.double()).item()
    # Half a step, and half a step more at the edges, where the offset itself was rounded.
    slack = 4 * 2.0**-24 * max(abs(low), abs(high))  # four float32 roundings of values of this size
    assert error <= scale.item() + slack


def test_float64_is_computed_in_float64():
    scale = torch.tensor(0.1)
    x = torch.tensor([0.1 * 2.5 + 1e-12], dtype=torch.float64)
    step = float(np.float32(0.1))
    expected = np.rint(x.numpy() * (1 / step)) * step
    result = fake_quantize(x, scale, torch.tensor(0, dtype=torch.int32), 8)
    assert result.dtype is torch.float64
    np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize("length", [1, 7, 64])  # below and above the width of a vector register
@pytest.mark.parametrize("channels", [False, True])
def test_huge_values_and_infinity_saturate(length, channels):
    huge = torch.tensor([float("inf"), 1e30, 3e38, -1e30, float("-inf"), -3e38]).repeat_interleave(length)
    factors = tensors(0.1, 3)
    if channels:
        huge, factors = torch.stack([huge, huge]), tuple(factor.repeat(2) for factor in factors)
    axis = 0 if channels else None
    expected = torch.where(huge > 0, 127, -128).to(torch.int8)
    assert torch.equal(quantize(huge, *factors, 8, axis=axis), expected)
    step = np.float32(0.1)
    fake = torch.where(huge > 0, float(124 * step), float(-131 * step))
    assert torch.equal(fake_quantize(huge, *factors, 8, axis=axis), fake)


def test_nan_stays_nan_and_has_no_integer():
    x = torch.tensor([1.0, float("nan"), float("nan")])
    result = fake_quantize(x, *tensors(0.1, 0), 8)
    assert torch.isnan(result).tolist() == [False, True, True]
    with pytest.raises(CalibrationError, match="NaN cannot be quantized: 2 of 3 values"):
        quantize(x, *tensors(0.1, 0), 8)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_empty_tensors_stay_empty(shape):
    x = torch.empty(shape)
    assert quantize(x, *tensors(0.1, 0), 8).shape == shape
    assert fake_quantize(x, *tensors(0.1, 0), 8).shape == shape
    assert dequantize(quantize(x, *tensors(0.1, 0), 8), *tensors(0.1, 0)).shape == shape


def test_denormals_become_zero():
    x = torch.tensor([1e-45, -1e-40, 1e-38])
    assert fake_quantize(x, *tensors(SMALLEST_SCALE, 0), 8).tolist() == [0.0, 0.0, 0.0]


def test_offsets_outside_the_range_follow_the_formula():
    x = torch.linspace(-30, 30, 101).reshape(1, -1)
    result = fake_quantize(
        x.repeat(2, 1), torch.tensor([0.1, 0.1]), torch.tensor([200, 200], dtype=torch.int32), 8, axis=0
    )
    np.testing.assert_array_equal(result[1].numpy(), numpy_fake_quantize(x[0].numpy(), 0.1, 200, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels", [False, True])
def test_the_gradient_passes_inside_and_stops_outside(dtype, channels):
    x = torch.linspace(-20, 20, 81, dtype=dtype).repeat(2, 1).requires_grad_()
    scale, offset = tensors(0.1, 7)
    axis = 0 if channels else None
    if channels:
        scale, offset = scale.repeat(2), offset.repeat(2)
    weights = torch.arange(x.numel(), dtype=dtype).reshape(x.shape)
    (fake_quantize(x, scale, offset, 8, axis=axis) * weights).sum().backward()
    unclamped = torch.round(x.detach() * (1 / torch.tensor(0.1, dtype=dtype))) + 7
    inside = (unclamped >= -128) & (unclamped <= 127)
    assert inside.any()
    assert not inside.all()
    assert torch.equal(x.grad, weights * inside)
    if dtype is torch.float32:
        again = x.detach().clone().requires_grad_()
        (torch.fake_quantize_per_tensor_affine(again, 0.1, 7, -128, 127) * weights).sum().backward()
        assert torch.equal(again.grad, x.grad)


def test_wrong_types_and_shapes_are_named():
    with pytest.raises(ArgumentTypeError, match=r"expected a floating-point tensor, got torch\.int8"):
        fake_quantize(torch.zeros(2, dtype=torch.int8), *tensors(0.1, 0), 8)
    with pytest.raises(ArgumentTypeError, match=r"expected integers, got torch\.float32"):
        dequantize(torch.zeros(2), *tensors(0.1, 0))
    with pytest.raises(ArgumentError, match="scale: 2 values need an axis"):
        quantize(torch.zeros(2), torch.ones(2), torch.tensor(0), 8)
    with pytest.raises(ArgumentError, match=r"scale: 2 values do not fit axis 1 of shape \[2, 3\]"):
        quantize(torch.zeros(2, 3), torch.ones(2), torch.tensor(0), 8, axis=1)
    with pytest.raises(ArgumentError, match=r"offset: 3 values do not fit axis 5"):
        quantize(torch.zeros(2, 3), torch.ones(1), torch.zeros(3, dtype=torch.int32), 8, axis=5)


# ---- legality and half precision


def test_legal_factors_pass_and_illegal_ones_are_named():
    offset = torch.zeros(2, dtype=torch.int32)
    check_factors(torch.tensor([SMALLEST_SCALE, LARGEST_SCALE]), offset, 8)
    for bad in (0.0, -1.0, SMALLEST_SCALE / 2, LARGEST_SCALE * 2, float("nan"), float("inf")):
        with pytest.raises(CalibrationError, match=r"scale is illegal.*channel 1: scale"):
            check_factors(torch.tensor([1.0, bad]), offset, 8)
    with pytest.raises(CalibrationError, match=r"offset is illegal: expected -128..127, got offset 128"):
        check_factors(torch.tensor(1.0), torch.tensor(128), 8)
    with pytest.raises(CalibrationError, match=r"offset is illegal: .*got offset -129"):
        check_factors(torch.tensor(1.0), torch.tensor(-129), 8)


@given(st.floats(2.0**-14, 65504, width=32))
def test_fp16_scale_is_the_nearest_half(scale):
    assert round_scale_to_fp16(torch.tensor(scale)).item() == float(np.float16(scale))


@given(st.one_of(st.floats(SMALLEST_SCALE, 2.0**-14, width=32, exclude_max=True), st.floats(65505, LARGEST_SCALE)))
def test_fp16_scale_outside_half_goes_through_its_root(scale):
    root = np.float16(np.sqrt(np.float32(scale)))
    result = round_scale_to_fp16(torch.tensor(scale, dtype=torch.float32)).item()
    assert result == float(root) ** 2
    assert abs(result - scale) <= scale * 1.01 * 2.0**-10  # the root is within 2^-11, its square within twice that


def test_fp16_scale_of_the_reference():
    """AMCT's scale_d of ResNet-20 conv1, layer1.0.conv1, layer1.0.conv2: default and FORCE_FP16_QUANT records."""
    default = torch.tensor([0.018658448, 0.018855521, 0.0156089505])
    forced = torch.tensor([0.018661499, 0.018859863, 0.015609741])
    assert torch.allclose(round_scale_to_fp16(default), forced, rtol=1e-7, atol=0)
