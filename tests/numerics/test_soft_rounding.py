"""The pieces of AdaRound against their formulas, autograd and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amct.numerics.adaround.rounding import Adam, CompiledSteps, Learning, SoftRounding, TorchSteps, _exp2, _log2
from amct.numerics.gram import Unfolding

ROWS = hnp.arrays(np.float32, (3, 7), elements=st.floats(-4, 4, width=32))


def numpy_h(alpha: np.ndarray) -> np.ndarray:
    return np.clip(1.2 / (1 + np.exp(-alpha)) - 0.1, 0, 1)


@given(ROWS, st.integers(2, 8))
def test_it_starts_at_the_float_weight(rows, bits):
    scale = torch.tensor([0.25, 0.5, 1.0])
    rounding = SoftRounding(torch.from_numpy(rows), scale, bits)
    half = 2 ** (bits - 1)
    expected = np.clip(rows / scale.numpy()[:, None], -half, half - 1) * scale.numpy()[:, None]
    assert rounding.soft().numpy() == pytest.approx(expected, abs=1e-5)
    assert np.array_equal(rounding.nearest.numpy(), np.clip(np.round(rows / scale.numpy()[:, None]), -half, half - 1))


@given(ROWS, ROWS, st.integers(2, 8))
def test_h_and_the_hard_rounding_follow_their_formulas(rows, alpha, bits):
    rounding = SoftRounding(torch.from_numpy(rows), torch.ones(3), bits)
    rounding.alpha = torch.from_numpy(alpha)
    h = numpy_h(alpha.astype(np.float64))
    assert rounding.h().numpy() == pytest.approx(h, abs=1e-6)
    half = 2 ** (bits - 1)
    hard = np.clip(np.floor(rows) + (h >= 0.5), -half, half - 1)
    decided = np.abs(h - 0.5) > 1e-6
    assert np.array_equal(rounding.hard().numpy()[decided], hard[decided])
    assert set(np.unique(rounding.hard().numpy() % 1)) == {0.0}


@pytest.mark.parametrize("beta", [None, 2.0, 7.5, 20.0])
def test_the_gradient_is_that_of_the_loss_and_the_regularizer(beta):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(4, 9, generator=generator) * 3
    slope = torch.randn(4, 9, generator=generator)
    rounding = SoftRounding(rows, torch.full((4,), 0.5), 3)
    rounding.alpha = torch.randn(4, 9, generator=generator) * 3
    found = rounding.gradient(slope, beta, 0.01)

    alpha = rounding.alpha.double().clone().requires_grad_()
    h = (torch.sigmoid(alpha) * 1.2 - 0.1).clamp(0, 1)
    weight = ((rows.double() / 0.5).floor() + h).clamp(-4, 3) * 0.5
    loss = (weight * slope.double()).sum()
    if beta is not None:
        loss = loss + 0.01 * (1 - (2 * h - 1).abs() ** beta).sum()
    loss.backward()
    assert found.numpy() == pytest.approx(alpha.grad.numpy(), rel=1e-4, abs=1e-7)


def test_beta_waits_for_the_warm_start_and_falls_along_a_cosine():
    settings = Learning(num_iteration=100, warm_start=0.2, beta_range=(20.0, 2.0))
    assert settings.beta_at(19) is None
    assert settings.beta_at(20) == pytest.approx(20)
    assert settings.beta_at(60) == pytest.approx(11)
    assert settings.beta_at(80) == pytest.approx(2 + 9 * (1 + math.cos(math.pi * 0.75)))
    betas = [settings.beta_at(iteration) for iteration in range(20, 100)]
    assert betas == sorted(betas, reverse=True)


def test_adam_takes_the_steps_of_torch():
    generator = torch.Generator().manual_seed(4)
    ours = torch.randn(5, 6, generator=generator)
    theirs = ours.clone().requires_grad_()
    adam, reference = Adam(ours, 1e-2), torch.optim.Adam([theirs], lr=1e-2)
    for _ in range(50):
        slope = torch.randn(5, 6, generator=generator)
        adam.step(slope)
        theirs.grad = slope.clone()
        reference.step()
    # Fifty steps of at most 0.01, each rounded in float32 near values of 1.
    assert torch.allclose(ours, theirs.detach(), rtol=0, atol=50 * 2**-23)


@pytest.mark.parametrize("bits", [3, 8])
def test_compiled_steps_are_those_of_torch(bits):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(6, 700, generator=generator)  # several blocks, the last one incomplete
    scale = rows.abs().amax(1) / 2 ** (bits - 1) * 0.9  # some weights are clipped
    settings = Learning(num_bits=bits, num_iteration=200, learning_rate=3e-2)
    roundings = [SoftRounding(rows, scale, bits) for _ in range(2)]
    kinds = (TorchSteps, CompiledSteps)
    both = [kind(each, Unfolding(None), settings) for kind, each in zip(kinds, roundings, strict=True)]
    pull = torch.randn(1, 6, 700, generator=generator)
    for iteration in range(settings.num_iteration):
        for steps in both:
            steps.step(pull + 3 * steps.weight, settings.beta_at(iteration))
        assert torch.allclose(both[0].weight, both[1].weight, rtol=0, atol=1e-4 * float(scale.max()))
    for steps in both:
        steps.finish()
    first, second = roundings
    assert torch.equal(first.hard(), second.hard())
    assert not torch.equal(first.hard(), first.nearest)
    h = first.h()  # all began between 0 and 1
    assert float(((h == 0) | (h == 1)).float().mean()) > 0.1


@given(st.floats(-126, 126, width=32))
def test_compiled_powers_of_two(x):
    assert float(_exp2(np.float32(x))) == pytest.approx(2.0**x, rel=3e-7)


@given(st.floats(2.0**-99, 2.0**99, width=32))
def test_compiled_logarithms(x):
    assert float(_log2(np.float32(x))) == pytest.approx(math.log2(x), rel=3e-7, abs=1e-6)


def test_with_a_table_each_weight_becomes_one_of_the_two_values_beside_it():
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(3, 40, generator=generator) * 30
    table = torch.tensor([[-60, -20, -3, 0, 9, 50], [-90, -50, 0, 1, 2, 3], [-4, -2, 0, 2, 4, 6]], dtype=torch.int8)
    scale = torch.tensor([0.5, 1.0, 2.0])
    rounding = SoftRounding(rows, scale, 8, table)
    hard, other = rounding.nearest, rounding.other(rounding.nearest)
    for row, values in enumerate(table.tolist()):
        for place, exact in enumerate((rows[row] / scale[row]).tolist()):
            below = max((value for value in values if value <= exact), default=values[0])
            above = min((value for value in values if value > exact), default=values[-1])
            assert {hard[row, place].item(), other[row, place].item()} == {below, above}
            assert hard[row, place].item() == min(values, key=lambda value: (abs(value - exact), value))
    inside = rounding.gap > 0
    assert torch.allclose(rounding.soft()[inside], rows[inside], atol=1e-3)
    assert torch.equal(rounding.step > 0, inside)
    rounding.alpha = torch.randn(3, 40, generator=generator) * 5
    assert bool(((rounding.hard() == hard) | (rounding.hard() == other)).all())
