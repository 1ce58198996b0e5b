"""The min-max observer, and what all observers share about ranges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amct.errors import ArgumentError, CalibrationError
from amct.numerics.affine import LARGEST_SCALE
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.observer import BEST_REACH, MinMaxObserver, TensorRangeObserver, widening

ARRAYS = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1000, 1000, width=32))


@given(st.lists(ARRAYS, min_size=1, max_size=3), st.booleans(), st.sampled_from([8, 12, 16]))
def test_the_range_is_that_of_all_values(batches, asymmetric, bits):
    observer = MinMaxObserver(bits=bits, asymmetric=asymmetric)
    for batch in batches:
        observer.observe(torch.from_numpy(batch))
    values = np.concatenate(batches).astype(np.float64)
    low, high = min(values.min(), 0), max(values.max(), 0)
    if asymmetric:
        scale = (high - low) / (2**bits - 1)
    else:
        negative = abs(values.min()) > abs(values.max())
        scale = np.abs(values).max() / (2 ** (bits - 1) - (0 if negative else 1))
    factors = observer.result()
    if scale < 2**-23:
        assert factors.scale.item() == 1.0
        assert factors.near_zero.item()
        return
    assert factors.scale.item() == pytest.approx(scale, rel=1e-6)
    # The offset is rounded to a whole step, so an end of the range may be missed by half a step; symmetric: by one.
    allowed = scale * (0.5 if asymmetric else 1) + 1e-5 * np.abs(values).max()
    assert factors.clip_max.item() >= high - allowed
    assert factors.clip_min.item() <= low + allowed
    assert observer.batches == len(batches)


@given(st.lists(ARRAYS, min_size=2, max_size=4))
def test_shards_merge_to_the_whole(batches):
    whole, merged = MinMaxObserver(), MinMaxObserver()
    for batch in batches:
        whole.observe(torch.from_numpy(batch))
        shard = MinMaxObserver()
        shard.observe(torch.from_numpy(batch))
        merged.merge(shard)
    assert merged.result().scale.item() == whole.result().scale.item()
    assert merged.batches == whole.batches


def test_per_channel_and_strided_input():
    x = torch.arange(24.0).reshape(2, 3, 4)
    observer = MinMaxObserver(channel_axis=1)
    observer.observe(x)
    assert observer.result().clip_max.tolist() == pytest.approx([15.0, 19.0, 23.0])
    other = MinMaxObserver(channel_axis=-2)
    other.observe(x.transpose(0, 2).transpose(0, 2)[:, :, ::3])
    assert other.result().clip_max.tolist() == pytest.approx([15.0, 19.0, 23.0])


@pytest.mark.parametrize("axis", [None, 1])
def test_the_memory_format_does_not_matter(axis):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    results = []
    for tensor in (x, x.to(memory_format=torch.channels_last)):
        observer = IfmrObserver(channel_axis=axis)
        observer.observe(tensor)
        results.append(observer.result().scale.tolist())
    assert results[0] == results[1]


def test_channels_of_a_merged_observer_must_fit():
    first, second = MinMaxObserver(channel_axis=0), MinMaxObserver(channel_axis=0)
    first.observe(torch.ones(2, 3))
    second.observe(torch.ones(4, 3))
    with pytest.raises(ArgumentError, match="the number of channels along axis 0 changed: 2 before, now 4"):
        first.merge(second)


def test_nothing_observed():
    with pytest.raises(CalibrationError, match="no activation values were observed in 0 batches; run the model"):
        MinMaxObserver().result()


def test_the_observed_tensor_is_left_alone():
    x = torch.ones(4, requires_grad=True)
    observer = MinMaxObserver()
    observer.observe(x * 2)
    assert not observer.result().scale.requires_grad


# -- tensors between layers: a range of few values grows -------------------------------------------------------------


def noise_of_normal_values(reach):
    """Of clipping at so many standard deviations and of rounding to 255 steps up to there."""
    tail, density = math.erfc(reach / math.sqrt(2)) / 2, math.exp(-(reach**2) / 2) / math.sqrt(2 * math.pi)
    return 2 * ((1 + reach**2) * tail - reach * density) + (2 * reach / 255) ** 2 / 12


def test_the_best_reach_has_the_least_noise():
    reaches = np.linspace(2, 7, 501)
    best = reaches[np.argmin([noise_of_normal_values(each) for each in reaches])]
    assert best == pytest.approx(BEST_REACH, abs=0.01)


@pytest.mark.parametrize("count", [30, 100, 300, 1000, 3000])
def test_few_values_clip_others_less_than_their_own_range_does(count):
    """Twenty ranges, each judged by the exact noise of all other values of the distribution."""
    random = np.random.default_rng(count)
    plain, wide = [], []
    for _ in range(20):
        values = torch.from_numpy(random.normal(size=count).astype(np.float32))
        for observer, noises in ((MinMaxObserver(), plain), (TensorRangeObserver(), wide)):
            observer.observe(values)
            noises.append(noise_of_normal_values(float(observer.result().scale) * 255 / 2))
    assert np.mean(wide) < np.mean(plain) * (0.9 if count == 3000 else 0.6)


def test_many_values_and_limits_keep_their_range():
    values = torch.from_numpy(np.random.default_rng(1).random(20_000).astype(np.float32))
    exact, found = MinMaxObserver(), TensorRangeObserver()
    for observer in (exact, found):
        observer.observe(values)
    assert found.result().scale == exact.result().scale
    few = TensorRangeObserver()
    few.observe(torch.tensor([0.0, 255 * LARGEST_SCALE * 0.99]))  # it grows no further than scales may
    assert few.result().clip_max == pytest.approx(255 * LARGEST_SCALE * 0.99, rel=1e-6)
    assert few.result().clip_min == 0  # an end at zero stays there


def test_the_range_grows_less_the_more_values_there_are():
    factors = [widening(count) for count in (0, 1, 8, 100, 1000, 10_000, 12_999, 10**6, 10**15)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == 1.0


def test_values_far_from_zero_leave_room_on_both_sides():
    """Eight logits, nearly all negative: the next one may be positive."""
    found = TensorRangeObserver()
    found.observe(torch.tensor([-4.4, -3.0, -2.5, -2.0, -1.8, -1.0, -0.5, 0.1]))
    assert found.result().clip_max > 2
    assert found.result().clip_min < -4.4 * 1.5
