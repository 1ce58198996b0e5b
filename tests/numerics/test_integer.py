"""Integer convolution and product against int64 NumPy loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amct.errors import ArgumentError, ArgumentTypeError
from amct.numerics.arq import WeightKind
from amct.numerics.integer import (
    ConvolutionGeometry,
    integer_convolution,
    integer_linear,
    worst_case_accumulator,
)

INT32_MAX = 2**31 - 1


def numpy_convolution(x, weight, stride, padding, dilation, groups):
    """Sum of products in int64, tap by tap."""
    x, weight = x.astype(np.int64), weight.astype(np.int64)
    x = np.pad(x, [(0, 0), (0, 0), *[(p, p) for p in padding]])
    kernel = weight.shape[2:]
    size = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)]
    y = np.zeros((len(x), len(weight), *size), np.int64)
    outputs, inputs = len(weight) // groups, weight.shape[1]
    for group in range(groups):
        o, i = slice(group * outputs, (group + 1) * outputs), slice(group * inputs, (group + 1) * inputs)
        for tap in itertools.product(*map(range, kernel)):
            window = tuple(
                slice(t * d, t * d + s * (n - 1) + 1, s) for t, d, s, n in zip(tap, dilation, stride, size, strict=True)
            )
            y[:, o] += np.einsum("ni...,oi->no...", x[:, i][(..., *window)], weight[o][(..., *tap)])
    return y


def numpy_transposed(x, weight, stride, padding, dilation, groups, output_padding):
    """Scatter in int64, tap by tap."""
    x, weight = x.astype(np.int64), weight.astype(np.int64)
    kernel = weight.shape[2:]
    full = [
        (n - 1) * s + d * (k - 1) + 1 + o
        for n, k, s, d, o in zip(x.shape[2:], kernel, stride, dilation, output_padding, strict=True)
    ]
    inputs, outputs = len(weight) // groups, weight.shape[1]
    y = np.zeros((len(x), outputs * groups, *full), np.int64)
    for group in range(groups):
        o, i = slice(group * outputs, (group + 1) * outputs), slice(group * inputs, (group + 1) * inputs)
        for tap in itertools.product(*map(range, kernel)):
            window = tuple(
                slice(t * d, t * d + s * (n - 1) + 1, s)
                for t, d, s, n in zip(tap, dilation, stride, x.shape[2:], strict=True)
            )
            y[:, o][(..., *window)] += np.einsum("ni...,io->no...", x[:, i], weight[i][(..., *tap)])
    crop = tuple(slice(p, n - p) for p, n in zip(padding, full, strict=True))
    return y[(..., *crop)]


def integers(rng, shape, dtype):
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


GEOMETRIES = [
    pytest.param((2, 4, 9), (6, 4, 3), {"padding": 1}, id="1d"),
    pytest.param((2, 4, 9), (6, 2, 3), {"groups": 2, "dilation": 2}, id="1d-g2-dilated"),
    pytest.param((2, 6, 7, 8), (4, 6, 3, 2), {"stride": (2, 1), "padding": (1, 0)}, id="2d"),
    pytest.param((17, 6, 6, 6), (6, 1, 3, 3), {"groups": 6, "padding": 1}, id="2d-depthwise-batch17"),
    pytest.param((2, 6, 6, 6), (9, 2, 3, 3), {"groups": 3, "padding": 2, "dilation": 2}, id="2d-g3"),
    pytest.param((1, 2, 5, 5, 5), (4, 2, 3, 2, 2), {"padding": (1, 0, 1), "stride": 2}, id="3d"),
]
TRANSPOSED = [
    pytest.param((2, 4, 9), (4, 3, 3), {"stride": 2}, id="1d"),
    pytest.param((2, 4, 5, 6), (4, 3, 3, 2), {"stride": 2, "padding": (1, 0), "output_padding": (1, 1)}, id="2d"),
    pytest.param((2, 4, 5, 6), (4, 3, 3, 3), {"stride": 2, "padding": 1, "groups": 2, "dilation": 2}, id="2d-g2"),
    pytest.param((2, 4, 5, 6), (4, 1, 2, 2), {"groups": 4}, id="2d-depthwise"),
    pytest.param((1, 2, 3, 3, 3), (2, 2, 2, 2, 2), {"stride": 2}, id="3d"),
]


def per_dimension(options, name, dimensions, default):
    value = options.get(name, default)
    return (value,) * dimensions if isinstance(value, int) else value


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
@pytest.mark.parametrize("offset", [0, -128, 77])
@pytest.mark.parametrize(("shape", "weight_shape", "options"), GEOMETRIES)
def test_convolution(shape, weight_shape, options, offset, dtype):
    rng = np.random.default_rng(len(shape) + weight_shape[0])
    x, weight = integers(rng, shape, dtype), integers(rng, weight_shape, np.int8)
    bias = rng.integers(-(2**31), INT32_MAX, weight_shape[0], dtype=np.int32)
    bias[0] = INT32_MAX
    dimensions = len(shape) - 2
    arguments = [
        per_dimension(options, name, dimensions, default)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    expected = numpy_convolution(x.astype(np.int64) - offset, weight, *arguments, options.get("groups", 1))
    geometry = ConvolutionGeometry(**options)
    tensors = torch.from_numpy(x), torch.from_numpy(weight)
    result = integer_convolution(*tensors, geometry=geometry, offset=offset)
    assert result.dtype is torch.int32
    np.testing.assert_array_equal(result.numpy(), expected)
    with_bias = integer_convolution(*tensors, torch.from_numpy(bias), geometry=geometry, offset=offset)
    assert with_bias.dtype is torch.int64  # such a bias may push a sum out of int32
    np.testing.assert_array_equal(with_bias.numpy(), expected + bias.reshape(-1, *[1] * dimensions))


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
@pytest.mark.parametrize("offset", [0, -100])
@pytest.mark.parametrize(("shape", "weight_shape", "options"), TRANSPOSED)
def test_transposed_convolution(shape, weight_shape, options, offset, dtype):
    rng = np.random.default_rng(len(shape))
    x, weight = integers(rng, shape, dtype), integers(rng, weight_shape, np.int8)
    dimensions = len(shape) - 2
    arguments = [
        per_dimension(options, name, dimensions, default)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    expected = numpy_transposed(
        x.astype(np.int64) - offset,
        weight,
        *arguments,
        options.get("groups", 1),
        per_dimension(options, "output_padding", dimensions, 0),
    )
    geometry = ConvolutionGeometry(transposed=True, **options)
    result = integer_convolution(torch.from_numpy(x), torch.from_numpy(weight), geometry=geometry, offset=offset)
    np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize("inputs", [5, 6, 517, 518, 1033, 1034, 8000])
@pytest.mark.parametrize("data_type", [torch.int8, torch.int16])
def test_sums_at_the_limits_of_float32_and_int32(inputs, data_type):
    """Terms of one sign and size: int8 sums cross 2^24 after 1032 of them, int16 sums after 4 and 2^31 after 516."""
    x = torch.full((1, inputs, 1), torch.iinfo(data_type).min, dtype=data_type)
    weight = torch.full((1, inputs, 1), -127, dtype=torch.int8)
    weight[0, 0, 0] = 1  # an odd sum, which a rounded float would lose
    x[0, 0, 0] = 1
    expected = -int(torch.iinfo(data_type).min) * 127 * (inputs - 1) + 1
    result = integer_convolution(x, weight)
    assert result.item() == expected
    assert result.dtype is (torch.int32 if expected <= INT32_MAX else torch.int64)
    assert integer_linear(x[:, :, 0], weight[:, :, 0]).item() == expected


@given(length=st.integers(1, 3000), seed=st.integers(0, 99), data=st.sampled_from([np.int8, np.int16]))
def test_linear(length, seed, data):
    rng = np.random.default_rng(seed)
    x, weight = integers(rng, (3, length), data), integers(rng, (2, length), np.int8)
    bias = rng.integers(-(2**20), 2**20, 2, dtype=np.int32)
    expected = (x.astype(np.int64) + 5) @ weight.astype(np.int64).T
    result = integer_linear(torch.from_numpy(x), torch.from_numpy(weight), torch.from_numpy(bias), offset=-5)
    np.testing.assert_array_equal(result.numpy(), expected + bias)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")  # torch says so whenever its flags are read
def test_kernels_that_transform_are_never_used():
    """Without oneDNN torch hands batches of 16 and more to NNPACK, whose Winograd kernels round."""
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(0, 128, shape, dtype=np.int8) for shape in ((16, 64, 12, 12), (4, 64, 3, 3)))
    expected = numpy_convolution(x, weight, (1, 1), (1, 1), (1, 1), 1)
    geometry = ConvolutionGeometry(padding=1)
    with torch.backends.mkldnn.flags(enabled=False):
        result = integer_convolution(torch.from_numpy(x), torch.from_numpy(weight), geometry=geometry)
    np.testing.assert_array_equal(result.numpy(), expected)


def test_lowered_precision_is_not_trusted():
    torch.set_float32_matmul_precision("medium")
    try:
        x, weight = torch.full((1, 64), 1001, dtype=torch.int16), torch.full((1, 64), 127, dtype=torch.int8)
        assert integer_linear(x, weight).item() == 64 * 1001 * 127
    finally:
        torch.set_float32_matmul_precision("highest")


def test_empty_batches_stay_empty():
    weight = torch.ones(4, 2, 3, 3, dtype=torch.int8)
    assert integer_convolution(torch.zeros(0, 2, 5, 5, dtype=torch.int8), weight).shape == (0, 4, 3, 3)
    assert integer_linear(torch.zeros(0, 2, dtype=torch.int8), weight[:, :, 0, 0]).shape == (0, 4)


# ---- what would overflow


@given(seed=st.integers(0, 99), bits=st.sampled_from([8, 12, 16]), position=st.integers(0, 3))
def test_the_worst_case_is_reached_and_never_exceeded(seed, bits, position):
    rng = np.random.default_rng(seed)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    offset = (low, high, 0, 3)[position]
    weight = integers(rng, (3, 20), np.int8)
    bias = rng.integers(-(2**20), 2**20, 3, dtype=np.int32)
    found = worst_case_accumulator(
        torch.from_numpy(weight), torch.from_numpy(bias), kind=WeightKind.LINEAR, bits=bits, offset=offset
    )
    largest = np.where(weight > 0, high, low)  # the data that a row likes best
    smallest = np.where(weight > 0, low, high)
    wide = weight.astype(np.int64)
    np.testing.assert_array_equal(found.highest.numpy(), ((largest - offset) * wide).sum(1) + bias)
    np.testing.assert_array_equal(found.lowest.numpy(), ((smallest - offset) * wide).sum(1) + bias)
    data = rng.integers(low, high, (50, 20), endpoint=True).astype(np.int32)
    sums = integer_linear(torch.from_numpy(data), torch.from_numpy(weight), torch.from_numpy(bias), offset=offset)
    assert (sums.amin(0) >= found.lowest).all()
    assert (sums.amax(0) <= found.highest).all()


@pytest.mark.parametrize(("bits", "length"), [(16, 516), (12, 8256)])
def test_the_longest_reductions_that_cannot_overflow(bits, length):
    """With weights of 127 at most: 2^31 / (127 · 2^15) = 516.03 and 2^31 / (127 · 2^11) = 8256.5."""
    weight = torch.full((1, length), 127, dtype=torch.int8)
    assert worst_case_accumulator(weight, kind=WeightKind.LINEAR, bits=bits).overflowing == ()
    longer = torch.full((2, length + 1), 127, dtype=torch.int8)
    longer[0] = 1
    assert worst_case_accumulator(longer, kind=WeightKind.LINEAR, bits=bits).overflowing == (1,)


def test_the_bias_counts_and_groups_are_apart():
    weight = torch.tensor([[[[1]], [[0]]], [[[2]], [[3]]]], dtype=torch.int8)  # transposed: [Cin 2, Cout/g 2, 1, 1]
    found = worst_case_accumulator(weight, kind=WeightKind.CONV_TRANSPOSE, groups=2, bits=8)
    assert found.highest.tolist() == [127, 0, 254, 381]
    assert found.lowest.tolist() == [-128, 0, -256, -384]
    bias = torch.tensor([INT32_MAX, 0, 0, 0], dtype=torch.int32)
    with_bias = worst_case_accumulator(weight, bias, kind=WeightKind.CONV_TRANSPOSE, groups=2, bits=8)
    assert with_bias.overflowing == (0,)


# ---- mistakes


def test_wrong_types_and_shapes_are_named():
    x, weight = torch.zeros(1, 4, 5, 5, dtype=torch.int8), torch.zeros(3, 4, 3, 3, dtype=torch.int8)
    with pytest.raises(ArgumentTypeError, match=r"x: expected integers, got torch\.float32"):
        integer_convolution(x.float(), weight)
    with pytest.raises(ArgumentTypeError, match=r"weight: expected integers, got torch\.bool"):
        integer_linear(x[0, 0], weight.bool()[0, 0])
    with pytest.raises(ArgumentTypeError, match="weight: expected integers"):
        worst_case_accumulator(weight.float(), kind=WeightKind.CONV)
    with pytest.raises(ArgumentError, match=r"as many dimensions \(3..5\), got shapes \[4, 5, 5\] and"):
        integer_convolution(x[0], weight)
    with pytest.raises(ArgumentError, match=r"geometry: expected 1 or 2 numbers, got \[1, 2, 3\]"):
        integer_convolution(x, weight, geometry=ConvolutionGeometry(stride=(1, 2, 3)))
    with pytest.raises(ArgumentError, match=r"bias: expected shape \[3\], got \[2\]"):
        integer_convolution(x, weight, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ArgumentError, match=r"bias: expected shape \[3\], got \[1\]"):
        worst_case_accumulator(weight, torch.zeros(1, dtype=torch.int32), kind=WeightKind.CONV)
    with pytest.raises(ArgumentError, match=r"a weight \[Cout, Cin\], got \[5\] and \[3, 3\]"):
        integer_linear(x[0, 0, 0], weight[0, 0])


def test_sums_that_float64_cannot_hold_are_refused():
    huge = torch.full((1, 2), 2**31 - 1, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"exceed 2\^53"):
        integer_linear(huge, huge)


def test_large_samples_are_convolved_one_at_a_time_with_the_same_sums(monkeypatch):
    random = np.random.default_rng(7)
    x = torch.from_numpy(random.integers(-128, 128, (3, 4, 9, 9)).astype(np.int8))
    weight = torch.from_numpy(random.integers(-127, 128, (5, 4, 3, 3)).astype(np.int8))
    bias = torch.arange(5, dtype=torch.int32)
    whole = integer_convolution(x, weight, bias, offset=3)
    monkeypatch.setattr("amct.numerics.integer._LARGE_SAMPLE", 1)
    apart = integer_convolution(x, weight, bias, offset=3)
    assert apart.dtype == whole.dtype
    assert torch.equal(apart, whole)
