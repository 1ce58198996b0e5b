"""Folding against running both modules one after the other in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from amct.errors import ArgumentError, ModelError
from amct.numerics.arq import WeightKind
from amct.numerics.fold import ChannelAffine, fold_after, fold_before

CONV, TRANSPOSE, LINEAR = WeightKind.CONV, WeightKind.CONV_TRANSPOSE, WeightKind.LINEAR


def fold_batch_norm(weight, bias, kind, groups, *parts):
    return fold_after(weight, bias, kind, groups, ChannelAffine.batch_norm(*parts))


def fold_scale(weight, bias, kind, groups, *parts):
    return fold_after(weight, bias, kind, groups, ChannelAffine.scale(*parts))


def fold_bias(weight, bias, kind, groups, addend):
    return fold_after(weight, bias, kind, groups, ChannelAffine.bias(addend))


def layer_cases():
    yield "linear", LINEAR, nn.Linear(6, 4), nn.BatchNorm1d, (5, 6)
    for dims, conv, transposed, norm in (
        (1, nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d),
        (2, nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
        (3, nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
    ):
        shape = (2, 6, *[5] * dims)
        for groups in (1, 2):
            yield f"conv{dims}d-g{groups}", CONV, conv(6, 4, 3, padding=1, groups=groups), norm, shape
            yield f"deconv{dims}d-g{groups}", TRANSPOSE, transposed(6, 4, 3, stride=2, groups=groups), norm, shape
    yield "depthwise", CONV, nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.BatchNorm2d, (2, 6, 5, 5)
    yield "depthwise-transposed", TRANSPOSE, nn.ConvTranspose2d(6, 12, 3, groups=6), nn.BatchNorm2d, (2, 6, 5, 5)
    yield "wide-groups", CONV, nn.Conv2d(6, 9, 2, groups=3), nn.BatchNorm2d, (2, 6, 5, 5)


CASES = list(layer_cases())
parametrize_layers = pytest.mark.parametrize(
    ("kind", "layer", "norm_class", "shape"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)


def random_norm(norm_class, channels, seed=3):
    generator = torch.Generator().manual_seed(seed)
    norm = norm_class(channels).double().eval()
    for tensor, low, high in (
        (norm.running_mean, -2, 2),
        (norm.running_var, 0.01, 3),
        (norm.weight.data, -2, 2),
        (norm.bias.data, -1, 1),
    ):
        tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low)
    return norm


def norm_parts(norm):
    return norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias


def outputs(layer):
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def with_weights(layer, weight, bias):
    clone = copy.deepcopy(layer)
    clone.weight, clone.bias = nn.Parameter(weight), nn.Parameter(bias)
    return clone


def assert_same(result, expected):
    """Equal to float64 rounding: sums of at most 200 products, each off by a few 2^-53 of the largest term."""
    bound = 1e-12 * expected.abs().max()
    assert (result - expected).abs().max() <= bound


@parametrize_layers
def test_a_batch_norm_after_is_folded_exactly(kind, layer, norm_class, shape):
    layer = copy.deepcopy(layer).double()
    norm = random_norm(norm_class, outputs(layer))
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight, bias = fold_batch_norm(layer.weight, layer.bias, kind, getattr(layer, "groups", 1), *norm_parts(norm))
    with torch.no_grad():
        assert_same(with_weights(layer, weight, bias)(x), norm(layer(x)))
    assert weight.shape == layer.weight.shape
    assert not weight.requires_grad


@parametrize_layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_are_rounded_once_to_the_dtype_of_the_weight(kind, layer, norm_class, shape, dtype):
    layer = copy.deepcopy(layer).to(dtype)
    norm = random_norm(norm_class, outputs(layer))
    groups = getattr(layer, "groups", 1)
    weight, bias = fold_batch_norm(layer.weight, layer.bias, kind, groups, *norm_parts(norm))
    with torch.no_grad():
        assert with_weights(layer, weight, bias)(torch.zeros(shape, dtype=dtype)).dtype is dtype
    wide_bias = None if layer.bias is None else layer.bias.double()
    exact = fold_batch_norm(layer.weight.double(), wide_bias, kind, groups, *norm_parts(norm))
    assert weight.dtype is dtype
    assert torch.equal(weight, exact[0].to(dtype))
    assert torch.equal(bias, exact[1].to(dtype))


def test_the_formula_of_batch_norm_in_numpy():
    rng = np.random.default_rng(1)
    mean, variance, gamma, beta = rng.normal(size=(4, 7)) ** 2 + 0.1
    weight, bias = rng.normal(size=(7, 3, 2, 2)), rng.normal(size=7)
    factor = gamma / np.sqrt(variance + 1e-3)
    parts = [torch.from_numpy(part) for part in (mean, variance)]
    new_weight, new_bias = fold_batch_norm(
        torch.from_numpy(weight), torch.from_numpy(bias), CONV, 1, *parts, 1e-3, torch.tensor(gamma), torch.tensor(beta)
    )
    np.testing.assert_allclose(new_weight.numpy(), weight * factor[:, None, None, None], rtol=1e-15)
    np.testing.assert_allclose(new_bias.numpy(), (bias - mean) * factor + beta, rtol=1e-14)


def test_a_batch_norm_without_gamma_and_beta():
    mean, variance = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 0.25])
    weight, bias = fold_batch_norm(torch.ones(2, 1), None, LINEAR, 1, mean, variance, 0.0)
    assert weight.tolist() == [[0.5], [2.0]]
    assert bias.tolist() == [-0.5, -4.0]


def test_scale_and_bias_layers():
    weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, -1.0])
    scaled = fold_scale(weight, bias, LINEAR, 1, torch.tensor([2.0, 3.0]), torch.tensor([10.0, 20.0]))
    assert scaled[0].tolist() == [[2.0, 4.0], [9.0, 12.0]]
    assert scaled[1].tolist() == [12.0, 17.0]
    without = fold_scale(weight, bias, LINEAR, 1, torch.tensor([2.0, 3.0]))
    assert without[1].tolist() == [2.0, -3.0]
    shifted = fold_bias(weight, None, LINEAR, 1, torch.tensor([5.0, 6.0]))
    assert torch.equal(shifted[0], weight)
    assert shifted[1].tolist() == [5.0, 6.0]


@parametrize_layers
def test_a_chain_is_folded_as_one(kind, layer, norm_class, shape):
    """Caffe: BatchNorm, then Scale, then Bias."""
    layer = copy.deepcopy(layer).double()
    channels, groups = outputs(layer), getattr(layer, "groups", 1)
    norm = random_norm(norm_class, channels)
    scale, shift, addend = torch.randn(3, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    chain = (
        ChannelAffine.batch_norm(*norm_parts(norm))
        .then(ChannelAffine.scale(scale, shift))
        .then(ChannelAffine.bias(addend))
    )
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight, bias = fold_after(layer.weight, layer.bias, kind, groups, chain)
    with torch.no_grad():
        y = norm(layer(x))
        along = [1, -1] + [1] * (y.ndim - 2)
        expected = y * scale.reshape(along) + shift.reshape(along) + addend.reshape(along)
        assert_same(with_weights(layer, weight, bias)(x), expected)


@pytest.mark.parametrize(
    ("kind", "layer", "shape"),
    [
        (CONV, nn.Conv1d(6, 4, 3, groups=2), (2, 6, 9)),
        (CONV, nn.Conv2d(6, 4, 3, stride=2), (2, 6, 9, 9)),
        (CONV, nn.Conv2d(6, 9, (2, 3), dilation=2, groups=3, bias=False), (2, 6, 9, 9)),
        (CONV, nn.Conv2d(6, 6, 3, groups=6), (2, 6, 9, 9)),
        (CONV, nn.Conv3d(6, 4, 2, groups=2), (2, 6, 5, 5, 5)),
        (LINEAR, nn.Linear(6, 4), (5, 6)),
    ],
    ids=["conv1d-g2", "conv2d-stride", "conv2d-dilated-g3", "depthwise", "conv3d-g2", "linear"],
)
def test_a_batch_norm_before_is_folded_exactly(kind, layer, shape):
    layer = layer.double()
    norm_class = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    norm = random_norm(norm_class, 6)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    affine = ChannelAffine.batch_norm(*norm_parts(norm))
    weight, bias = fold_before(layer.weight, layer.bias, kind, getattr(layer, "groups", 1), affine)
    with torch.no_grad():
        assert_same(with_weights(layer, weight, bias)(x), layer(norm(x)))


def test_before_a_linear_layer_of_flattened_features():
    layer = nn.Linear(3 * 2 * 2, 5).double()
    norm = random_norm(nn.BatchNorm2d, 3)
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    weight, bias = fold_before(layer.weight, layer.bias, LINEAR, 1, ChannelAffine.batch_norm(*norm_parts(norm)))
    with torch.no_grad():
        assert_same(with_weights(layer, weight, bias)(x.flatten(1)), layer(norm(x).flatten(1)))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [CONV, TRANSPOSE])
def test_a_mere_multiplier_before_is_exact_everywhere(kind, groups):
    maker = nn.Conv2d if kind is CONV else nn.ConvTranspose2d
    layer = maker(6, 4, 3, padding=1, groups=groups).double()
    multiplier = torch.linspace(-1, 2, 6, dtype=torch.float64)
    weight, bias = fold_before(layer.weight, layer.bias, kind, groups, ChannelAffine.scale(multiplier), padded=True)
    x = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        assert_same(with_weights(layer, weight, bias)(x), layer(x * multiplier[:, None, None]))


def test_what_is_not_exact_is_refused_with_the_reason():
    affine = ChannelAffine.bias(torch.ones(4))
    with pytest.raises(ModelError, match="following convolution with zero padding"):
        fold_before(torch.ones(2, 4, 3, 3), None, CONV, 1, affine, padded=True)
    with pytest.raises(ModelError, match="following transposed convolution: its border uses part"):
        fold_before(torch.ones(4, 2, 3, 3), None, TRANSPOSE, 1, affine)


def test_results_that_are_not_finite_are_refused():
    half = torch.full((2, 3), 100.0, dtype=torch.float16)
    with pytest.raises(ModelError, match=r"3 of 6 weight values that are not finite in torch\.float16"):
        fold_scale(half, None, LINEAR, 1, torch.tensor([1e3, 1.0]))
    with pytest.raises(ModelError, match="2 of 2 bias values that are not finite"):
        fold_bias(torch.ones(2, 3), None, LINEAR, 1, torch.tensor([torch.inf, torch.nan]))
    with pytest.raises(ModelError, match=r"variance \+ epsilon must be positive, got -1 in channel 1"):
        fold_batch_norm(torch.ones(2, 3), None, LINEAR, 1, torch.zeros(2), torch.tensor([1.0, -1.0]), 0.0)
    with pytest.raises(ModelError, match="must be positive, got nan in channel 0"):
        fold_batch_norm(torch.ones(2, 3), None, LINEAR, 1, torch.zeros(2), torch.tensor([torch.nan, 1.0]), 1e-5)


def test_a_denormal_variance_folds():
    weight, bias = fold_batch_norm(torch.ones(1, 1), None, LINEAR, 1, torch.zeros(1), torch.tensor([1e-40]), 0.0)
    assert weight.item() == pytest.approx(1e20, rel=1e-5)  # 1e-40 has few bits as a float32 denormal
    assert bias.item() == 0.0


def test_channels_that_do_not_match_are_named():
    with pytest.raises(ArgumentError, match="cannot fold 3 channels into a layer with 2 outputs"):
        fold_bias(torch.ones(2, 3), None, LINEAR, 1, torch.ones(3))
    with pytest.raises(ArgumentError, match="cannot fold 2 channels into a layer with 3 inputs"):
        fold_before(torch.ones(2, 3), None, LINEAR, 1, ChannelAffine.bias(torch.ones(2)))
    with pytest.raises(ArgumentError, match="cannot fold 3 channels into a layer with 6 inputs"):
        fold_before(torch.ones(2, 3, 1), None, CONV, 2, ChannelAffine.bias(torch.ones(3)))
    with pytest.raises(ArgumentError, match=r"bias: expected shape \[2\], got \[3\]"):
        fold_bias(torch.ones(2, 3), torch.ones(3), LINEAR, 1, torch.ones(2))
    with pytest.raises(ArgumentError, match="recurrent layer"):
        fold_bias(torch.ones(8, 3), None, WeightKind.RNN, 1, torch.ones(8))
    with pytest.raises(ArgumentError, match=r"two tensors \[C\], got shapes \[2\] and \[3\]"):
        ChannelAffine(torch.ones(2), torch.ones(3))
