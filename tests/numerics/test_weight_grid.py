"""Integers and scales found in dequantized weights, against the integers and scales they were made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amct.numerics.integer import (
    bias_integers,
    dequantized_bias,
    find_integer_weights,
    integer_bias,
    lowest_scale,
    sum_scale,
)

SCALES = st.floats(1.2e-7, 1e3).map(np.float32)


def weights(seed, rows, columns, *, per_row):
    """Integers with 127 in every row (in the first one, if they share a scale), some rows all zero."""
    random = np.random.default_rng(seed)
    q = random.integers(-127, 128, (rows, columns))
    q[:, 0] = random.choice([-127, 127], rows)
    if not per_row:
        q[1:] //= 3
    q[random.random(rows) < 0.1] = 0
    q[0, 0] = 127
    scale = torch.from_numpy(np.exp(random.uniform(-12, 5, rows if per_row else 1)).astype(np.float32))
    return torch.from_numpy(q.astype(np.int8)), scale, random


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 40), st.booleans(), st.booleans(), SCALES)
def test_sums_of_the_found_integers_are_the_original_ones(seed, rows, columns, per_row, has_bias, data):
    """Integers, biases and steps of the sums are found bit by bit if the scale is the lowest with the same values."""
    q, scale, random = weights(seed, rows, columns, per_row=per_row)
    scale, data = lowest_scale(q, scale), torch.tensor(data)
    step = sum_scale(scale, data).expand(rows)
    bias = None
    if has_bias:
        first = torch.from_numpy(random.integers(-(2 ** random.integers(1, 31)), 2**31, rows))
        bias = dequantized_bias(first, step)
    real = q.float() * scale[:, None]
    found = find_integer_weights(real, bias, data)
    assert found is not None
    x = torch.from_numpy(random.integers(-255, 256, (columns,)))
    sums = q.long() @ x
    if bias is None:
        wanted = (sums.double() * step.double()).float()
        steps = sum_scale(found.scale, data).expand(rows)
        added = torch.zeros(rows)
    else:
        wanted = ((sums + bias_integers(bias, step)).double() * step.double()).float()
        wanted = torch.where((q != 0).any(dim=1), wanted, bias)
        added, steps = integer_bias(found, bias, data)
    result = ((found.integers.long() @ x + added).double() * steps.double()).float()
    torch.testing.assert_close(result, wanted, rtol=0, atol=0)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 20))
def test_lowest_scale_gives_the_same_values_and_the_next_one_below_does_not(seed, rows, columns):
    q, scale, _ = weights(seed, rows, columns, per_row=True)
    found = lowest_scale(q, scale)
    torch.testing.assert_close(q.float() * found[:, None], q.float() * scale[:, None], rtol=0, atol=0)
    below = torch.nextafter(found, torch.zeros(1))
    other = (q.float() * below[:, None] != q.float() * found[:, None]).any(dim=1)
    assert (other | (q == 0).all(dim=1)).all()


def test_scales_that_leave_integers_unused_are_found():
    """Scales of a user: the largest integers are 40, 9 and 128 (negative only)."""
    for q in ([[40, 7, -3], [9, -9, 2]], [[-128, 5, 77], [-128, 3, 1]]):
        integers = torch.tensor(q, dtype=torch.int8)
        scale = lowest_scale(integers, torch.tensor([0.0123]))
        found = find_integer_weights(integers.float() * scale, None, torch.tensor(0.1))
        assert found is not None
        torch.testing.assert_close(found.integers, integers, rtol=0, atol=0)
        torch.testing.assert_close(found.scale.expand(1), scale, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_on_no_grid_are_refused(bad):
    random = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    assert find_integer_weights(random, None, torch.tensor(0.1)) is None
    assert find_integer_weights(torch.tensor([[1.0, bad]]), None, torch.tensor(0.1)) is None
    assert find_integer_weights(torch.tensor([[127.0]]), torch.tensor([bad]), torch.tensor(0.1)) is None
    off_grid = torch.tensor([0.05003])  # a bias that was never quantized
    assert find_integer_weights(torch.tensor([[127.0, 1.0]]), off_grid, torch.tensor(0.1)) is None


def test_large_biases_keep_the_bits_that_float32_has():
    step = torch.tensor([1e-9])
    for wanted in (2**23 - 1, -(2**23) + 1, 5, 0):
        bias = dequantized_bias(torch.tensor([wanted]), step)
        assert bias_integers(bias, step).tolist() == [wanted]
    for large in (2**31 - 1, -(2**31), 1_234_567_891):
        bias = dequantized_bias(torch.tensor([large]), step)
        found = bias_integers(bias, step)
        assert abs(int(found) - large) <= 2**31 / 2**24
        assert bias_integers(dequantized_bias(found, step), step).tolist() == found.tolist()
