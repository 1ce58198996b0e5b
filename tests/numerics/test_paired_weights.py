"""Weights whose pairs fit 16-bit sums: against brute force, the worst inputs, and 7 bits, which need no bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amct.numerics.arq import WeightKind, arq
from amct.numerics.rounding import (
    adds_pairs,
    paired,
    paired_scale,
    round_cancelling_errors,
    rounded_within_limit,
    unpaired,
    within_limit,
)

SHAPES = [(4, 3, 3, 3), (6, 8, 1, 1), (5, 7), (3, 1, 5), (8, 64, 3, 3), (16, 192, 1, 1), (2, 1, 1, 1)]
KINDS = {
    "normal": lambda random, shape: random.normal(size=shape),
    "heavy-tailed": lambda random, shape: random.laplace(size=shape),
    "positive": lambda random, shape: random.random(shape),
    "two values": lambda random, shape: random.choice([-1.0, 1.0], shape),
    "all the largest": lambda _, shape: np.full(shape, -0.5),
    "zero": lambda _, shape: np.zeros(shape),
}


def saturated(values, weight):
    """``vpmaddubsw`` and the sum of its results, and the exact sum; ``weight`` ``[Cout, K]`` in the kernel's order."""
    products = values.astype(np.int64) * weight.astype(np.int64)
    products = np.pad(products, ((0, 0), (0, products.shape[1] % 2))).reshape(len(weight), -1, 2)
    return np.clip(products.sum(-1), -(2**15), 2**15 - 1).sum(-1), products.sum((1, 2))


def in_kernel_order(weight):
    """Kernel positions, then inputs; written without the product's code."""
    return np.moveaxis(weight, 1, -1).reshape(len(weight), -1)


def rounded(weight):
    scale = paired_scale(weight)
    return round_cancelling_errors(weight, scale, 8, bounded_pairs=True), scale


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_nothing_saturates(make, shape):
    random = np.random.default_rng(0)
    integers, scale = rounded(torch.tensor(make(random, shape), dtype=torch.float32))
    assert integers.dtype == torch.int8
    assert scale.shape == (shape[0],)
    weight = in_kernel_order(integers.numpy())
    inputs = [np.where(weight > 0, 255, 0), np.where(weight < 0, 255, 0), np.full(weight.shape, 255)]
    inputs += [random.integers(0, 256, weight.shape) for _ in range(20)]
    for values in inputs:
        with_pairs, exact = saturated(values, weight)
        np.testing.assert_array_equal(with_pairs, exact)


def test_eight_bits_without_the_bound_do_saturate():
    weight = torch.tensor(np.random.default_rng(0).normal(size=(8, 64, 3, 3)), dtype=torch.float32)
    integers = round_cancelling_errors(weight, arq(weight, kind=WeightKind.CONV).scale, 8)
    with_pairs, exact = saturated(np.where((rows := in_kernel_order(integers.numpy())) > 0, 255, 0), rows)
    assert (with_pairs != exact).any()


def error(weight, integers, scale):
    wide = scale.double().reshape(-1, *[1] * (weight.ndim - 1))
    return float((integers * wide - weight).square().sum())


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if np.prod(shape[1:]) > 8], ids=str)
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "positive"])
def test_the_error_is_below_that_of_seven_bits(kind, shape):
    weight = torch.tensor(KINDS[kind](np.random.default_rng(1), shape), dtype=torch.float32)
    seven = arq(weight, kind=WeightKind.CONV, bits=7).scale
    gain = error(weight, round_cancelling_errors(weight, seven, 7), seven) / error(weight, *rounded(weight))
    # Random signs leave half of the pairs unbounded; where all are positive, the largest neighbours decide the scale.
    assert gain > (1.0 if kind == "positive" else 1.6)


def test_weights_whose_pairs_are_small_keep_the_grid_of_eight_bits():
    weight = torch.tensor(np.random.default_rng(2).normal(size=(4, 8, 3, 3)), dtype=torch.float32)
    weight[:, 1::2] *= -torch.sign(weight[:, ::2]) * torch.sign(weight[:, 1::2])  # neighbours have different signs
    largest = weight.abs().amax((1, 2, 3))
    torch.testing.assert_close(paired_scale(weight), largest / 127)


def test_neighbours_that_are_all_the_largest_have_seven_bits():
    integers, scale = rounded(torch.full((2, 6), 0.3))
    np.testing.assert_array_equal(integers.numpy(), 64)
    torch.testing.assert_close(scale, torch.full((2,), 0.3 / 64))


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.floats(-127, 127), st.floats(-127, 127)))
def test_a_pair_is_rounded_to_the_nearest_pair_that_fits(values):
    exact = torch.tensor([values], dtype=torch.float64)
    found = rounded_within_limit(within_limit(exact))[0].numpy()
    grid = np.stack(np.meshgrid(np.arange(-127, 128), np.arange(-127, 128)), -1).reshape(-1, 2)
    grid = grid[(np.prod(grid, 1) <= 0) | (np.abs(grid).sum(1) <= 128)]
    distances = np.square(grid - np.array(values)).sum(1)
    assert any(np.array_equal(found, each) for each in grid)
    assert np.square(found - np.array(values)).sum() == pytest.approx(distances.min(), abs=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_and_weights_convert_both_ways(shape):
    weight = torch.randn(shape)
    pairs = paired(weight)
    np.testing.assert_array_equal(pairs.flatten(1)[:, : weight[0].numel()], in_kernel_order(weight.numpy()))
    assert torch.equal(unpaired(pairs, weight.shape), weight)


def test_only_depthwise_kernels_add_no_pairs():
    assert not adds_pairs((32, 1, 3, 3), 32)
    assert adds_pairs((32, 1, 3, 3), 16)
    assert adds_pairs((32, 2, 3, 3), 16)
    assert adds_pairs((32, 8), 1)
