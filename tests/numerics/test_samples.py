"""What an observer remembers does not grow with the data it sees."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
import torch

from amct.errors import ArgumentError
from amct.numerics.counts.histogram import SHORT_TAIL
from amct.numerics.counts.samples import EXACT_LIMIT, SMALL_EXACT_LIMIT, ObservedValues
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
    samples = ObservedValues()
    samples.add(batch(0, 1000).reshape(10, 100))
    samples.add(batch(1, 50))
    assert samples.exact
    assert np.array_equal(np.concatenate(samples.batches_of(0)), torch.cat([batch(0, 1000), batch(1, 50)]).numpy())
    assert [piece.size for piece in samples.batches_of(0)] == [1000, 50]


def test_a_histogram_ends_at_the_exact_minimum_and_maximum():
    x = batch(3, EXACT_LIMIT + 1)
    samples = ObservedValues()
    samples.add(x)
    bins = samples.bins(0)
    assert (bins.low[0], bins.high[-1]) == (float(x.min()), float(x.max()))
    assert bins.count.sum() == x.numel()


def test_a_refused_merge_changes_nothing():
    first, second = ObservedValues(channel_axis=0), ObservedValues(channel_axis=0)
    first.add(torch.ones(2, 3))
    second.add(torch.ones(3, 3))
    with pytest.raises(ArgumentError, match="2 before, now 3"):
        first.merge(second)
    assert (first.range.batches, first.range.count) == (1, 6)


def test_values_are_counted_once_the_total_of_all_processes_is_known_to_be_large():
    told, plain = IfmrObserver(), IfmrObserver()
    empty = IfmrObserver()
    empty.expect(EXACT_LIMIT + 1)
    assert not empty.exact
    told.observe(batch(0))
    plain.observe(batch(0))
    told.expect(EXACT_LIMIT)
    assert told.exact
    told.expect(EXACT_LIMIT + 1)
    assert not told.exact
    for seed in range(1, 7):
        told.observe(batch(seed))
        plain.observe(batch(seed))
    assert not plain.exact
    assert told.result() == plain.result()


def test_fewer_values_are_kept_on_request():
    for values, kept in ((SMALL_EXACT_LIMIT, True), (SMALL_EXACT_LIMIT + 1, False)):
        samples = ObservedValues(keeps_few=True)
        samples.add(torch.randn(values, generator=torch.Generator().manual_seed(0)))
        assert samples.exact is kept
        expecting = ObservedValues(keeps_few=True)
        expecting.add(torch.randn(9))
        expecting.expect(values)
        assert expecting.exact is kept
    assert SMALL_EXACT_LIMIT < EXACT_LIMIT
