"""Low-rank factors: exact at full rank, best of their rank, and the estimated rank is that of the paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch.nn import functional

from amct.numerics.low_rank import (
    ResponseMoments,
    Separation,
    _Minimum,
    estimated_rank,
    response_factors,
)

SEPARATIONS = [Separation(output_rows=rows, height_rows=height) for rows in (True, False) for height in (True, False)]


def convolve(x, *weights):
    for weight in weights:
        x = functional.conv2d(x, weight, padding=(weight.shape[2] // 2, weight.shape[3] // 2))
    return x


@pytest.mark.parametrize("separation", SEPARATIONS, ids=str)
@pytest.mark.parametrize("kernel", [(3, 3), (3, 5), (5, 1)], ids=str)
def test_factors_of_full_rank_compute_the_same(separation, kernel):
    torch.manual_seed(1)
    weight = torch.randn(6, 4, *kernel, dtype=torch.float64)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    rank = min(separation.matrix(weight).shape)

    factors = separation.factors(weight, rank)

    torch.testing.assert_close(convolve(x, factors.first, factors.last), convolve(x, weight), rtol=0, atol=1e-11)
    assert sorted([factors.first.shape[2:], factors.last.shape[2:]]) == sorted([(kernel[0], 1), (1, kernel[1])])


@pytest.mark.parametrize("separation", SEPARATIONS, ids=str)
def test_factors_are_the_best_of_their_rank(separation):
    """The error of a truncated singular value decomposition: by the theorem of Eckart and Young nothing is better."""
    torch.manual_seed(2)
    weight = torch.randn(5, 7, 3, 3, dtype=torch.float64)
    impulse = torch.zeros(1, 7, 7, 7, dtype=torch.float64)
    lost = 0.0
    for channel in range(7):
        x = impulse.clone()
        x[0, channel, 3, 3] = 1
        factors = separation.factors(weight, 4)
        lost += float((convolve(x, factors.first, factors.last) - convolve(x, weight)).square().sum())

    values = np.linalg.svd(separation.matrix(weight).numpy(), compute_uv=False)
    assert lost == pytest.approx((values[4:] ** 2).sum(), rel=1e-9)


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "noise"), [(60, 150, 8, 0.5), (96, 96, 20, 1.0), (96, 300, 30, 1.0)]
)
def test_the_rank_below_noise_is_found(rows, columns, rank, noise):
    random = np.random.default_rng(3)
    signal = random.normal(size=(rows, rank)) @ random.normal(size=(rank, columns))
    values = np.linalg.svd(signal + noise * random.normal(size=(rows, columns)), compute_uv=False)

    assert estimated_rank(values, columns) == rank


def test_a_matrix_of_zeros_has_no_rank():
    assert estimated_rank(np.zeros(8), 12) == 0


@given(st.integers(0, 10_000), st.floats(0.01, 3), st.floats(1.01, 30))
def test_the_minimum_is_that_of_scipy(seed, lowest, ratio):
    """SciPy's bounded Brent is another implementation of the same method."""
    centres = np.random.default_rng(seed).uniform(lowest, lowest * ratio, 3)

    def function(x):
        return float(np.sum(np.abs(x - centres) ** 1.5) + math.sin(5 * x))

    found = _Minimum(function, lowest, lowest * ratio).best[1]
    expected = minimize_scalar(function, bounds=(lowest, lowest * ratio), method="bounded", options={"xatol": 1e-5})
    assert found == pytest.approx(expected.x, abs=2e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_factors_by_responses_lose_the_smallest_components(bias):
    """The error is the variance of the components left out, and the mean is kept: the law of principal components."""
    torch.manual_seed(4)
    layer = torch.nn.Conv2d(3, 10, 3, bias=bias).double()
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64) + 0.5
    with torch.no_grad():
        responses = layer(x)
        moments = ResponseMoments(10)
        for part in responses.split(2):
            moments.add(part.movedim(1, -1))

        factors, shift = response_factors(layer.weight, layer.bias, moments, 4)
        got = functional.conv2d(functional.conv2d(x, factors.first), factors.last, shift)

    rows = responses.movedim(1, -1).flatten(0, -2)
    variances = np.linalg.eigvalsh(np.cov(rows.numpy(), rowvar=False, bias=True))
    error = (got - responses).movedim(1, -1).flatten(0, -2)
    assert float(error.square().sum(dim=1).mean()) == pytest.approx(variances[:6].sum(), rel=1e-9)
    torch.testing.assert_close(error.mean(dim=0), torch.zeros(10, dtype=torch.float64), rtol=0, atol=1e-10)
