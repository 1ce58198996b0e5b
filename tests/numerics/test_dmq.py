"""DMQ against NumPy, the reference's records, and running the balanced layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from amct.errors import ArgumentError, CalibrationError
from amct.numerics.arq import WeightKind, arq
from amct.numerics.balancing import (
    activation_maximum,
    balance_activation,
    balance_factors,
    balance_weight,
    dmq,
    input_channel_maximum,
)

CONV, TRANSPOSE, LINEAR, RNN = WeightKind.CONV, WeightKind.CONV_TRANSPOSE, WeightKind.LINEAR, WeightKind.RNN
maxima = st.lists(st.floats(2.0**-10, 2.0**10, width=32), min_size=1, max_size=8)


@given(pairs=st.lists(st.tuples(*[st.floats(2.0**-10, 2.0**10, width=32)] * 2), min_size=1), strength=st.floats(0, 1))
def test_regular_channels_follow_the_formula(pairs, strength):
    activation, weight = np.array(pairs, np.float64).T
    factors = balance_factors(torch.tensor(activation), torch.tensor(weight), strength)
    assert factors.dtype is torch.float32
    np.testing.assert_array_equal(factors.numpy(), (activation**strength / weight ** (1 - strength)).astype(np.float32))


def test_half_strength_makes_both_sides_equal():
    activation, weight = torch.tensor([8.0, 0.5]), torch.tensor([0.5, 2.0])
    factors = balance_factors(activation, weight, 0.5)
    assert torch.allclose(activation / factors, weight * factors)
    assert factors.tolist() == [4.0, 0.5]


def test_every_kind_of_zero():
    """Channels: regular, regular, no activation, no weight, neither."""
    activation = np.array([4.0, 9.0, 0.0, 5.0, 0.0])
    weight = np.array([1.0, 4.0, 0.25, 0.0, 1e-9])
    factors = balance_factors(torch.tensor(activation), torch.tensor(weight), 0.5).numpy()
    regular = np.sqrt(activation[:2] / weight[:2])
    expected = [*regular, (weight[:2] * regular).max() / 0.25, 5.0 / (activation[:2] / regular).max(), 1.0]
    np.testing.assert_allclose(factors, expected, rtol=1e-7)
    assert weight[2] * factors[2] == pytest.approx((weight[:2] * regular).max())
    assert activation[3] / factors[3] == pytest.approx((activation[:2] / regular).max())


@pytest.mark.parametrize(
    ("activation", "weight"),
    [([0.0, 0.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 0.0]), ([0.0, 0.0], [0.0, 0.0]), ([0.0, 1.0], [1.0, 0.0])],
)
def test_without_a_regular_channel_nothing_is_balanced(activation, weight):
    assert balance_factors(torch.tensor(activation), torch.tensor(weight)).tolist() == [1.0, 1.0]


def test_a_dead_channel_whose_factor_would_be_too_large_is_not_balanced():
    factors = balance_factors(torch.tensor([4.0, 0.0, 1e7]), torch.tensor([1.0, 2e-7, 0.0]))
    assert factors.tolist() == [2.0, 1.0, 5e6]
    assert balance_factors(torch.tensor([4.0, 1e8]), torch.tensor([1.0, 0.0])).tolist() == [2.0, 1.0]


LAYERS = [
    pytest.param(nn.Conv2d(6, 4, 3, padding=1), CONV, 1, (2, 6, 5, 5), 1, id="conv"),
    pytest.param(nn.Conv2d(6, 4, 3, groups=2), CONV, 2, (2, 6, 5, 5), 1, id="conv-g2"),
    pytest.param(nn.Conv1d(6, 6, 3, groups=6), CONV, 6, (2, 6, 5), 1, id="depthwise"),
    pytest.param(nn.Conv3d(6, 9, 2, groups=3), CONV, 3, (2, 6, 3, 3, 3), 1, id="conv3d-g3"),
    pytest.param(nn.ConvTranspose2d(6, 4, 3), TRANSPOSE, 1, (2, 6, 5, 5), 1, id="deconv"),
    pytest.param(nn.ConvTranspose2d(6, 4, 3, groups=2), TRANSPOSE, 2, (2, 6, 5, 5), 1, id="deconv-g2"),
    pytest.param(nn.Linear(6, 4), LINEAR, 1, (2, 3, 6), -1, id="linear"),
]


@pytest.mark.parametrize(("layer", "kind", "groups", "shape", "axis"), LAYERS)
def test_a_balanced_layer_computes_the_same(layer, kind, groups, shape, axis):
    layer = layer.double()
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.movedim(axis, 0)[2] *= 50
    factors = dmq(activation_maximum(x, axis), layer.weight, kind, groups).double()
    with torch.no_grad():
        expected = layer(x)
        layer.weight.copy_(balance_weight(layer.weight, factors, kind, groups))
        result = layer(balance_activation(x, factors, axis))
    assert (result - expected).abs().max() <= 1e-13 * expected.abs().max() * 200  # sums of at most 200 products


@pytest.mark.parametrize(("layer", "kind", "groups", "shape", "axis"), LAYERS)
def test_maxima_belong_to_their_input_channel(layer, kind, groups, shape, axis):
    weight = layer.weight.detach().float()
    array = weight.numpy()
    per_group = 6 // groups
    rows = len(array) // groups
    expected = [
        np.abs(array[c] if kind is TRANSPOSE else array[c // per_group * rows :][:rows, c % per_group]).max()
        for c in range(6)
    ]
    assert input_channel_maximum(weight, kind, groups).tolist() == expected
    x = torch.rand(shape) - 0.5
    others = tuple(d for d in range(x.ndim) if d != axis % x.ndim)
    assert activation_maximum(x, axis).tolist() == np.abs(x.numpy()).max(others).tolist()


def test_recurrent_matrices_are_balanced_like_linear_ones():
    weight = torch.tensor([[1.0, -8.0], [-2.0, 4.0], [0.5, 0.0]])
    assert input_channel_maximum(weight, RNN).tolist() == [2.0, 8.0]
    balanced = balance_weight(weight, torch.tensor([2.0, 0.5]), RNN)
    assert balanced.tolist() == [[2.0, -4.0], [-4.0, 2.0], [1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    x = torch.tensor([[1.5, -3.0], [-2.0, 1.0]], dtype=dtype)
    assert activation_maximum(x, 1).tolist() == [2.0, 3.0]
    assert balance_weight(x, torch.tensor([2.0, 4.0]), LINEAR).dtype is dtype
    assert balance_activation(x, torch.tensor([2.0, 4.0]), 1).dtype is dtype


@given(activation=maxima)
def test_joining_batches_is_taking_the_maximum(activation):
    x = torch.tensor(activation).reshape(1, -1)
    both = torch.cat([x, -2 * x])
    joined = torch.maximum(activation_maximum(x, 1), activation_maximum(-2 * x, 1))
    assert torch.equal(activation_maximum(both, 1), joined)


# ---- the reference's record


@pytest.mark.parametrize(
    ("layer", "kind", "groups"),
    [
        ("conv", CONV, 1),
        ("grp", CONV, 2),
        ("dw", CONV, 8),
        ("deconv", TRANSPOSE, 1),
        ("deconvg", TRANSPOSE, 2),
        ("fcnb", LINEAR, 1),
    ],
)
def test_record_of_the_reference(layer, kind, groups):
    with np.load(Path(__file__).parents[1] / "golden" / "numerics" / "amct_weights.npz") as archive:
        names = ("weight", "activation_max", "balance", "scale_w/dmq")
        weight, activation, balance, scale = (torch.from_numpy(archive[f"mix/{layer}/{name}"]) for name in names)
        norm = {name: torch.from_numpy(archive[f"mix/conv/{name}"]) for name in ("gamma", "beta", "mean", "variance")}
    if layer == "conv":  # the reference folds first
        weight = weight * (norm["gamma"] / torch.sqrt(norm["variance"] + 1e-5)).reshape(-1, 1, 1, 1)
    factors = dmq(activation, weight, kind, groups, 0.5)
    np.testing.assert_allclose(factors.numpy(), balance.numpy(), rtol=1e-6)
    balanced = arq(balance_weight(weight, factors, kind, groups), kind=kind, channel_wise=False, groups=groups)
    np.testing.assert_allclose(balanced.scale.numpy(), scale.numpy(), rtol=1e-6)


# ---- mistakes


def test_illegal_maxima_and_factors_stop_with_the_numbers():
    with pytest.raises(CalibrationError, match=r"1 channel .*not finite: channel 1: max\|x\| nan, max\|w\| 1"):
        balance_factors(torch.tensor([1.0, torch.nan]), torch.ones(2))
    with pytest.raises(CalibrationError, match=r"factor outside.*channel 0: max\|x\| 1e\+30"):
        balance_factors(torch.tensor([1e30, 1.0]), torch.ones(2))
    with pytest.raises(CalibrationError, match="factor outside"):
        balance_factors(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1e20]))
    with pytest.raises(CalibrationError, match=r"8 channels cannot.*channel 4: [^;]*; switch dmq_balancer off"):
        balance_factors(torch.full((8,), torch.inf), torch.ones(8))


def test_wrong_arguments_are_named():
    with pytest.raises(ArgumentError, match=r"activations \[2\] and weights \[3\]"):
        balance_factors(torch.ones(2), torch.ones(3))
    with pytest.raises(ArgumentError, match=r"migration_strength: expected 0..1, got 1.5"):
        balance_factors(torch.ones(2), torch.ones(2), 1.5)
    with pytest.raises(ArgumentError, match=r"one per input channel \[4\], got \[2\]"):
        balance_weight(torch.ones(2, 2, 1), torch.ones(2), CONV, 2)
    with pytest.raises(ArgumentError, match=r"\[2\] do not fit axis 0 of an activation \[3, 2\]"):
        balance_activation(torch.ones(3, 2), torch.ones(2), 0)
    with pytest.raises(CalibrationError, match=r"empty tensor of shape \[0, 2\]"):
        activation_maximum(torch.ones(0, 2), 1)
    with pytest.raises(ArgumentError, match="at least 2 dimensions"):
        input_channel_maximum(torch.ones(2), LINEAR)
