"""Channel pruning and 2:4 masks against float64 NumPy formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amct.errors import ArgumentError
from amct.numerics.pruning import (
    balanced_l2_scores,
    lowest_channels,
    remaining_channels,
    two_of_four_mask,
)


def numpy_scores(weights):
    found = []
    for weight in weights:
        rows = weight.reshape(len(weight), -1)
        norms = np.sqrt((rows**2).sum(axis=1)) / rows.shape[1]
        found.append((norms - norms.min()) / (norms.max() - norms.min()))
    return np.mean(found, axis=0)


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 3))
def test_scores_are_the_mean_of_normalized_norms(seed, channels, producers):
    random = np.random.default_rng(seed)
    weights = [random.standard_normal((channels, *random.integers(1, 5, size=3))) for _ in range(producers)]
    expected = numpy_scores(weights)
    np.testing.assert_allclose(balanced_l2_scores([torch.tensor(w) for w in weights]), expected, rtol=1e-12, atol=1e-14)


def test_every_producer_counts():
    first, second = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[9.0], [1.0], [9.0]])
    assert balanced_l2_scores([first, second]).tolist() == [0.5, 0.25, 1.0]


def test_equal_filters_have_equal_scores():
    assert balanced_l2_scores([torch.ones(3, 2)]).tolist() == [0, 0, 0]


def test_producers_must_have_the_same_channels():
    with pytest.raises(ArgumentError, match=r"\[2, 3\]"):
        balanced_l2_scores([torch.ones(3, 2), torch.ones(2, 2)])


@pytest.mark.parametrize(
    ("count", "ratio", "options", "expected"),
    [
        (160, 0.3, {"ascend": True}, 112),
        (20, 0.25, {}, 15),
        (20, 0.25, {"ascend": True}, 16),
        (16, 0.9, {"ascend": True}, 16),
        (10, 0.25, {}, 8),  # 2.5 rounds to 2
        (10, 0.35, {}, 6),  # 3.5 rounds to 4
        (32, 0.3, {"groups": 4}, 20),
        (4, 0.9, {"groups": 4}, 4),
        (1, 0.9, {}, 1),
    ],
)
def test_remaining_channels(count, ratio, options, expected):
    assert remaining_channels(count, ratio, **options) == expected


@given(st.integers(1, 300), st.floats(0.001, 0.999), st.booleans())
def test_remaining_channels_follow_the_rule(count, ratio, ascend):
    remain = count - round(count * ratio)
    if ascend:
        remain = max(math.ceil(remain / 16) * 16, 16)
    assert remaining_channels(count, ratio, ascend=ascend) == min(max(remain, 1), count)


def test_the_lowest_channels_of_each_group_go():
    scores = torch.tensor([0.9, 0.1, 0.5, 0.2, 0.8, 0.7])
    assert lowest_channels(scores, 4) == [1, 3]
    assert lowest_channels(scores, 4, groups=2) == [1, 3]
    assert lowest_channels(torch.tensor([0.1, 0.2, 0.9, 0.8]), 2, groups=2) == [0, 3]
    assert lowest_channels(scores, 6) == []


def numpy_mask(weight, axis):
    moved = np.moveaxis(weight, axis, -1)
    mask = np.zeros_like(moved)
    for place in np.ndindex(moved.shape[:-1]):
        for start in range(0, moved.shape[-1], 4):
            four = np.abs(moved[place][start : start + 4])
            mask[place][start + np.argsort(-four, kind="stable")[:2]] = 1
    return np.moveaxis(mask, -1, axis)


@given(st.integers(0, 2**32 - 1), st.integers(3, 14), st.integers(1, 4), st.sampled_from([0, 1]))
def test_the_two_largest_of_every_four_are_kept(seed, channels, others, axis):
    shape = (others, channels, 2, 1) if axis else (channels, others, 2, 1)
    weight = np.random.default_rng(seed).integers(-3, 4, size=shape).astype(np.float64)
    mask = two_of_four_mask(torch.tensor(weight), axis)
    np.testing.assert_array_equal(mask, numpy_mask(weight, axis))


@pytest.mark.parametrize("channels", [1, 2])
def test_one_or_two_input_channels_are_kept_whole(channels):
    weight = torch.zeros(3, channels, 2, 2)
    assert two_of_four_mask(weight, 1).eq(1).all()
