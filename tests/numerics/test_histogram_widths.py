"""A histogram counts in 32 bits, and in 64 before that could be too few: the counts are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from amct.numerics.counts import histogram as module
from amct.numerics.counts.histogram import CHANNEL_MANTISSA_BITS, MANTISSA_BITS, FloatHistogram


def batches(channels, size):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(channels, size, generator=generator) for _ in range(3)]


@pytest.mark.parametrize(
    ("channels", "bits", "size"),
    [(1, MANTISSA_BITS, 1000), (1, MANTISSA_BITS, 50_000), (4, CHANNEL_MANTISSA_BITS, 300)],
    ids=["few", "many", "channels"],
)
def test_wide_counts_are_those_of_narrow_ones(monkeypatch, channels, bits, size):
    data = batches(channels, size)
    narrow = FloatHistogram(channels, bits, tail=8)
    for rows in data:
        narrow.add(rows)
    monkeypatch.setattr(module, "_LARGEST_NARROW_TOTAL", 2 * size)
    wide, other = FloatHistogram(channels, bits, tail=8), FloatHistogram(channels, bits, tail=8)
    for rows in data[:2]:
        wide.add(rows)
    other.add(data[2])
    wide.merge(other)
    for channel in range(channels):
        want, got = narrow.bins(channel), wide.bins(channel)
        assert want.count.sum() == 3 * size
        for one, two in zip((want.low, want.high, want.count), (got.low, got.high, got.count), strict=True):
            np.testing.assert_array_equal(one, two)


def test_more_values_than_32_bits_can_count():
    value, often = np.array([1.5], np.float32), np.array([3 << 30], np.int64)
    histogram = FloatHistogram(1, MANTISSA_BITS, tail=8)
    for _ in range(3):
        histogram.add_counted(value, often)
    assert histogram.bins().count.tolist() == [9 << 30]
