"""The noise model against a plain float64 formula, and against rounding itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from amct.numerics.rounding import RoundingNoise


def expected_noise(weight, low, high, power, factors, *, one_scale):
    groups, rows, channels, taps = weight.shape
    step = ((high / factors).max() - (low / factors).min()) / 255
    total = 0.0
    scales = np.empty((groups, rows))
    for group in range(groups):
        own = slice(group * channels, (group + 1) * channels)
        scaled = weight[group] * factors[own][None, :, None]
        scales[group] = np.abs(scaled).max((1, 2)) / 127
        total += step**2 / 12 * (scaled**2).sum()
    if one_scale:
        scales[:] = scales.max()
    for group in range(groups):
        own = slice(group * channels, (group + 1) * channels)
        total += (scales[group] ** 2 / 12).sum() * taps * (power[own] / factors[own] ** 2).sum()
    return total


@pytest.mark.parametrize("one_scale", [False, True])
def test_the_noise_is_that_of_the_formula(one_scale):
    random = np.random.default_rng(4)
    weight = random.normal(size=(2, 3, 4, 5))
    low, high = -random.uniform(0, 2, 8), random.uniform(1, 3, 8)
    power, factors = random.uniform(0.1, 1, 8), random.uniform(0.2, 2, 8)
    noise = RoundingNoise(*map(torch.from_numpy, (weight, low, high, power)), one_scale=one_scale)
    expected = expected_noise(weight, low, high, power, factors, one_scale=one_scale)
    assert noise.power(torch.from_numpy(factors)) == pytest.approx(expected, rel=1e-12)


def test_rounding_makes_as_much_noise_as_expected():
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(20000, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    low, high = x.amin(0).clamp(max=0), x.amax(0).clamp(min=0)
    step = (high.max() - low.min()) / 255
    scales = weight.abs().amax(1, keepdim=True) / 127
    exact = x @ weight.t()
    rounded = (torch.round(x / step) * step) @ (torch.round(weight / scales) * scales).t()
    measured = (rounded - exact).square().mean(0).sum()
    noise = RoundingNoise(weight[None, :, :, None], low, high, x.square().mean(0))
    assert noise.power(torch.ones(16)) == pytest.approx(float(measured), rel=0.2)
