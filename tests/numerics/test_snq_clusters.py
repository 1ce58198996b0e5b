"""Clustering on a grid: the optimum by brute force, the iteration against a plain NumPy one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from grid_optimum import optimal_centres
from hypothesis import given
from hypothesis import strategies as st

from amct.numerics.snq import (
    d2_sampling,
    half_step_moments,
    lloyd,
    nearest,
    snap,
    total_cost,
)

# Ties on the grid, halves and anything between.
values_strategy = st.lists(
    st.one_of(st.integers(-12, 12).map(lambda n: n / 2), st.floats(-6, 6, width=32)), min_size=1, max_size=30
)


def moments_of(values, scale=1.0):
    return half_step_moments(np.asarray(values, np.float32), scale)


def numpy_cost(values, centres):
    distance = np.abs(np.asarray(values, np.float64)[:, None] - np.asarray(centres, np.float64))
    return (distance.min(axis=1) ** 2).sum()


def running(points, weights=None):
    weights = np.ones(len(points)) if weights is None else weights
    return [np.concatenate(([0.0], np.cumsum(part))) for part in (weights, weights * points)]


@given(values=values_strategy, centres=st.sets(st.integers(-127, 127), min_size=1, max_size=6))
def test_the_cost_is_the_sum_of_squared_distances(values, centres):
    centres = np.array(sorted(centres))
    # The three sums cancel: each is at most 30 · 127², known to 2^-53 of that, times a handful of operations.
    slack = 30 * 127**2 * 2.0**-53 * 100
    assert total_cost(moments_of(values), centres) == pytest.approx(numpy_cost(values, centres), rel=1e-12, abs=slack)


def test_values_on_a_border_count_below_it():
    moments = moments_of([-0.5, 0.0, 0.5, 0.75])
    upto = {border: moments[0, 256 + border] for border in (-2, -1, 0, 1, 2)}
    assert upto == {-2: 0, -1: 1, 0: 2, 1: 3, 2: 4}
    assert moments[1, 257] == 0.0
    assert moments[2, 512] == 0.25 + 0.25 + 0.5625


@pytest.mark.parametrize("clusters", [1, 2, 3, 4])
@given(values=values_strategy)
def test_the_optimum_is_the_optimum(clusters, values):
    """Against every choice of centres in and around the data (better ones do not lie farther out)."""
    best = min(numpy_cost(values, choice) for choice in itertools.combinations(range(-7, 8), clusters))
    centres = optimal_centres(moments_of(values), clusters)
    assert len(set(centres.tolist())) == clusters
    assert numpy_cost(values, centres) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_the_optimum_reaches_the_ends_of_the_grid():
    values = np.array([-128.0, -127.0, 0.2, 127.0])
    assert optimal_centres(moments_of(values), 3).tolist() == [-127, 0, 127]


@given(values=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=60), clusters=st.integers(1, 8))
def test_lloyd_is_the_plain_iteration(values, clusters):
    points = np.sort(np.asarray(values, np.float64))
    start = np.linspace(points[0], points[-1], clusters)
    expected = start.copy()
    for _ in range(25):
        borders = (expected[1:] + expected[:-1]) / 2
        owner = (points[:, None] > borders).sum(axis=1)
        means = [points[owner == k].mean() if (owner == k).any() else expected[k] for k in range(clusters)]
        expected = np.sort(means)
    result = lloyd(points, *running(points), start, 25, -1.0)
    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9)  # running sums against direct means


def test_lloyd_stops_when_nothing_moves_far():
    points = np.array([0.0, 1.0, 10.0, 11.0])
    start = np.array([0.0, 4.0])
    once = lloyd(points, *running(points), start, 1000, 100.0)
    assert once.tolist() == [0.5, 10.5]
    one_move = lloyd(points, *running(points), np.array([0.0, 1.0]), 1, 0.0)
    assert one_move.tolist() == [0.0, pytest.approx(22 / 3)]


def test_a_point_may_stand_for_many():
    points, weights = np.array([0.0, 1.0, 10.0]), np.array([1.0, 3.0, 2.0])
    alone = np.repeat(points, weights.astype(int))
    start = np.array([0.0, 10.0])
    np.testing.assert_allclose(
        lloyd(points, *running(points, weights), start, 9, 0.0), lloyd(alone, *running(alone), start, 9, 0.0)
    )


@given(
    values=st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=20, unique=True),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6),
)
def test_d2_sampling_draws_by_squared_distance(values, draws):
    points = np.sort(np.array(values))
    chosen = []
    for draw in draws:
        weight = (points[:, None] - chosen).__abs__().min(axis=1) ** 2 if chosen else np.ones(len(points))
        above = np.nonzero(np.cumsum(weight) > draw * weight.sum())[0]
        chosen.append(points[above[0]] if len(above) else points[-1])
    result = d2_sampling(points, running(points)[0], np.array(draws))
    assert result.tolist() == sorted(chosen)


@given(
    values=st.lists(st.floats(-127, 127, width=32), min_size=1, max_size=40),
    start=st.lists(st.floats(-130, 130), min_size=1, max_size=5),
    clusters=st.integers(5, 8),
)
def test_snapped_centres_are_different_integers_and_no_worse_than_rounding(values, start, clusters):
    moments = moments_of(values)
    centres = snap(moments, np.array(start), clusters)
    assert len(centres) == clusters
    assert (np.diff(centres) > 0).all()
    assert np.abs(centres).max() <= 127
    slack = 1e-9 * (1 + moments[2, -1])
    assert numpy_cost(values, centres) <= numpy_cost(values, np.clip(np.rint(start), -127, 127)) + slack
    assert numpy_cost(values, centres) >= numpy_cost(values, optimal_centres(moments, clusters)) - slack


@given(values=values_strategy, centres=st.sets(st.integers(-127, 127), min_size=1, max_size=16))
def test_nearest_is_nearest_and_half_way_goes_down(values, centres):
    centres = np.array(sorted(centres))
    found = np.empty(len(values), np.uint8)
    nearest(np.asarray(values, np.float32) * np.float32(0.25), 0.25, centres, found)
    distance = np.abs(np.asarray(values, np.float64)[:, None] - centres)
    np.testing.assert_array_equal(found, distance.argmin(axis=1))  # argmin takes the first, the lower one
