"""Counts of different values against NumPy; when they give way to a histogram, and that no order matters."""

from __future__ import annotations

import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amct.numerics.counts.histogram import FloatHistogram
from amct.numerics.counts.samples import EXACT_LIMIT, MAX_DISTINCT_VALUES, ObservedValues, ValueCounts, _count_by_torch
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.settings import IfmrSettings

FEW = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -2.5]), st.floats(width=32, allow_nan=False, allow_infinity=False))
ARRAYS = hnp.arrays(np.float32, st.integers(1, 60), elements=FEW)


@given(ARRAYS)
def test_every_value_is_counted(values):
    found = ValueCounts.of(torch.from_numpy(values[None]))
    bits, counts = np.unique(values.view(np.uint32), return_counts=True)
    order = np.argsort(found.bits)
    assert np.array_equal(found.bits[order], bits)
    assert np.array_equal(found.counts[order], counts)
    bins = found.bins()
    assert np.array_equal(np.repeat(bins.low, bins.count.astype(int)), np.sort(values).astype(np.float64))
    assert np.array_equal(bins.low, bins.high)


@given(ARRAYS)
def test_the_way_for_gpus_counts_the_same(values):
    bits, counts = _count_by_torch(torch.from_numpy(values[None]))
    found = ValueCounts.of(torch.from_numpy(values[None]))
    assert dict(zip(bits.tolist(), counts.tolist(), strict=True)) == dict(
        zip(found.bits.tolist(), found.counts.tolist(), strict=True)
    )


@given(ARRAYS, ARRAYS)
def test_together_they_are_the_counts_of_all(first, second):
    parts = [ValueCounts.of(torch.from_numpy(part)) for part in (first, second)]
    joined, once = parts[0].plus(parts[1]), ValueCounts.of(torch.from_numpy(np.concatenate([first, second])))
    order = np.argsort(once.bits)
    assert np.array_equal(joined.bits, once.bits[order])
    assert np.array_equal(joined.counts, once.counts[order])


def test_too_many_different_values_are_none():
    values = torch.arange(MAX_DISTINCT_VALUES + 1, dtype=torch.float32)
    assert ValueCounts.of(values) is None
    kept = ValueCounts.of(values[:-1].repeat(3))
    assert kept.counts.tolist() == [3] * MAX_DISTINCT_VALUES
    assert kept.plus(ValueCounts.of(values[-1:])) is None
    assert kept.plus(ValueCounts.of(values[5:9])).counts.sum() == 3 * MAX_DISTINCT_VALUES + 4


@given(ARRAYS, st.sampled_from([2, 4096]))
def test_a_histogram_takes_counted_values_like_the_values_themselves(values, tail):
    counted = ValueCounts.of(torch.from_numpy(values))
    by_counts, by_values = FloatHistogram(tail=tail), FloatHistogram(tail=tail)
    by_counts.add_counted(counted.values, counted.counts)
    by_values.add(torch.from_numpy(values[None]))
    first, second = by_counts.bins(), by_values.bins()
    for part in ("low", "high", "count"):
        assert np.array_equal(getattr(first, part), getattr(second, part))


def pixels(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 256, (count,), generator=generator).float() / 255


def test_pixels_are_counted_exactly_until_something_else_comes():
    samples = ObservedValues()
    samples.add(pixels(EXACT_LIMIT + 1))
    assert samples.bins(0).low.tolist() == (torch.arange(256).float() / 255).tolist()
    assert len(pickle.dumps(samples)) < 16_384
    many = torch.linspace(0, 1, MAX_DISTINCT_VALUES)
    samples.add(many)
    assert (samples.bins(0).low < samples.bins(0).high).any()
    assert samples.bins(0).count.sum() == EXACT_LIMIT + 1 + MAX_DISTINCT_VALUES


@pytest.mark.parametrize("asymmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 12, 16])
def test_the_search_on_counts_is_the_search_on_the_values(bits, asymmetric):
    x = (pixels(EXACT_LIMIT) - 0.485) / 0.229
    settings = IfmrSettings(num_bits=bits, asymmetric=asymmetric)
    exact, counted = IfmrObserver(settings), IfmrObserver(settings)
    exact.observe(x)
    with mock.patch("amct.numerics.counts.samples.EXACT_LIMIT", 0):
        counted.observe(x)
    assert exact.exact
    assert not counted.exact
    assert counted.result().scale.item() == exact.result().scale.item()
    assert counted.result().offset.item() == exact.result().offset.item()
