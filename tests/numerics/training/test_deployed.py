"""Folding a batch norm into trained integers and scales."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from amct.numerics.affine import SMALLEST_SCALE
from amct.numerics.training.quantizers import fold_into_integers


@given(
    values=st.lists(st.integers(-127, 127), min_size=6, max_size=6),
    multipliers=st.lists(st.floats(-10, 10).filter(lambda m: abs(m) > 1e-3), min_size=2, max_size=2),
    scale=st.floats(0.0009765625, 1, width=32),
)
def test_folding_keeps_the_integers_and_gives_the_same_weights(values, multipliers, scale):
    integers = torch.tensor(values, dtype=torch.float32).reshape(2, 3)
    multiplier = torch.tensor(multipliers, dtype=torch.float64)
    found, scales = fold_into_integers(integers, torch.tensor([scale]), multiplier, 8)
    assert torch.equal(found, integers * multiplier.sign().float()[:, None])
    expected = integers.double() * scale * multiplier[:, None]
    # one rounding of the scale to float32
    assert ((found.double() * scales.double()[:, None] - expected).abs() <= expected.abs() * 2.0**-23).all()


def test_a_multiplier_of_zero_gives_zeros_and_a_legal_scale():
    found, scales = fold_into_integers(torch.ones(2, 3), torch.tensor([0.5, 0.25]), torch.tensor([0.0, 2.0]), 8)
    assert found.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert scales.tolist() == [0.5, 0.5]


def test_a_scale_that_would_be_too_small_is_the_smallest_one_and_the_integers_are_rounded_again():
    found, scales = fold_into_integers(
        torch.tensor([[100.0, -3.0]]), torch.tensor([SMALLEST_SCALE]), torch.tensor([0.25]), 8
    )
    assert scales.item() == torch.tensor(SMALLEST_SCALE).item()
    assert found.tolist() == [[25, -1]]
