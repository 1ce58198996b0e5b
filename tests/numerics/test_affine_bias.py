"""Biases as int32, and the scale that makes them fit."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amct.errors import ArgumentError, CalibrationError
from amct.numerics.affine import LARGEST_SCALE, fit_bias, quantize_bias

INT32_MAX = 2**31 - 1
scales = st.floats(2.0**-20, 4.0, width=32)


@given(bias=st.lists(st.floats(-(2.0**-10), 2.0**-10, width=32), min_size=1, max_size=9), weight=scales, data=scales)
def test_bias_is_the_float64_formula(bias, weight, data):
    result = quantize_bias(torch.tensor(bias), torch.tensor(weight), torch.tensor(data))
    assert result.dtype is torch.int32
    np.testing.assert_array_equal(result.numpy(), np.rint(np.asarray(bias, np.float64) / (weight * data)))


def test_bias_takes_one_scale_per_channel_and_half_precision():
    bias = torch.tensor([0.5, -0.75], dtype=torch.float16)
    result = quantize_bias(bias, torch.tensor([0.25, 0.5]), torch.tensor(0.5))
    assert result.tolist() == [4, -3]


def test_halves_go_to_even():
    result = quantize_bias(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]), torch.tensor(1.0), torch.tensor(1.0))
    assert result.tolist() == [0, 2, 2, 0, -2]


def test_int32_limits_are_exact():
    step = torch.tensor(1.0, dtype=torch.float64)
    limits = torch.tensor([INT32_MAX, -(2**31)], dtype=torch.float64)
    assert quantize_bias(limits, step, step).tolist() == [INT32_MAX, -(2**31)]
    with pytest.raises(CalibrationError, match=r"channel 0: bias 2.14748e\+09, scale 1, integer 2.14748e\+09"):
        quantize_bias(limits[:1] + 1, step, step)


def test_a_bias_outside_int32_names_channel_and_value():
    with pytest.raises(CalibrationError, match=r"does not fit int32.*channel 1: bias 3000"):
        quantize_bias(torch.tensor([1.0, 3000.0]), torch.tensor([1e-3, 1e-3]), torch.tensor(1e-4))


@pytest.mark.parametrize("function", [quantize_bias, fit_bias])
def test_illegal_biases_are_refused(function):
    with pytest.raises(CalibrationError, match="must be finite, got channel 1: bias nan"):
        function(torch.tensor([1.0, float("nan")]), torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(ArgumentError, match=r"bias of shape \[2\], 3 and 1 scales"):
        function(torch.zeros(2), torch.ones(3), torch.tensor(1.0))
    with pytest.raises(ArgumentError, match=r"bias of shape \[2, 1\]"):
        function(torch.zeros(2, 1), torch.ones(1), torch.tensor(1.0))


@given(bias=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9), weight=scales, data=scales)
def test_fitted_scales_fit_and_are_the_smallest(bias, weight, data):
    values, scale, data_scale = torch.tensor(bias), torch.full((len(bias),), weight), torch.tensor(data)
    fit = fit_bias(values, scale, data_scale)
    integers = quantize_bias(values, fit.scale_weight, data_scale).double()
    for channel in range(len(bias)):
        if channel not in fit.raised:
            assert fit.scale_weight[channel] == scale[channel]
            continue
        with pytest.raises(CalibrationError, match="does not fit"):
            quantize_bias(values[channel : channel + 1], scale[channel], data_scale)
        # The raised scale is at most two float32 steps above the exact bound, so the bias nearly fills int32.
        assert abs(integers[channel]) >= INT32_MAX * (1 - 2 * 2.0**-23)


def test_one_scale_is_raised_for_the_largest_bias():
    bias = torch.tensor([1e9, -3e9, 0.0])
    fit = fit_bias(bias, torch.tensor([1e-3]), torch.tensor(1e-2))
    assert fit.raised == (0,)
    assert fit.scale_weight.shape == (1,)
    assert abs(quantize_bias(bias, fit.scale_weight, torch.tensor(1e-2))[1]) > 0.99 * INT32_MAX


def test_a_hopeless_bias_stops():
    with pytest.raises(CalibrationError, match=re.escape(f"above {LARGEST_SCALE:g} to fit int32: channel 0: scale")):
        fit_bias(torch.tensor([1e30]), torch.tensor([1e-3]), torch.tensor(1e-2))
