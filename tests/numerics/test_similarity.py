"""The comparison of two outputs against NumPy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from amct.numerics.similarity import Comparison


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 7, 1 << 14, (1 << 14) + 1, 50_000])  # a chunk has 2^14 values
def test_sums_of_two_batches(count, dtype):
    random = np.random.default_rng(count)
    batches = [torch.from_numpy(random.standard_normal((2, count))).to(dtype) for _ in range(2)]
    compared = Comparison()
    for x, y in batches:
        compared.add("layer", x, (x + 0.1 * y).to(dtype))
    x = torch.cat([x for x, _ in batches]).double().numpy()
    y = torch.cat([(x + 0.1 * y).to(dtype) for x, y in batches]).double().numpy()
    (found,) = compared.layers()
    error = np.square(x - y).sum()
    assert found.sqnr == pytest.approx(10 * math.log10(np.square(x).sum() / error), abs=1e-9)
    assert found.cosine == pytest.approx((x * y).sum() / math.sqrt(np.square(x).sum() * np.square(y).sum()), abs=1e-12)
    assert found.mean_squared_error == pytest.approx(error / x.size, rel=1e-12)
    assert found.largest_error == np.abs(x - y).max()
    assert found.values == x.size


def test_views_and_nothing():
    x = torch.randn(4, 6)
    compared = Comparison()
    compared.add("layer", x.T, x.T.clone())
    compared.add("layer", x[:0], x[:0])
    (found,) = compared.layers()
    assert (found.sqnr, found.largest_error, found.values) == (math.inf, 0.0, 24)


def test_nan_is_the_worst():
    x = torch.tensor([1.0, float("nan")])
    compared = Comparison()
    compared.add("layer", torch.ones(2), x)
    (found,) = compared.layers()
    assert math.isnan(found.sqnr) or found.sqnr == -math.inf
