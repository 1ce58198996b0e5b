"""Rounding whose errors cancel: the laws it keeps, for any weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amct.errors import CalibrationError
from amct.numerics.arq import WeightKind
from amct.numerics.qparams import QParams
from amct.numerics.rounding import quantize_weight_cancelling_errors, round_cancelling_errors

shapes = st.sampled_from([(3, 5), (1, 1), (4, 3, 3, 3), (6, 1, 5, 5), (2, 7, 4)])


def steps(shape, seed, bits):
    """Weights in steps of their scale, all inside the range."""
    limit = 2 ** (bits - 1) - 1
    return torch.tensor(np.random.default_rng(seed).uniform(-limit, limit, shape))


@given(shape=shapes, seed=st.integers(0, 2**16), bits=st.sampled_from([4, 7, 8]))
def test_no_weight_is_off_by_a_step_and_the_errors_of_an_output_sum_up_to_half_a_step(shape, seed, bits):
    exact = steps(shape, seed, bits)
    scale = torch.linspace(0.1, 2, shape[0], dtype=torch.float64)
    weight = exact * scale.reshape(-1, *[1] * (len(shape) - 1))
    integers = round_cancelling_errors(weight, scale, bits)
    assert integers.dtype is torch.int8
    assert integers.shape == weight.shape
    error = integers.double() - weight / scale.reshape(-1, *[1] * (len(shape) - 1))
    assert float(error.abs().max()) < 1
    assert float(error.reshape(shape[0], -1).sum(1).abs().max()) <= 0.5 + 1e-9
    if len(shape) > 2:  # half a step from the kernel, one more where the output needed it
        assert float(error.flatten(2).sum(2).abs().max()) <= 1.5 + 1e-9


@given(shape=shapes, seed=st.integers(0, 2**16))
def test_integers_stay_as_they_are(shape, seed):
    exact = steps(shape, seed, 7).round()
    assert torch.equal(round_cancelling_errors(exact, torch.ones(1), 7).double(), exact)


@given(seed=st.integers(0, 2**16), halves=st.booleans(), bounded=st.booleans(), count=st.integers(1, 9))
def test_a_kernel_of_one_position_is_rounded_as_a_matrix(seed, halves, bounded, count):
    """Neighbours that are large enough to be bounded, and ties, are among the weights."""
    exact = steps((5, count), seed, 8)
    matrix = (exact * 2).round() / 2 if halves else exact
    scale = torch.tensor([1.0])
    wanted = round_cancelling_errors(matrix, scale, 8, bounded_pairs=bounded)
    kernel = round_cancelling_errors(matrix[:, :, None, None], scale, 8, bounded_pairs=bounded)
    assert torch.equal(kernel[:, :, 0, 0], wanted)


def test_the_weights_nearest_to_a_half_are_turned_round():
    weight = torch.tensor([[0.4, 0.45, 0.3, 1.0]])
    assert round_cancelling_errors(weight, torch.ones(1), 8).tolist() == [[0, 1, 0, 1]]
    assert round_cancelling_errors(-weight, torch.ones(1), 8).tolist() == [[0, -1, 0, -1]]


def test_what_lies_outside_is_clipped_and_others_do_not_pay_for_it():
    weight = torch.tensor([[100.0, 3.2, -90.0, 1.1]])
    assert round_cancelling_errors(weight, torch.ones(1), 7).tolist() == [[63, 3, -64, 1]]


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5)])
def test_a_smooth_picture_is_filtered_more_exactly_than_with_nearest(kernel):
    """The gain for a constant input, which decides how bright the output is: error of the sums, in steps."""
    exact = steps((64, 1, *kernel), 3, 7)
    nearest = (exact.round() - exact).flatten(1).sum(1).square().mean()
    evenly = (round_cancelling_errors(exact, torch.ones(64), 7) - exact).flatten(1).sum(1).square().mean()
    # Sums of n independent errors have the variance n/12; those here are what is left of one.
    assert float(nearest) > 5 * float(evenly)


@pytest.mark.parametrize("groups", [1, 2])
def test_weights_of_transposed_convolutions_are_rounded_output_by_output(groups):
    """[Cin, Cout / groups, ...]: moved to outputs first, rounded, and moved back."""
    weight = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    scale = torch.linspace(0.01, 0.03, 4 * groups)
    factors = QParams.symmetric(scale)
    found = quantize_weight_cancelling_errors(weight, factors, WeightKind.CONV_TRANSPOSE, groups=groups)
    inputs = 6 // groups
    for group in range(groups):
        for output in range(4):
            part = slice(group * inputs, (group + 1) * inputs)
            wanted = round_cancelling_errors(weight[None, part, output], scale[group * 4 + output, None], 8)
            assert torch.equal(found[part, output], wanted[0])


def test_linear_weights_with_one_scale():
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    scale = torch.tensor([0.02])
    factors = QParams.symmetric(scale)
    found = quantize_weight_cancelling_errors(weight, factors, WeightKind.LINEAR)
    assert torch.equal(found, round_cancelling_errors(weight, scale, 8))


def test_a_grid_with_an_offset_takes_the_nearest():
    weight = torch.tensor([[0.4, 0.45, 0.3, 1.0]])
    factors = QParams.of([1.0], [1])
    assert quantize_weight_cancelling_errors(weight, factors, WeightKind.LINEAR).tolist() == [[1, 1, 1, 2]]


def test_nan_is_refused():
    factors = QParams.of([1.0])
    with pytest.raises(CalibrationError, match="NaN cannot be quantized"):
        quantize_weight_cancelling_errors(torch.full((2, 2), torch.nan), factors, WeightKind.LINEAR)
