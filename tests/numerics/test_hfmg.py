"""HFMG against a slow float64 formula, its histogram arithmetic, its laws, and odd data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from observer_storage import STORAGES, storage

from amct.errors import CalibrationError
from amct.numerics.affine import fake_quantize
from amct.numerics.counts.histogram import Bins
from amct.numerics.hfmg import HfmgObserver, LinearHistogram, _losses, _losses_by_bin, _losses_by_cell, _ranges
from amct.numerics.settings import HfmgSettings

if TYPE_CHECKING:
    from amct.numerics.qparams import Observed

BINS = 1024
MODERATE = hnp.arrays(np.float32, st.integers(2, 200), elements=st.floats(-100, 100, width=32))


def observed(*batches: torch.Tensor, channel_axis: int | None = None, **settings: object) -> Observed:
    observer = HfmgObserver(HfmgSettings(**{"num_of_bins": BINS, **settings}), channel_axis=channel_axis)
    for batch in batches:
        observer.observe(batch)
    return observer.result()


def normal(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def moved_by_hand(count: np.ndarray, old: tuple[float, float], new: tuple[float, float]) -> np.ndarray:
    """Old bins in new ones, from the description: whole, or split by overlap with the floor going to the lower one."""
    bins = count.size
    width, new_width = (old[1] - old[0]) / bins, (new[1] - new[0]) / bins
    result = np.zeros(bins)
    for place in np.flatnonzero(count):
        begin = old[0] + place * width
        target = min(bins - 1, int((begin - new[0]) / new_width))
        border = new[0] + (target + 1) * new_width
        low = count[place]
        if target < bins - 1 and begin + width > border:
            low = math.floor((border - begin) / width * count[place])
            result[target + 1] += count[place] - low
        result[target] += low
    return result


def loss_by_sampling(count: np.ndarray, width: float, first: int, last: int, cells: int) -> float:
    """The same loss by brute force: many points in every bin."""
    points = (np.arange(4000) + 0.5) / 4000
    cell = width * (last - first + 1) / cells
    total = 0.0
    for place in np.flatnonzero(count):
        x = (place - first + points) * width
        centre = (np.clip(np.floor(x / cell), 0, cells - 1) + 0.5) * cell
        total += count[place] * np.mean((x - centre) ** 2)
    return total


def test_a_batch_is_counted_as_numpy_does():
    values = normal(5_000).numpy()
    low, high = float(values.min()), float(values.max())
    expected, _ = np.histogram(values, BINS, (low, high))
    assert np.abs(LinearHistogram.of(values, BINS, low, high).count - expected).sum() <= 2  # one value on a border


@pytest.mark.parametrize("spread", [0.5, 1.0, 3.0])
def test_a_further_batch_moves_the_bins_by_the_rule(spread):
    first, second = normal(5_000).numpy(), (normal(3_000, seed=2) * spread).numpy()
    before = LinearHistogram.of(first, BINS, float(first.min()), float(first.max()))
    after = before.plus(second)
    assert after.minimum == min(first.min(), second.min())
    assert after.maximum == max(first.max(), second.max())
    added = LinearHistogram.of(second, BINS, after.minimum, after.maximum).count
    moved = moved_by_hand(before.count, (before.minimum, before.maximum), (after.minimum, after.maximum))
    assert np.array_equal(after.count, moved + added)
    assert after.count.sum() == 8_000


def test_the_same_range_simply_adds():
    values = normal(1_000).numpy()
    histogram = LinearHistogram.of(values, BINS, float(values.min()), float(values.max()))
    assert np.array_equal(histogram.plus(values).count, 2 * histogram.count)


@given(hnp.arrays(np.int64, 32, elements=st.integers(0, 9)), st.integers(0, 9), st.integers(20, 31))
def test_the_loss_is_the_distance_to_cell_centres(count, first, last):
    for cells in (16, 64):  # fewer and more than bins: two ways to compute it
        found = _losses(count.astype(np.float64), 0.25, np.array([[first, last]]), cells)[0]
        expected = loss_by_sampling(count, 0.25, first, last, cells)
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-12)  # 4000 points a bin, up to 3 borders in it


def test_both_ways_to_compute_the_loss_agree():
    count = np.random.default_rng(0).poisson(np.exp(-(np.linspace(-4, 4, BINS) ** 2) / 2) * 50).astype(np.float64)
    ranges = _ranges(count, 1, BINS // 4)
    by_cell, by_bin = _losses_by_cell(count, ranges, 256), _losses_by_bin(count, ranges, 256)
    assert by_cell == pytest.approx(by_bin, rel=1e-9)


def test_the_cut_takes_the_thinner_side_and_stops_at_a_quarter():
    count = np.zeros(1024)
    count[0], count[500:600], count[1023] = 1, 100, 1
    ranges = _ranges(count, 1, 256)
    # Both sides pass one bin: the right goes first, then the left side, whose next values are farther away.
    assert ranges[0].tolist() == [0, 1022]
    lefts, rights = ranges[:, 0], ranges[:, 1]
    assert (np.diff(lefts) >= 0).all()
    assert (np.diff(rights) <= 0).all()
    assert rights[-1] - lefts[-1] <= 256 < rights[-2] - lefts[-2]


def test_spreading_keeps_the_mass_and_its_place():
    bins = Bins(np.array([-1.0, 0.0, 0.5]), np.array([0.0, 0.0, 1.0]), np.array([4.0, 3.0, 8.0]))
    histogram = LinearHistogram.spread(bins, 4, -1.0, 1.0)
    assert histogram.count[:2].tolist() == [2.0, 2.0] or histogram.count[1:3].sum() == 5.0
    assert histogram.count[3] == 8.0
    assert histogram.count.sum() == 15.0


def test_spreading_keeps_values_at_the_very_ends():
    bins = Bins(np.array([-1.0, 1.0]), np.array([-1.0, 1.0]), np.array([2.0, 5.0]))
    assert LinearHistogram.spread(bins, 4, -1.0, 1.0).count.tolist() == [2.0, 0.0, 0.0, 5.0]


@pytest.mark.parametrize("asymmetric", [True, False])
def test_the_histogram_of_much_data_chooses_as_well_as_exact_counts(asymmetric):
    x = normal(1_000_000)
    with storage("histogram"):
        streamed = observed(x, asymmetric=asymmetric, num_of_bins=4096)
    exact = observed(x, asymmetric=asymmetric, num_of_bins=4096)
    losses = [
        (fake_quantize(x.double(), factors.scale, factors.offset, 8) - x).square().mean().item()
        for factors in (streamed, exact)
    ]
    assert losses[0] <= 1.01 * losses[1]


def test_at_16_bits_the_ends_are_those_of_exact_counts():
    # So many steps cost nothing: the loss is all in what is cut, and the best range is the widest one tried.
    x = normal(1_000_000)
    with storage("histogram"):
        streamed = observed(x, num_bits=16, num_of_bins=4096)
    exact = observed(x, num_bits=16, num_of_bins=4096)
    bin_width = float(x.max() - x.min()) / 4096 + float(x.abs().max()) * 2**-11
    assert streamed.clip_max.item() == pytest.approx(exact.clip_max.item(), abs=bin_width)
    assert streamed.clip_min.item() == pytest.approx(exact.clip_min.item(), abs=bin_width)


@given(st.lists(MODERATE, min_size=1, max_size=4), st.permutations(range(4)), st.sampled_from(STORAGES))
def test_merging_does_not_depend_on_the_order(batches, order, kind):
    results = []
    with storage(kind):
        for sequence in (range(4), order):
            merged = HfmgObserver(HfmgSettings(num_of_bins=BINS))
            for place in sequence:
                if place < len(batches):
                    shard = HfmgObserver(HfmgSettings(num_of_bins=BINS))
                    shard.begin_batch(place)
                    shard.observe(torch.from_numpy(batches[place]))
                    merged.merge(shard)
            results.append(merged.result())
    assert results[0].scale.item() == results[1].scale.item()
    assert results[0].offset.item() == results[1].offset.item()


@given(st.lists(MODERATE, min_size=1, max_size=3))
def test_streaming_in_pieces_equals_streaming_at_once(batches):
    tensors = [torch.from_numpy(batch) for batch in batches]
    with storage("histogram"):
        assert observed(*tensors).scale.item() == observed(torch.cat(tensors)).scale.item()


@given(MODERATE, st.integers(-8, 20), st.sampled_from(STORAGES))
def test_factors_follow_the_data_by_powers_of_two(values, exponent, kind):
    x = torch.from_numpy(values)
    assume(float(x.max() - x.min()) > 1)
    with storage(kind):
        plain, scaled = observed(x), observed(x * 2.0**exponent)
    assert scaled.scale.item() == plain.scale.item() * 2.0**exponent
    assert scaled.offset.item() == plain.offset.item()


def test_an_observer_merged_with_an_empty_one_stays_the_same():
    observer = HfmgObserver(HfmgSettings(num_of_bins=BINS))
    for seed in (1, 2):
        observer.observe(normal(500, seed) * seed)
    before = observer.result()
    observer.merge(HfmgObserver(HfmgSettings(num_of_bins=BINS)))
    assert observer.result().scale.item() == before.scale.item()


def test_per_channel():
    x = torch.stack([normal(3_000), 10 * normal(3_000, seed=2)], dim=1)
    factors = observed(x, channel_axis=-1)
    alone = [observed(x[:, channel]).scale.item() for channel in (0, 1)]
    assert factors.scale.tolist() == alone


@pytest.mark.parametrize("kind", STORAGES)
def test_degenerate_data(kind):
    with storage(kind):
        assert observed(torch.zeros(5)).scale.item() == 1.0
        assert observed(torch.full((5,), 1e-42)).offset.item() == -128
        assert observed(torch.full((4,), 2.0)).clip_max.item() == pytest.approx(2.0)
        assert observed(torch.full((4,), 2.0), torch.tensor([1.0, 3.0])).clip_max.item() <= 3.0
        assert observed(torch.tensor([1.5])).clip_max.item() == pytest.approx(1.5)
        assert observed(normal(100).half()).scale.item() == observed(normal(100).half().float()).scale.item()
        with pytest.raises(CalibrationError, match="too large for 8 bits"):
            observed(torch.tensor([1.0, 1e30]))
        with pytest.raises(CalibrationError, match="too large for 8 bits"):
            observed(torch.tensor([-3e38, 3e38]))
        with pytest.raises(CalibrationError, match="1 NaN"):
            observed(torch.tensor([1.0, np.nan]))
        with pytest.raises(CalibrationError, match="no activation values"):
            observed(torch.empty(0))
