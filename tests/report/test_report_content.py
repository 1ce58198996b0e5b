"""What a report holds, and how activations become it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amct.errors import ArgumentError
from amct.numerics.affine import integer_range, quantize
from amct.numerics.counts.histogram import Bins
from amct.numerics.qparams import QParams
from amct.report.activations import InputStatistics, bars
from amct.report.content import LARGEST_BARS, Histogram, WeightRanges


@pytest.mark.parametrize("counts", [(), (1,) * (LARGEST_BARS + 1)])
def test_a_histogram_has_some_bars_but_not_too_many(counts):
    with pytest.raises(ArgumentError, match=r"counts: expected 1\.\.64 bars"):
        Histogram(low=0, high=1, counts=counts)


@pytest.mark.parametrize("high", [1.0, 0.0, float("nan")])
def test_a_histogram_has_a_width(high):
    with pytest.raises(ArgumentError, match="low < high"):
        Histogram(low=1.0, high=high, counts=(1,))


def test_ranges_come_in_pairs():
    with pytest.raises(ArgumentError, match="got 1 and 2"):
        WeightRanges(minimum=(0.0,), maximum=(1.0, 2.0))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300), st.integers(1, 50))
def test_joined_ranges_are_few_and_lose_no_extreme(values, limit):
    ranges = WeightRanges(minimum=tuple(-abs(value) for value in values), maximum=tuple(abs(value) for value in values))
    joined = ranges.joined(limit)
    assert len(joined.minimum) == len(joined.maximum) <= limit
    assert (min(joined.minimum), max(joined.maximum)) == (min(ranges.minimum), max(ranges.maximum))
    assert (len(joined.minimum) - 1) * joined.channels_each < len(values) <= len(joined.minimum) * joined.channels_each


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=200), st.integers(-128, 127))
def test_clipped_and_saturated_follow_the_integers(values, offset):
    scale, bits = 0.1, 8
    x = torch.tensor(values)
    statistics = InputStatistics(QParams.of(float(np.float32(scale)), offset, bits))
    for piece in x.split(7):
        statistics.add(piece)
    found = statistics.result()
    lowest, highest = integer_range(bits)
    wide = torch.round(x * torch.tensor(scale).reciprocal()).long() + offset
    integers = quantize(x, torch.tensor(scale), torch.tensor(offset, dtype=torch.int32), bits).long()
    at_end = (integers == lowest) | (integers == highest)
    harmless = wide == offset  # zero itself, on its own integer
    assert found.clipped == pytest.approx(float((wide != integers).double().mean()), abs=1e-12)
    assert found.saturated == pytest.approx(float((at_end & ~harmless).double().mean()), abs=1e-12)
    assert (found.minimum, found.maximum) == (float(x.min()), float(x.max()))


def test_zeros_after_a_relu_are_no_saturation():
    statistics = InputStatistics(QParams.of(0.1, -128))
    statistics.add(torch.tensor([0.0] * 9 + [30.0]))
    found = statistics.result()
    assert (found.clipped, found.saturated) == (0.1, 0.1)
    assert (found.clip_low, found.clip_high) == (0.0, pytest.approx(25.5))


def test_bars_count_like_numpy_up_to_the_width_of_a_bin():
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    statistics = InputStatistics(QParams.of(6 / 255))
    for piece in x.split(3000):
        statistics.add(piece)
    found = statistics.result().histogram
    expected, _ = np.histogram(x.numpy(), bins=64, range=(found.low, found.high))
    # A bin of the counts is at most half a bar wide, so only values that near an edge may be in the neighbour's bar.
    assert np.abs(np.cumsum(found.counts) - np.cumsum(expected)).max() <= expected.max() / 2
    assert sum(found.counts) + found.below + found.above == 20_000


def test_a_far_outlier_does_not_squeeze_the_picture():
    statistics = InputStatistics(QParams.of(0.1))
    statistics.add(torch.tensor([*np.linspace(-5, 5, 100), 1e30], dtype=torch.float32))
    found = statistics.result()
    assert found.histogram.above == 1
    assert found.histogram.high <= 2 * found.clip_high - found.clip_low
    assert found.maximum == pytest.approx(1e30)
    assert sum(found.histogram.counts) == 100


def test_values_that_are_not_finite_are_left_out_and_nothing_is_none():
    statistics = InputStatistics(QParams.of(0.1))
    statistics.add(torch.tensor([float("nan"), float("inf")]))
    assert statistics.result() is None
    statistics.add(torch.tensor([1.0, float("-inf")], dtype=torch.float16))
    assert statistics.result().maximum == 1.0


def test_bars_put_the_largest_value_into_the_last_bar():
    points = np.array([0.0, 1.0])
    found = bars(Bins(points, points, np.ones(2)), 0.0, 1.0, 4)
    assert (found.counts, found.below, found.above) == ((1, 0, 0, 1), 0, 0)
