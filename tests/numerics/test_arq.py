"""ARQ against NumPy, against the reference's records, and by laws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amct.errors import ArgumentError, CalibrationError
from amct.model.kinds import LayerKind
from amct.numerics.affine import SymmetricScale, quantize_bias
from amct.numerics.arq import (
    WeightKind,
    arq,
    channels_first,
    fake_quantize_weight,
    from_channels_first,
    quantize_weight,
    reorder_gates,
)
from amct.numerics.fold import ChannelAffine, fold_after
from amct.numerics.qparams import QParams

LSTM_GATES, GRU_GATES = LayerKind.LSTM.onnx_gates, LayerKind.GRU.onnx_gates

CONV, TRANSPOSE, LINEAR, RNN = WeightKind.CONV, WeightKind.CONV_TRANSPOSE, WeightKind.LINEAR, WeightKind.RNN

LAYOUTS = [
    pytest.param((6, 4, 3), CONV, 1, id="conv1d"),
    pytest.param((6, 2, 3, 3), CONV, 2, id="conv2d-g2"),
    pytest.param((4, 2, 2, 3, 2), CONV, 1, id="conv3d"),
    pytest.param((4, 6, 3), TRANSPOSE, 1, id="deconv1d"),
    pytest.param((4, 3, 2, 2), TRANSPOSE, 2, id="deconv2d-g2"),
    pytest.param((4, 1, 2, 2), TRANSPOSE, 4, id="deconv2d-depthwise"),
    pytest.param((6, 5, 2, 2, 1), TRANSPOSE, 3, id="deconv3d-g3"),
    pytest.param((5, 7), LINEAR, 1, id="linear"),
    pytest.param((12, 5), RNN, 1, id="lstm"),
]


def output_slices(shape, kind, groups):
    """Index expressions of each output channel in the weight's own layout, written out by hand."""
    if kind is not TRANSPOSE:
        return [(channel,) for channel in range(shape[0])]
    inputs = shape[0] // groups
    return [
        (slice(group * inputs, (group + 1) * inputs), column) for group in range(groups) for column in range(shape[1])
    ]


def numpy_scale(values, bits, policy):
    low, high = float(values.min()), float(values.max())
    divisor = 2 ** (bits - 1) if policy is SymmetricScale.NEGATIVE_SIDE and -low > abs(high) else 2 ** (bits - 1) - 1
    scale = np.float32(max(abs(low), abs(high)) / divisor)
    return scale if scale >= np.finfo(np.float32).eps else np.float32(1)


