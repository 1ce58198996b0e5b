"""Layer comparison against the formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amct.errors import ArgumentError
from amct.numerics.similarity import Comparison


def compare(*batches):
    comparison = Comparison()
    for reference, other in batches:
        comparison.add("layer", torch.as_tensor(reference), torch.as_tensor(other))
    (found,) = comparison.layers()
    return found


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 50))
def test_sums_over_batches_equal_the_formula_over_everything(seed, batches, size):
    random = np.random.default_rng(seed)
    pairs = [random.normal(size=(2, size)).astype(np.float32) for _ in range(batches)]
    found = compare(*pairs)
    x, y = (np.concatenate([pair[side] for pair in pairs]).astype(np.float64) for side in (0, 1))
    assert found.cosine == pytest.approx(x @ y / math.sqrt((x @ x) * (y @ y)), abs=1e-12)
    assert found.sqnr == pytest.approx(10 * math.log10((x @ x) / ((x - y) @ (x - y))), rel=1e-9)
    assert found.mean_squared_error == pytest.approx(((x - y) ** 2).mean(), rel=1e-12)
    assert found.largest_error == np.abs(x - y).max()
    assert found.values == batches * size


def test_limits():
    same = compare(([1.0, -2.0], [1.0, -2.0]))
    assert (same.cosine, same.sqnr, same.largest_error) == (pytest.approx(1.0), math.inf, 0.0)
    assert compare(([0.0], [0.0])).cosine == 1
    assert compare(([0.0], [1.0])).cosine == 0
    assert compare(([0.0], [1.0])).sqnr == -math.inf
    assert compare((torch.empty(0), torch.empty(0))).values == 0


def test_layers_keep_their_order_and_half_precision_is_summed_in_float64():
    comparison = Comparison()
    large = torch.full((3,), 60000.0, dtype=torch.float16)
    for name in ("b", "a"):
        comparison.add(name, large, large)
    assert [found.layer for found in comparison.layers()] == ["b", "a"]
    assert comparison.layers()[0].cosine == pytest.approx(1.0)


def test_different_shapes_are_refused():
    with pytest.raises(ArgumentError, match=r'layer "a": outputs of different shapes.*\[2\] and \[3\]'):
        Comparison().add("a", torch.zeros(2), torch.zeros(3))
