"""The order of elimination against direct least squares in NumPy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amct.numerics.pruning import Reader, elimination_order, with_ridge


def error_without(covariance, weight, kept):
    """The mean square error of W·x when only some channels are there and their weights are refitted."""
    solved = np.linalg.solve(covariance[np.ix_(kept, kept)], covariance[kept] @ weight.T)
    return float(np.trace(weight @ covariance @ weight.T - weight @ covariance[:, kept] @ solved))


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 2))
@settings(max_examples=30)
def test_each_step_removes_the_channel_of_least_growth(seed, channels, readers):
    random = np.random.default_rng(seed)
    weights = [random.standard_normal((3, channels)) for _ in range(readers)]
    data = [random.standard_normal((40, channels)) @ random.standard_normal((channels, channels)) for _ in weights]
    covariances = [np.asarray(with_ridge(torch.tensor(np.cov(x.T, bias=True)))) for x in data]
    made = [
        # the ridge is added once more inside: compare with the matrix that has it twice
        Reader(covariance=torch.tensor(c), products=torch.tensor(w.T @ w), places=torch.arange(channels))
        for c, w in zip(covariances, weights, strict=True)
    ]
    order, growth = elimination_order(made)
    assert sorted(order) == list(range(channels))
    inner = [np.asarray(with_ridge(torch.tensor(c))) for c in covariances]
    powers = [np.trace(w @ c @ w.T) for c, w in zip(inner, weights, strict=True)]
    left = list(range(channels))
    for step, chosen in enumerate(order[:-1], start=1):
        totals = {
            channel: sum(
                error_without(c, w, [k for k in left if k != channel]) / p
                for c, w, p in zip(inner, weights, powers, strict=True)
            )
            for channel in left
        }
        assert totals[chosen] <= min(totals.values()) * (1 + 1e-6) + 1e-9
        np.testing.assert_allclose(sum(growth[:step]), totals[chosen], rtol=1e-6, atol=1e-9)
        left.remove(chosen)


def test_a_channel_that_others_explain_goes_first():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    x = torch.cat([x, x[:, :1] - x[:, 1:2]], dim=1)  # the last is a difference of the first two
    reader = Reader(covariance=torch.cov(x.T), products=torch.eye(4), places=torch.arange(4))
    assert elimination_order([reader])[0][0] in (0, 1, 3)
