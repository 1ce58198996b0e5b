"""One pass over a batch against NumPy: its range, its tails, and what is counted when not all of it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amct.errors import CalibrationError
from amct.numerics.counts.histogram import MANTISSA_BITS, SHORT_TAIL, FloatHistogram
from amct.numerics.counts.loops import BLOCKS, count_piece, limits_of, new_room, range_of, steps_beyond
from amct.numerics.counts.tables import LARGEST_INTERVAL, RUN, sampling_interval
from amct.numerics.ifmr import IfmrObserver

TABLE_SIZE = BLOCKS << MANTISSA_BITS
ENOUGH, FEW = 1 << 17, 1 << 13
ANY = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(width=32))


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def histogram_of(*batches: np.ndarray, enough: int | None) -> FloatHistogram:
    histogram = FloatHistogram(tail=SHORT_TAIL, enough=enough)
    for batch in batches:
        histogram.add(torch.from_numpy(batch)[None])
    return histogram


def parts(histogram: FloatHistogram) -> list[np.ndarray]:
    bins = histogram.bins()
    return [bins.low, bins.high, bins.count]


@given(ANY)
def test_the_range_is_that_of_numpy_and_none_when_not_finite(values):
    found = range_of(values)
    if not np.isfinite(values).all():
        assert found is None
    else:
        assert found == (values.min(), values.max())


@pytest.mark.parametrize("shift", [-100.0, 0.0, 100.0])
def test_one_pass_tells_the_range_and_counts_the_same(shift):
    first, second = normal(60_000) + np.float32(shift), normal(60_000, seed=1) + np.float32(shift)
    histogram = histogram_of(first, enough=None)
    assert histogram.add_in_one_pass(second) == (second.min(), second.max())
    both = histogram_of(first, second, enough=None)
    assert all(np.array_equal(one, other) for one, other in zip(parts(histogram), parts(both), strict=True))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("place", [0, 70_001, -1])
def test_a_batch_that_is_not_finite_leaves_everything_as_it_was(broken, place):
    batch = normal(1_100_000)
    observer, untouched = IfmrObserver(), IfmrObserver()
    for each in (observer, untouched):
        each.sample_for(2)
        each.observe(torch.from_numpy(batch))
    worse = 5 * normal(300_000, seed=1)
    worse[place] = broken
    with pytest.raises(CalibrationError, match=r"1 NaN|1 infinite"):
        observer.observe(torch.from_numpy(worse))
    assert observer.batches == 1
    # The table that the refused batch was counted in is used again.
    for each in (observer, untouched):
        each.observe(torch.from_numpy(batch))
    assert observer.result() == untouched.result()


@pytest.mark.parametrize(
    ("share", "count", "wanted"),
    [
        (1.0, 2 * FEW - 1, 1),
        (1.0, 2 * FEW, 2),
        (1.0, 5 * FEW, 4),
        (1.0, 200 * FEW, LARGEST_INTERVAL),
        (0.0, 5 * FEW, 1),
    ],
)
def test_so_many_are_left_out_that_enough_stay(share, count, wanted):
    values = (np.linspace(1.0, 2.0, count) * share).astype(np.float32)
    assert sampling_interval(values, FEW) == wanted


def test_pixels_are_counted_completely_and_equal_neighbours_do_not_make_pixels():
    levels = np.random.default_rng(0).integers(0, 256, 5 * ENOUGH)
    assert sampling_interval(levels.astype(np.float32), ENOUGH) == 1
    assert sampling_interval(np.repeat(normal(2 * ENOUGH), 3), ENOUGH) == 4


def test_values_near_zero_do_not_count_as_enough():
    values = normal(8 * ENOUGH)
    values[normal(values.size, seed=1) > -1.28] *= 1e-5  # nine of ten
    assert sampling_interval(values, ENOUGH) == 1
    assert sampling_interval(normal(9 * ENOUGH), ENOUGH) == 8


def test_tails_and_total_are_exact_when_a_part_is_counted():
    batches = [normal(600_000 + 7, seed) * np.float32(1 + seed) for seed in range(3)]
    part, whole = histogram_of(*batches, enough=ENOUGH), histogram_of(*batches, enough=None)
    assert part._largest_weight == 4
    assert part._edges != (-0.0, 0.0)
    bins, exact = part.bins(), whole.bins()
    assert part._edges == whole._edges
    for edge in (bins.high <= part._edges[0], bins.low >= part._edges[1]):
        assert 0 < edge.sum() <= SHORT_TAIL
    assert np.array_equal(bins.low[bins.low == bins.high], exact.low[exact.low == exact.high])
    assert bins.count.sum() == pytest.approx(sum(batch.size for batch in batches), rel=1e-12)


def test_a_part_tells_as_much_as_chance_allows():
    batches = [normal(600_000, seed) for seed in range(3)]
    borders = np.linspace(-3, 3, 61)
    shares = []
    for enough in (ENOUGH, None):
        bins = histogram_of(*batches, enough=enough).bins()
        shares.append(np.histogram((bins.low + bins.high) / 2, borders, weights=bins.count)[0])
    counted = shares[1] / 4
    # Of each four values in a cell one is counted: the count's deviation is below its root; five of them in 60 cells.
    assert (np.abs(shares[0] / 4 - counted) <= 5 * np.sqrt(counted)).all()


@pytest.mark.parametrize("every", [2, 8, 64])
@pytest.mark.parametrize("channels", [3, 48, 64, 100, 1024])
def test_no_channel_and_no_column_is_preferred(channels, every):
    count = 1_000_000 // channels * channels
    first_bin = 127 << MANTISSA_BITS
    channels_last = np.arange(count) % channels
    for channel in (channels_last, np.sort(channels_last)):
        values = ((first_bin + channel) << (23 - MANTISSA_BITS)).astype(np.uint32).view(np.float32)
        table = np.zeros(TABLE_SIZE, np.uint32)
        bins = (table, np.zeros(BLOCKS, np.uint8), MANTISSA_BITS)
        count_piece(values, bins, limits_of(-np.inf, np.inf), new_room(0), 0, (every, 0, 1))
        counted = table[first_bin : first_bin + channels]
        assert counted.sum() == count // (RUN * every) * RUN
        # As even as by chance, at least: the deviation of a count is below its root.
        expected = count / channels / every
        assert (np.abs(counted - expected) <= 5 * np.sqrt(expected)).all()


@pytest.mark.parametrize("every", [1, 2, 16, 64])
@pytest.mark.parametrize("size", [15, 1024, 40_000, 600_001])
def test_what_is_counted_and_collected_is_that_of_numpy(size, every):
    """Whatever portions a batch is scanned and counted in."""
    values = np.maximum(normal(size), np.float32(-0.5))
    table, limits = np.zeros(TABLE_SIZE, np.uint32), (-0.5, 2.5)
    blocks, outer = np.zeros(BLOCKS, np.uint8), new_room(size)
    bins = (table, blocks, MANTISSA_BITS)
    number, is_finite, low, high = count_piece(values, bins, limits_of(*limits), outer, 0, (every, 0, 3))
    groups = np.arange(values.size // (RUN * every), dtype=np.uint64)
    fractions = (groups * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    runs = (groups * np.uint64(every) + (fractions * np.uint64(every) >> np.uint64(32))).astype(np.int64)
    counted = values if every == 1 else values[(runs[:, None] * RUN + np.arange(RUN)).reshape(-1)]
    places = counted.view(np.uint32) >> (23 - MANTISSA_BITS)
    assert np.array_equal(table, 3 * np.bincount(places, minlength=TABLE_SIZE))
    marked, occupied = np.flatnonzero(blocks), np.unique(places >> MANTISSA_BITS)
    assert set(occupied) <= set(marked)
    for sign in (0, 1):  # no block beyond the exponents that occur
        own, needed = marked[marked // 256 == sign], occupied[occupied // 256 == sign]
        assert own.tolist() == [] if needed.size == 0 else (own[0], own[-1]) == (needed[0], needed[-1])
    wanted = values[(values <= limits[0]) | (values >= limits[1])]
    assert np.array_equal(outer[:number], wanted)
    assert (is_finite, low, high) == (True, values.min(), values.max())


def test_neither_order_nor_threads_nor_merging_change_what_is_counted():
    batches = [normal(2_300_000, seed=1), normal(700_001, seed=2), normal(50_000, seed=3)]
    wanted = parts(histogram_of(*batches, enough=ENOUGH))
    assert all(map(np.array_equal, wanted, parts(histogram_of(*batches[::-1], enough=ENOUGH))))
    merged = histogram_of(batches[2], enough=ENOUGH)
    merged.merge(histogram_of(*batches[:2], enough=ENOUGH))
    assert all(map(np.array_equal, wanted, parts(merged)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert all(map(np.array_equal, wanted, parts(histogram_of(*batches, enough=ENOUGH))))
    finally:
        torch.set_num_threads(before)


def test_values_that_are_not_finite_are_counted_inside_the_table():
    """Compiled loops do not check their indices: behind the table nothing may be written."""
    patterns = np.arange(0, 2**32, 2 ** (23 - MANTISSA_BITS), dtype=np.uint64).astype(np.uint32)
    patterns = np.concatenate([patterns, patterns | np.uint32(1), [np.uint32(0xFFFFFFFF)]])
    memory = np.zeros(2 * TABLE_SIZE, np.uint32)
    for every in (1, 2):
        values, limits = patterns.view(np.float32), limits_of(-np.inf, np.inf)
        bins = (memory[:TABLE_SIZE], np.zeros(BLOCKS, np.uint8), MANTISSA_BITS)
        assert not count_piece(values, bins, limits, new_room(0), 0, (every, 0, 1))[1]
    assert not memory[TABLE_SIZE:].any()
    assert memory[TABLE_SIZE - (1 << MANTISSA_BITS) : TABLE_SIZE].all()


def test_steps_beyond_counts_as_rounding_in_torch_does():
    random = np.random.default_rng(5)
    values = random.normal(0, 3, 40_001).astype(np.float32)
    values[:200] = np.arange(-100, 100, dtype=np.float32) * 0.05 + 0.025  # halves of steps
    inverse = np.float32(1) / np.float32(0.05)
    steps = torch.round(torch.from_numpy(values) * inverse)
    expected = int(((steps < -40) | (steps > 55)).sum())
    assert 0 < expected < values.size
    assert steps_beyond(values, inverse, -40, 55) == expected
    assert steps_beyond(values[:0], inverse, -40, 55) == 0
