"""Factors that make channels equal: the noise they are chosen by is the noise that rounding makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amct.numerics.balancing import FLOORS, ChannelRanges, ChannelStatistics, ConsumerNoise, choose_factors


def ranges(high, low=None, variance=None):
    """As if all pictures had the same extremes."""
    low = torch.zeros_like(high) if low is None else low
    spread = high.square() / 12 if variance is None else variance
    return ChannelRanges(low=low, high=high, typical=torch.maximum(high, -low), variance=spread)


def measured_noise(x, weight, factors, groups):
    """The power of the error of ``x @ weight`` in each result, when data and weights are rounded; float64."""
    scaled = x / factors
    step = (scaled.max().clamp(min=0) - scaled.min().clamp(max=0)) / 255
    rounded = torch.round(scaled / step) * step
    noise = 0.0
    for part, rows in enumerate(weight):  # rows: [rows, channels of a group, taps]
        columns = slice(part * rows.shape[1], (part + 1) * rows.shape[1])
        exact = rows * factors[columns, None]
        scale = exact.abs().amax((1, 2), keepdim=True) / 127
        integers = torch.round(exact / scale) * scale
        for tap in range(rows.shape[2]):
            real = x[:, columns] @ rows[:, :, tap].T
            from_data = rounded[:, columns] @ exact[:, :, tap].T - real
            from_weights = scaled[:, columns] @ (integers - exact)[:, :, tap].T
            noise += float(from_data.square().mean(0).sum() + from_weights.var(0, correction=0).sum())
    assert groups == len(weight)
    return noise


@pytest.mark.parametrize(("groups", "channels"), [(1, 24), (24, 24), (4, 24)])
def test_noise_is_what_rounding_makes(groups, channels):
    """Rounding errors are uniform and independent of each other: their powers add up."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand(4000, channels, generator=random, dtype=torch.float64)
    x = x * torch.logspace(-1.5, 0, channels, dtype=torch.float64)
    rows = 48 // groups
    weight = torch.randn(groups, rows, channels // groups, 25, generator=random, dtype=torch.float64)
    reader = ConsumerNoise(weight, ranges(x.amax(0), variance=x.var(0, correction=0)))
    for factors in (torch.ones(channels, dtype=torch.float64), torch.linspace(0.2, 1, channels, dtype=torch.float64)):
        # The largest weight of a row is exact, of a depthwise one that is one of 25; the rest is chance.
        assert reader.noise(factors) == pytest.approx(measured_noise(x, weight, factors, groups), rel=0.1)


def test_one_scale_for_all_rows_is_the_largest():
    weight = torch.ones(1, 2, 3, 1)
    weight[0, 1] = 10
    still = ranges(torch.zeros(3), variance=torch.ones(3))
    ones = torch.ones(3)
    # No data noise; of the weights: 2 rows x 3 channels with steps 1 and 10, or 10 and 10.
    assert ConsumerNoise(weight, still).noise(ones) == pytest.approx(3 * (1 + 100) / 127**2 / 12)
    assert ConsumerNoise(weight, still, one_scale=True).noise(ones) == pytest.approx(3 * 200 / 127**2 / 12)


def test_depthwise_channels_become_equal():
    high = torch.tensor([1.0, 4.0, 0.5, 2.0], dtype=torch.float64)
    reader = ConsumerNoise(torch.ones(4, 1, 1, 9), ranges(high))
    factors = choose_factors([(reader, 0)], 4)
    assert torch.allclose(factors, high / 4)
    assert torch.equal(reader.factors, factors)


def test_channels_that_were_never_seen_stay():
    high = torch.tensor([8.0, 0.0, 1.0, 8.0], dtype=torch.float64)
    factors = choose_factors([(ConsumerNoise(torch.ones(4, 1, 1, 9), ranges(high)), 0)], 4)
    assert factors.tolist() == [1.0, 1.0, 0.125, 1.0]


def test_equal_channels_are_left_alone():
    one = torch.ones(5, dtype=torch.float64)
    reader = ConsumerNoise(torch.ones(1, 4, 5, 1), ranges(one, low=-one))
    assert choose_factors([(reader, 0)], 5) is None
    assert torch.equal(reader.factors, one)


@pytest.mark.parametrize("value", [0.0, torch.inf])
def test_data_without_a_size_is_left_alone(value):
    size = torch.full((3,), value, dtype=torch.float64)
    reader = ConsumerNoise(torch.ones(1, 2, 3, 1), ranges(size, low=-size))
    assert choose_factors([(reader, 0)], 3) is None


@given(seed=st.integers(0, 2**16), first=st.integers(0, 3), groups=st.sampled_from([1, 2, 8]))
def test_what_is_chosen_is_never_worse(seed, first, groups):
    """Of a part of the channels that two layers read, in different places; the other channels keep factor one."""
    random = np.random.default_rng(seed)

    def reader(parts):
        high = torch.tensor(random.lognormal(0, 2, 8))
        weight = torch.tensor(random.standard_normal((parts, 6, 8 // parts, 2)))
        return ConsumerNoise(weight, ranges(high, low=-high * float(random.uniform(0, 2))))

    readers = [(reader(groups), first), (reader(1), 3 - first)]
    ones = torch.ones(8, dtype=torch.float64)
    before = sum(each.noise(ones) for each, _ in readers)
    factors = choose_factors(readers, 4)
    assert sum(each.noise(each.factors) for each, _ in readers) <= before
    if factors is not None:
        assert factors.shape == (4,)
        assert float(factors.min()) >= min(FLOORS)
        assert float(factors.max()) <= 1
        for each, place in readers:
            assert torch.equal(each.factors[place : place + 4], factors)
            assert int((each.factors != 1).sum()) <= 4


@given(seed=st.integers(0, 2**16), pieces=st.sampled_from([1, 2, 3, 6]))
def test_statistics_do_not_depend_on_batches(seed, pieces):
    x = np.random.default_rng(seed).normal(1, 2, (6, 3, 4, 5))
    statistics = ChannelStatistics()
    for part in np.split(x, pieces):
        statistics.add(torch.tensor(part))
    found = statistics.result()
    flat = x.reshape(6, 3, -1)
    np.testing.assert_allclose(found.low, np.minimum(flat.min((0, 2)), 0), rtol=1e-12)
    np.testing.assert_allclose(found.high, np.maximum(flat.max((0, 2)), 0), rtol=1e-12)
    np.testing.assert_allclose(found.typical, np.abs(flat).max(2).mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.variance, flat.transpose(1, 0, 2).reshape(3, -1).var(1), rtol=1e-9)


def test_a_channel_that_is_large_once_is_not_enlarged_at_the_cost_of_all():
    """Its one picture dictates the step; dividing it further would make the step larger."""
    high = torch.tensor([10.0, 10.0, 10.0], dtype=torch.float64)
    once = ChannelRanges(
        low=torch.zeros(3),
        high=high,
        typical=torch.tensor([10.0, 10.0, 0.5], dtype=torch.float64),
        variance=high.square() / 12,
    )
    assert choose_factors([(ConsumerNoise(torch.ones(3, 1, 1, 9), once), 0)], 3) is None
