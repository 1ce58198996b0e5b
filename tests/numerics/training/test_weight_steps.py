"""Weight quantizers with gradients: against the spec's formulas in float64, finite differences, and by laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amct.errors import ArgumentError
from amct.numerics.arq import arq, channels_first, fake_quantize_weight
from amct.numerics.qparams import QParams
from amct.numerics.settings import WeightKind
from amct.numerics.training.quantizers import arq_scale, arq_step, learned_step, valid_scale

KINDS = [
    (WeightKind.CONV, (6, 2, 3, 3), 3, 6),
    (WeightKind.CONV_TRANSPOSE, (4, 3, 2, 2), 2, 6),
    (WeightKind.LINEAR, (5, 7), 1, 5),
    (WeightKind.RNN, (8, 3), 1, 8),
]


def numpy_learned_step(rows, g, scale, bits, lowest):
    """Section 4.8 in float64; ``scale`` and ``lowest`` by row."""
    highest = 2 ** (bits - 1) - 1
    v = rows / scale[:, None]
    y = np.clip(np.rint(v), lowest[:, None], highest) * scale[:, None]
    slope = np.where(v < lowest[:, None], lowest[:, None], np.where(v > highest, highest, np.rint(v) - v))
    return y, (slope * g).sum(axis=1)


def data(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for _ in range(2))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("kind", "shape", "groups", "outputs"), KINDS)
@pytest.mark.parametrize("channel_wise", [True, False])
def test_a_learned_step_is_the_formula(kind, shape, groups, outputs, bits, channel_wise):
    weight, g = data(shape)
    weight.requires_grad_()
    count = outputs if channel_wise else 1
    scale = (torch.linspace(0.5, 1.0, count) * 2 / 2 ** (bits - 1)).requires_grad_()
    lowest = torch.full((outputs,), -(2 ** (bits - 1)))
    lowest[::2] += 1
    y = learned_step(weight, scale, bits, kind=kind, groups=groups, lowest=lowest)
    y.backward(g)
    rows, upstream = (channels_first(part.detach(), kind, groups).double().numpy() for part in (weight, g))
    by_row = np.broadcast_to(scale.detach().double().numpy(), (outputs,))
    expected, per_row = numpy_learned_step(rows, upstream, by_row, bits, lowest.numpy())
    found = channels_first(y.detach(), kind, groups)
    np.testing.assert_allclose(found, expected, rtol=2e-7, atol=0)
    assert torch.equal(weight.grad, g)
    values = rows.size // count
    share = 1 / np.sqrt(rows.shape[1] * (2 ** (bits - 1) - 1))  # per channel, as in AMCT, also with one scale
    gradient = (per_row if channel_wise else per_row.sum(keepdims=True)) * share
    # float32: each of `values` products of up to 2^(bits-1) is off by 2^-23 of that
    bound = values * 2.0 ** (bits - 23) * np.abs(upstream).max() * share
    np.testing.assert_allclose(scale.grad, gradient, rtol=0, atol=bound)


def test_a_scale_per_gate_serves_all_rows_of_its_gate():
    weight, g = data((8, 3))
    gates = torch.tensor([0.02, 0.03, 0.04, 0.05], requires_grad=True)
    rows = gates.detach().repeat_interleave(2).requires_grad_()
    by_gate = learned_step(weight, gates, 8, kind=WeightKind.RNN, groups=4)
    by_row = learned_step(weight, rows, 8, kind=WeightKind.RNN, groups=4)
    assert torch.equal(by_gate, by_row)
    by_gate.backward(g)
    by_row.backward(g)
    torch.testing.assert_close(gates.grad, rows.grad.reshape(4, 2).sum(dim=1))
    with pytest.raises(ArgumentError, match="3 scales do not fit 8 output channels"):
        learned_step(weight, torch.ones(3), 8, kind=WeightKind.RNN)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_gradient_of_the_step_is_a_finite_difference_of_the_smooth_part(bits):
    """With the rounding error held fixed: w + s · error inside, s · (outermost integer) outside."""
    rng = np.random.default_rng(2)
    w, g = rng.normal(size=300), rng.normal(size=300)
    s = 1.5 / 2 ** (bits - 1)
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    v = w / s
    error = np.rint(v) - v

    def smooth(scale):
        y = np.where(v > highest, scale * highest, np.where(v < lowest, scale * lowest, w + scale * error))
        return (y * g).sum()

    scale = torch.tensor([s], dtype=torch.float64, requires_grad=True)
    learned_step(torch.from_numpy(w)[None], scale, bits, kind=WeightKind.LINEAR).backward(torch.from_numpy(g)[None])
    difference = (smooth(s + 1e-6) - smooth(s - 1e-6)) / 2e-6 / np.sqrt(300 * highest)
    assert scale.grad.item() == pytest.approx(difference, abs=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("kind", "shape", "groups", "outputs"), KINDS)
@pytest.mark.parametrize("channel_wise", [True, False])
def test_arq_of_every_step_is_arq_of_post_training_quantization(kind, shape, groups, outputs, bits, channel_wise):
    del outputs
    weight, g = data(shape)
    weight.requires_grad_()
    groups = 4 if kind is WeightKind.RNN else groups
    y = arq_step(weight, bits, kind=kind, groups=groups, channel_wise=channel_wise)
    factors = arq(weight, kind=kind, bits=bits, groups=groups, channel_wise=channel_wise)
    assert torch.equal(y, fake_quantize_weight(weight, factors, kind, groups))
    y.backward(g)
    assert torch.equal(weight.grad, g)


def test_the_excluded_lowest_integer_is_not_used():
    weight = torch.tensor([[-1.28, 0.5], [-1.28, 0.5]])
    scale = torch.full((2,), 0.01)
    lowest = torch.tensor([-128, -127])
    y = learned_step(weight, scale, 8, kind=WeightKind.LINEAR, lowest=lowest)
    assert (y / 0.01).round().tolist() == [[-128, 50], [-127, 50]]
    y = arq_step(weight, 8, kind=WeightKind.LINEAR, lowest=lowest)
    assert (y / 0.01).round().tolist() == [[-128, 50], [-127, 50]]


@given(
    values=st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4),
    scale=st.floats(0.0078125, 1, width=32),
    bits=st.sampled_from([4, 8]),
)
def test_rounding_again_changes_nothing_and_equals_post_training_quantization(values, scale, bits):
    weight, step = torch.tensor(values).reshape(2, 2), torch.tensor([scale])
    y = learned_step(weight, step, bits, kind=WeightKind.LINEAR)
    factors = QParams.symmetric(step, bits)
    assert torch.equal(y, fake_quantize_weight(weight, factors, WeightKind.LINEAR))
    assert torch.equal(learned_step(y, step, bits, kind=WeightKind.LINEAR), y)


def test_arq_scales_of_zero_weights_are_legal():
    assert arq_scale(torch.zeros(3, 4), 8, 3).tolist() == [1, 1, 1]


def test_an_illegal_scale_becomes_the_last_legal_one():
    found = valid_scale(torch.tensor([0.1, -0.1, 0.0, 1e9]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert found.tolist() == pytest.approx([0.1, 2.0, 3.0, 4.0])