def random_weight(shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize(("shape", "kind", "groups"), LAYOUTS)
@pytest.mark.parametrize("bits", [2, 4, 6, 7, 8])
@pytest.mark.parametrize("policy", SymmetricScale)
def test_per_channel_is_the_numpy_formula(shape, kind, groups, bits, policy):
    weight = random_weight(shape)
    factors = arq(weight, kind=kind, bits=bits, groups=groups, symmetric_scale=policy)
    integers = quantize_weight(weight, factors, kind, groups)
    fake = fake_quantize_weight(weight, factors, kind, groups)
    assert integers.dtype is torch.int8
    assert not factors.offset.any()
    for channel, where in enumerate(output_slices(shape, kind, groups)):
        values = weight.numpy()[where]
        scale = numpy_scale(values, bits, policy)
        assert factors.scale[channel].item() == scale
        steps = np.clip(np.rint(values * (np.float32(1) / scale)), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        np.testing.assert_array_equal(integers.numpy()[where], steps)
        np.testing.assert_array_equal(fake.numpy()[where], steps * scale)


@pytest.mark.parametrize(("shape", "kind", "groups"), LAYOUTS)
def test_per_tensor_is_the_numpy_formula(shape, kind, groups):
    weight = random_weight(shape)
    per_tensor_groups = 1 if kind is RNN else groups
    factors = arq(weight, kind=kind, channel_wise=False, groups=per_tensor_groups)
    scale = numpy_scale(weight.numpy(), 8, SymmetricScale.NEGATIVE_SIDE)
    assert factors.scale.tolist() == [scale]
    steps = np.clip(np.rint(weight.numpy() * (np.float32(1) / scale)), -128, 127)
    np.testing.assert_array_equal(quantize_weight(weight, factors, kind, groups).numpy(), steps)


@pytest.mark.parametrize(("shape", "kind", "groups"), LAYOUTS)
def test_rows_go_there_and_back(shape, kind, groups):
    weight = random_weight(shape)
    rows = channels_first(weight, kind, groups)
    for channel, where in enumerate(output_slices(shape, kind, groups)):
        np.testing.assert_array_equal(rows[channel].numpy(), weight.numpy()[where].reshape(-1))
    assert torch.equal(from_channels_first(rows, shape, kind, groups), weight)


def test_gates_may_have_a_scale_each():
    weight = random_weight((12, 5)) * torch.tensor([1.0, 10.0, 100.0, 0.1]).repeat_interleave(3)[:, None]
    factors = arq(weight, kind=RNN, channel_wise=False, groups=4)
    assert factors.scale.shape == (4,)
    for gate in range(4):
        values = weight.numpy()[3 * gate : 3 * gate + 3]
        assert factors.scale[gate].item() == numpy_scale(values, 8, SymmetricScale.NEGATIVE_SIDE)
    error = (fake_quantize_weight(weight, factors, RNN) - weight).abs()
    assert (error <= factors.scale.repeat_interleave(3)[:, None] * 0.5001 + 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(dtype):
    weight = random_weight((4, 3, 2, 2)).to(dtype)
    factors = arq(weight, kind=CONV)
    wide = arq(weight.float(), kind=CONV)
    assert torch.equal(factors.scale, wide.scale)
    assert torch.equal(quantize_weight(weight, factors, CONV), quantize_weight(weight.float(), wide, CONV))
    fake = fake_quantize_weight(weight, factors, CONV)
    assert torch.equal(fake, fake_quantize_weight(weight.float(), wide, CONV).to(dtype))


@given(
    weight=hnp.arrays(
        np.float32, hnp.array_shapes(min_dims=2, max_dims=4, max_side=4), elements=st.floats(-8, 8, width=32)
    ),
    bits=st.integers(2, 8),
    policy=st.sampled_from(SymmetricScale),
    channel_wise=st.booleans(),
)
def test_laws(weight, bits, policy, channel_wise):
    tensor = torch.from_numpy(weight)
    arguments = {"kind": CONV, "bits": bits, "channel_wise": channel_wise, "symmetric_scale": policy}
    factors = arq(tensor, **arguments)
    integers = quantize_weight(tensor, factors, CONV)
    fake = fake_quantize_weight(tensor, factors, CONV)
    assert (integers[tensor == 0] == 0).all()
    # No value moves by more than half a step (three float32 roundings on top); with the negative side in charge a
    # positive value of nearly the same size is cut to the largest integer, one step away.
    scale = factors.scale.expand(len(weight)).reshape(-1, *[1] * (tensor.ndim - 1))
    steps = torch.where(tensor > 0, 1.0, 0.5) if policy is SymmetricScale.NEGATIVE_SIDE else 0.5
    assert ((fake - tensor).abs() <= scale * (steps + 3 * 2.0**-24 * 2**bits)).all()
    # quantizing twice is quantizing once
    assert torch.equal(fake_quantize_weight(fake, factors, CONV), fake)
    # equivariance under powers of two, away from the smallest legal scale; tinier weights have scale 1, as zeros have
    size = channels_first(tensor, CONV).abs().amax(1) if channel_wise else tensor.abs().amax()
    if (factors.scale > 1e-3).all() and ((size > 1e-3) | (size == 0)).all():
        doubled = arq(tensor * 2, **arguments)
        degenerate = channels_first(tensor, CONV).abs().amax(1) == 0 if channel_wise else (tensor == 0).all()
        assert torch.equal(doubled.scale, torch.where(degenerate, factors.scale, factors.scale * 2))
        assert torch.equal(quantize_weight(tensor * 2, doubled, CONV), integers)


def test_degenerate_channels_get_scale_one():
    weight = torch.zeros(4, 3)
    weight[1], weight[2], weight[3] = 1e-12, 1e-45, 5.0
    factors = arq(weight, kind=LINEAR)
    assert factors.scale[:3].tolist() == [1.0, 1.0, 1.0]
    assert quantize_weight(weight, factors, LINEAR)[:3].eq(0).all()
    assert quantize_weight(weight, factors, LINEAR)[3].tolist() == [127] * 3


def test_one_element():
    """Its minimum is its maximum: the sides are equal, and the reference then divides by 127."""
    assert arq(torch.tensor([[-3.0]]), kind=LINEAR).scale.item() == np.float32(3 / 127)


def test_gradients_pass_straight_through():
    weight = random_weight((4, 3, 2, 2)).requires_grad_()
    factors = arq(weight, kind=TRANSPOSE, groups=2)
    fake_quantize_weight(weight, factors, TRANSPOSE, groups=2).sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_illegal_weights_stop_with_channel_and_numbers(bad):
    weight = random_weight((3, 4))
    weight[2, 1] = bad
    with pytest.raises(CalibrationError, match="channel 2: minimum"):
        arq(weight, kind=LINEAR)


def test_a_huge_outlier_stops():
    weight = random_weight((3, 4))
    weight[1, 1] = 1e30
    with pytest.raises(CalibrationError, match=r"too large for 8 bits.*channel 1: .*maximum 1e\+30"):
        arq(weight, kind=LINEAR)


def test_wrong_arguments_are_named():
    weight = random_weight((4, 6))
    with pytest.raises(ArgumentError, match=r"bits: weights have 2..8 bits, got 9"):
        arq(weight, kind=LINEAR, bits=9)
    with pytest.raises(ArgumentError, match="bits: weights have"):
        quantize_weight(weight, replace(arq(weight, kind=LINEAR), bits=16), LINEAR)
    with pytest.raises(ArgumentError, match="bits: weights have"):
        fake_quantize_weight(weight, replace(arq(weight, kind=LINEAR), bits=1), LINEAR)
    with pytest.raises(ArgumentError, match=r"groups: expected a positive divisor.*\[4, 6\], got 3"):
        arq(weight, kind=TRANSPOSE, groups=3)
    with pytest.raises(ArgumentError, match="groups: expected 1 for a linear weight, got 2"):
        arq(weight, kind=LINEAR, groups=2)
    with pytest.raises(ArgumentError, match=r"at least 2 dimensions and one value, got shape \[4\]"):
        arq(weight[:, 0], kind=LINEAR)
    with pytest.raises(ArgumentError, match=r"one value, got shape \[0, 6\]"):
        arq(weight[:0], kind=LINEAR)
    with pytest.raises(ArgumentError, match="3 scales do not fit 4 output channels"):
        quantize_weight(weight, QParams.symmetric(torch.ones(3)), LINEAR)
    with pytest.raises(ArgumentError, match="0 scales do not fit"):
        QParams.symmetric(torch.ones(0)).per_row(4)
    with pytest.raises(ArgumentError, match=r"rows of shape \[4, 5\] do not fit a linear weight of shape \[4, 6\]"):
        from_channels_first(weight[:, :5], weight.shape, LINEAR)
    with pytest.raises(ArgumentError, match=r"rows of 4 gates of equal size, got shape \[6\]"):
        reorder_gates(torch.zeros(6), LSTM_GATES)


def test_gates_are_reordered():
    assert reorder_gates(torch.arange(8), LSTM_GATES).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert reorder_gates(torch.arange(6), GRU_GATES).tolist() == [2, 3, 0, 1, 4, 5]
    assert reorder_gates(torch.arange(8).reshape(4, 2), LSTM_GATES).tolist() == [[0, 1], [6, 7], [2, 3], [4, 5]]


# ---- the reference's own records


@pytest.fixture(scope="module")
def reference():
    with np.load(Path(__file__).parents[1] / "golden" / "numerics" / "amct_weights.npz") as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive.files}


def folded_weight(reference, layer, epsilon=1e-5):
    weight = reference[f"{layer}/weight"]
    if f"{layer}/gamma" not in reference:
        return weight
    parts = (reference[f"{layer}/{name}"] for name in ("mean", "variance"))
    norm = ChannelAffine.batch_norm(*parts, epsilon, reference[f"{layer}/gamma"], reference[f"{layer}/beta"])
    return fold_after(weight, None, CONV, 1, norm)[0]


def assert_reproduced(scale, recorded):
    """To 1e-6: the record has 8 digits, and the reference folds in float32."""
    assert scale.shape == recorded.shape
    np.testing.assert_allclose(scale.numpy(), recorded.numpy(), rtol=1e-6)


@pytest.mark.parametrize("layer", ["conv1", "layer1.0.conv1", "layer2.1.conv2", "linear"])
@pytest.mark.parametrize(
    ("case", "bits", "linear_bits"),
    [("default", 8, 8), ("arq_bits4", 4, 4), ("arq_bits6", 6, 8), ("arq_cw_false", 8, 8)],
)
def test_records_of_resnet20(reference, layer, case, bits, linear_bits):
    linear = layer == "linear"
    if layer == "conv1" and bits == 4:
        bits = 8  # an odd number of input channels: the reference keeps 8 bits
    weight = folded_weight(reference, f"resnet20/{layer}")
    channel_wise = not linear and case != "arq_cw_false"
    factors = arq(
        weight, kind=LINEAR if linear else CONV, bits=linear_bits if linear else bits, channel_wise=channel_wise
    )
    assert_reproduced(factors.scale, reference[f"resnet20/{layer}/scale_w/{case}"])


@pytest.mark.parametrize(
    ("layer", "kind", "groups"),
    [
        ("mix/conv", CONV, 1),
        ("mix/grp", CONV, 2),
        ("mix/dw", CONV, 8),
        ("mix/deconv", TRANSPOSE, 1),
        ("mix/deconvg", TRANSPOSE, 2),
        ("conv1d3d/c1", CONV, 1),
        ("conv1d3d/d1", TRANSPOSE, 1),
        ("conv1d3d/c3", CONV, 1),
    ],
)
def test_records_of_other_layers(reference, layer, kind, groups):
    factors = arq(folded_weight(reference, layer), kind=kind, groups=groups)
    assert_reproduced(factors.scale, reference[f"{layer}/scale_w/default"])


@pytest.mark.parametrize("recurrent", ["LSTM", "GRU"])
@pytest.mark.parametrize("matrix", ["w", "r"])
def test_records_of_recurrent_layers(reference, recurrent, matrix):
    """The record has ONNX's gate order."""
    name = f"{recurrent.lower()}/rnn"
    factors = arq(reference[f"{name}/weight_{matrix}"], kind=RNN)
    assert_reproduced(
        reorder_gates(factors.scale, LSTM_GATES if recurrent == "LSTM" else GRU_GATES),
        reference[f"{name}/scale_{matrix}"],
    )


@pytest.mark.parametrize("layer", ["conv1", "layer1.0.conv1", "layer2.1.conv2"])
def test_biases_of_resnet20(reference, layer):
    """Smallest and largest integer of the deployed bias, from the folded bias and the recorded factors."""
    part = {
        name: reference[f"resnet20/{layer}/{name}"]
        for name in ("weight", "mean", "variance", "gamma", "beta", "scale_d", "bias_range", "scale_w/default")
    }
    norm = ChannelAffine.batch_norm(part["mean"], part["variance"], 1e-5, part["gamma"], part["beta"])
    _, bias = fold_after(part["weight"], None, CONV, 1, norm)
    integers = quantize_bias(bias, part["scale_w/default"], part["scale_d"])
    assert [integers.min(), integers.max()] == part["bias_range"].tolist()
