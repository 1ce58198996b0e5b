"""The histogram of float bits against NumPy, and that order, pieces, threads and processes do not matter."""

from __future__ import annotations

import pickle
from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amct.numerics.counts.histogram import MANTISSA_BITS, TAIL, FloatHistogram

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ARRAYS = hnp.arrays(np.float32, st.integers(1, 60), elements=FINITE)


def histogram_of(*pieces: np.ndarray, mantissa_bits: int = MANTISSA_BITS, tail: int = TAIL) -> FloatHistogram:
    histogram = FloatHistogram(pieces[0].shape[0] if pieces[0].ndim == 2 else 1, mantissa_bits, tail=tail)
    for piece in pieces:
        histogram.add(torch.from_numpy(np.atleast_2d(piece)))
    return histogram


def same(first: FloatHistogram, second: FloatHistogram) -> bool:
    return all(
        np.array_equal(getattr(first.bins(channel), part), getattr(second.bins(channel), part))
        for channel in range(first.channels)
        for part in ("low", "high", "count")
    )


@given(ARRAYS, st.sampled_from([3, 6, 11]))
def test_bins_hold_their_values_and_are_as_fine_as_promised(values, mantissa_bits):
    bins = histogram_of(values, mantissa_bits=mantissa_bits, tail=0).bins()
    assert bins.count.sum() == values.size
    assert (bins.low[1:] >= bins.high[:-1]).all()
    exact = values.astype(np.float64)
    for low, high, count in zip(bins.low, bins.high, bins.count, strict=True):
        # A bin begins at the end that is nearer to zero, which belongs to it; the other end does not.
        inside = (exact >= low) & (exact < high) if low >= 0 else (exact > low) & (exact <= high)
        if low == 0 or high == 0:  # zero and the negative zero have a bin each
            inside &= np.signbit(values) == (high == 0)
        assert inside.sum() == count
        outer = max(abs(low), abs(high))
        assert high - low <= max(outer * 2.0**-mantissa_bits, 2.0 ** (-126 - mantissa_bits))


@given(ARRAYS, st.sampled_from([1, 2, 3, 10]))
def test_the_tails_are_the_outermost_values_themselves(values, tail):
    histogram = histogram_of(values, mantissa_bits=6, tail=tail)
    bins = histogram.bins()
    lower, upper = histogram._edges
    assert bins.count.sum() == values.size
    assert (np.diff(bins.low) >= 0).all()
    exact = np.sort(values).astype(np.float64)
    for kept, edge, outer in ((bins.low >= upper, upper, exact >= upper), (bins.high <= lower, -lower, exact <= lower)):
        assert np.array_equal(bins.low[kept], exact[outer])
        assert np.array_equal(bins.high[kept], exact[outer])
        assert outer.sum() <= tail
        assert edge > 0
    # As many as fit: the next bin inwards would be too much for the tail, unless it is the one that holds zero.
    inner_positive = exact[(exact < upper) & (exact >= 2.0**-132)]
    if inner_positive.size:
        begin = bins.low[(bins.low < upper) & (bins.high > 0)].max()
        assert ((exact >= begin) & (exact > 0)).sum() > tail


@given(st.lists(ARRAYS, min_size=1, max_size=4), st.randoms(), st.sampled_from([2, 4096]))
def test_pieces_and_order_do_not_matter(pieces, random, tail):
    together = np.concatenate(pieces)
    shuffled = list(together)
    random.shuffle(shuffled)
    assert same(histogram_of(*pieces, tail=tail), histogram_of(np.array(shuffled, np.float32), tail=tail))


@given(ARRAYS, ARRAYS, st.sampled_from([2, 4096]))
def test_merging_equals_counting_together(first, second, tail):
    merged = histogram_of(first, tail=tail)
    merged.merge(histogram_of(second, tail=tail))
    assert same(merged, histogram_of(np.concatenate([first, second]), tail=tail))


@given(ARRAYS)
def test_a_copy_sent_to_another_process_can_go_on(values):
    copy = pickle.loads(pickle.dumps(histogram_of(values)))
    copy.add(torch.from_numpy(values[None]) * 0.5)
    copy.merge(histogram_of(values))
    assert same(copy, histogram_of(values, values * np.float32(0.5), values))


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=FINITE))
def test_channels_are_counted_apart(rows):
    histogram = histogram_of(rows, mantissa_bits=6)
    for channel, row in enumerate(rows):
        alone = histogram_of(row, mantissa_bits=6)._counted_bins(0)
        together = histogram._counted_bins(channel)
        assert np.array_equal(alone.count, together.count)
        assert np.array_equal(alone.low, together.low)


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 30)), elements=FINITE))
def test_the_way_for_gpus_counts_the_same(rows):
    by_torch = FloatHistogram(rows.shape[0], 6)
    by_torch._add_by_torch(torch.from_numpy(rows))
    assert same(by_torch, histogram_of(rows, mantissa_bits=6))


def test_many_values_count_the_same_as_few():
    random = np.random.default_rng(0)
    values = (random.normal(size=200_000) * 10.0 ** random.integers(-44, 38, 200_000)).astype(np.float32)
    largest = np.finfo(np.float32).max
    values[:50_000] = 0
    values[50_000:50_010] = [-0.0, 1e-45, -1e-45, largest, -largest, 1.0, -1.0, 2.0**-126, 2.0**64, -(2.0**-100)]
    random.shuffle(values)
    together = histogram_of(values, values[:100], values[:70_000])
    pieces = [values, values[:100], values[:70_000]]
    assert same(together, histogram_of(*(few for piece in pieces for few in np.array_split(piece, 20))))
    with mock.patch("amct.numerics.counts.histogram._LARGEST_PIECE", 60_000):
        assert same(together, histogram_of(*pieces))
    counts = np.unique(np.concatenate(pieces).view(np.uint32) >> (23 - MANTISSA_BITS), return_counts=True)[1]
    assert np.array_equal(np.sort(histogram_of(*pieces, tail=0).bins().count), np.sort(counts))


def test_threads_count_the_same():
    values = torch.randn(1, 2_500_000, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    try:
        histograms = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            histograms.append(FloatHistogram())
            histograms[-1].add(values)
    finally:
        torch.set_num_threads(before)
    assert same(*histograms)


def test_every_power_of_two_finds_room():
    exponents = np.arange(-149, 128, dtype=np.float64)
    values = np.concatenate([2.0**exponents, -(2.0**exponents)]).astype(np.float32)
    bins = histogram_of(values, mantissa_bits=2).bins()
    assert bins.count.sum() == values.size
    assert bins.high.max() == 2.0**127


def test_the_largest_float_has_a_finite_bin():
    largest = np.finfo(np.float32).max
    bins = histogram_of(np.array([largest, -largest], np.float32))._counted_bins(0)
    assert (bins.low[0], bins.high[-1]) == (-(2.0**128), 2.0**128)
