"""What an observer remembers does not grow with the data it sees."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
import torch

from amct.errors import ArgumentError
from amct.numerics.counts import samples
from amct.numerics.counts.histogram import SHORT_TAIL
from amct.numerics.counts.samples import EXACT_LIMIT, SMALL_EXACT_LIMIT, Samples
from amct.numerics.ifmr import IfmrObserver


def batch(seed: int, count: int = 200_000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def peak_of_observing(batches: int, count: int) -> int:
    """NumPy tells tracemalloc of every array, so this sees buffers and histograms alike."""
    tracemalloc.start()
    observer = IfmrObserver()
    for seed in range(batches):
        observer.observe(batch(seed, count))
    observer.result()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_no_number_of_batches_needs_more_than_the_exact_search_did():
    for count in (EXACT_LIMIT, EXACT_LIMIT + 1):  # loading compiled code takes memory of its own
        peak_of_observing(1, count)
    exact = peak_of_observing(5, EXACT_LIMIT // 5)
    assert exact < 16 << 20
    assert peak_of_observing(6, EXACT_LIMIT // 5) < exact
    assert peak_of_observing(40, EXACT_LIMIT // 5) < exact


def test_one_large_batch_needs_no_copy():
    peak_of_observing(1, EXACT_LIMIT + 1)
    assert peak_of_observing(1, 4_000_000) < 8 << 20  # the batch alone has 16 MB


def test_the_state_is_small_enough_to_send():
    observer = IfmrObserver()
    for seed in range(10):
        observer.observe(batch(seed))
    size = len(pickle.dumps(observer))
    assert size < 1 << 20
    for seed in range(10, 30):
        observer.observe(batch(seed))
    # Three times the data reaches less than two powers of two nearer to zero, and one farther out, on both sides.
    # Up to eight times as many values as a tail may keep wait until they are looked through.
    assert len(pickle.dumps(observer)) < size + 6 * (16 << 10) + 8 * SHORT_TAIL * 4 + 1024
    assert pickle.loads(pickle.dumps(observer)).result().scale.item() == observer.result().scale.item()


def test_an_observed_tensor_may_change_afterwards():
    x = torch.ones(10)
    observer = IfmrObserver()
    observer.observe(x)
    before = observer.result().scale.item()
    x.fill_(100.0)
    assert observer.result().scale.item() == before


def test_all_values_are_kept_up_to_the_limit():
    samples = Samples()
    samples.add(batch(0, 1000).reshape(10, 100))
    samples.add(batch(1, 50))
    assert samples.exact
    assert np.array_equal(samples.sorted_values(0), torch.cat([batch(0, 1000), batch(1, 50)]).sort().values.numpy())
    assert [piece.size for piece in samples.batches_of(0)] == [1000, 50]


def test_a_histogram_ends_at_the_exact_minimum_and_maximum():
    x = batch(3, EXACT_LIMIT + 1)
    samples = Samples()
    samples.add(x)
    bins = samples.bins(0)
    assert (bins.low[0], bins.high[-1]) == (float(x.min()), float(x.max()))
    assert bins.count.sum() == x.numel()


def test_a_refused_merge_changes_nothing():
    first, second = Samples(channel_axis=0), Samples(channel_axis=0)
    first.add(torch.ones(2, 3))
    second.add(torch.ones(3, 3))
    with pytest.raises(ArgumentError, match="2 before, now 3"):
        first.merge(second)
    assert (first.merged, first.range.batches, first.range.count) == (False, 1, 6)


def test_values_that_will_be_many_are_counted_at_once_and_the_choice_is_the_same():
    batches = [batch(seed) for seed in range(7)]
    told, plain = IfmrObserver(), IfmrObserver()
    told.expect(sum(each.numel() for each in batches))
    for each in batches:
        told.observe(each)
        plain.observe(each)
        assert not told.exact
    assert not plain.exact
    assert told.result() == plain.result()


def test_values_that_will_be_few_are_kept():
    observer = IfmrObserver()
    observer.expect(EXACT_LIMIT)
    observer.observe(batch(0))
    observer.expect(EXACT_LIMIT + 1)  # too late to matter
    assert observer.exact
    per_channel = IfmrObserver(channel_axis=0)
    per_channel.expect(EXACT_LIMIT + 1)
    assert per_channel.exact


def test_fewer_values_are_kept_where_not_all_are_counted():
    for values, kept in ((SMALL_EXACT_LIMIT, True), (SMALL_EXACT_LIMIT + 1, False)):
        samples = Samples(counts_all=False)
        samples.add(torch.randn(values, generator=torch.Generator().manual_seed(0)))
        assert samples.exact is kept
        expecting = Samples(counts_all=False)
        expecting.expect(values)
        assert expecting.exact is kept
    assert SMALL_EXACT_LIMIT < EXACT_LIMIT


KINDS = {
    "few values": lambda seed: batch(seed, 500),
    "few distinct values": lambda seed: (batch(seed, 3000) * 8).round(),
    "counted": lambda seed: batch(seed, 3000) * 10 ** torch.randn((), generator=torch.Generator().manual_seed(seed)),
}


def assert_same_arrays(first, second):
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(np.sort(array), np.sort(second[name]), err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [1, 3])
def test_a_stored_observer_goes_on_as_if_it_had_not_been_stored(monkeypatch, kind, before):
    monkeypatch.setattr(samples, "EXACT_LIMIT", 2500)
    whole, first, second = (IfmrObserver(bits=8, asymmetric=False) for _ in range(3))
    batches = [KINDS[kind](seed) for seed in range(5)]
    for each in batches:
        whole.observe(each)
    for each in batches[:before]:
        first.observe(each)
    stored = first.arrays()
    second.restore({name: array.copy() for name, array in stored.items()})
    assert_same_arrays(second.arrays(), stored)
    for each in batches[before:]:
        second.observe(each)
    found, expected = second.result(), whole.result()
    assert (found.scale, found.offset, found.clip_max) == (expected.scale, expected.offset, expected.clip_max)
    assert_same_arrays(second.arrays(), whole.arrays())


def test_what_is_stored_is_bounded():
    observer = IfmrObserver()
    observer.observe(batch(0, EXACT_LIMIT + 1))
    assert sum(array.nbytes for array in observer.arrays().values()) < 1 << 20


DAMAGED = [
    lambda arrays: arrays.pop("bins"),
    lambda arrays: arrays.update(bins=arrays["bins"] + (1 << 40)),
    lambda arrays: arrays.update(bins=arrays["bins"] - (1 << 40)),
    lambda arrays: arrays.update(counts=arrays["counts"][1:]),
    lambda arrays: arrays.update(counts=-arrays["counts"]),
    lambda arrays: arrays.update(summary=np.full(4, np.nan)),
    lambda arrays: arrays.update(summary=np.zeros(3)),
    lambda arrays: arrays.update(range=np.array([1.0, 2.0, 3.0, -3.0, 0.0])),
    lambda arrays: arrays.update(outer=arrays["outer"].astype(np.float64)),
    lambda arrays: arrays.update(other=arrays["outer"]),
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_observations_are_refused(monkeypatch, damage):
    monkeypatch.setattr(samples, "EXACT_LIMIT", 2500)
    observer = IfmrObserver()
    observer.observe(batch(0, 9000))
    arrays = observer.arrays()
    damage(arrays)
    with pytest.raises(ArgumentError, match="damaged"):
        IfmrObserver().restore(arrays)
