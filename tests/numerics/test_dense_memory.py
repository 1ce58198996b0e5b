"""Loops over the memory of a tensor find what the same loops find in an array of its values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amct.errors import CalibrationError
from amct.numerics.counts.histogram import SHORT_TAIL, FloatHistogram
from amct.numerics.counts.loops import range_at, range_of
from amct.numerics.layer_inputs import LayerInputObserver
from amct.numerics.min_max import MinMaxObserver
from amct.numerics.observer import dense_memory, flat_values

IMAGES = torch.randn(20, 5, 24, 18, generator=torch.Generator().manual_seed(0))


class OwnTensor(torch.Tensor):
    """A class of somebody else."""


DENSE = {
    "contiguous": IMAGES,
    "channels last": IMAGES.to(memory_format=torch.channels_last),
    "a parameter": torch.nn.Parameter(IMAGES),
    "a part": IMAGES[3:7],
    "no axis": torch.tensor(3.0),
}
OTHERS = {
    "gaps": IMAGES[:, ::2],
    "transposed": torch.randn(4, 5).T,
    "float64": IMAGES.double(),
    "bfloat16": IMAGES.bfloat16(),
    "a class of its own": IMAGES.as_subclass(OwnTensor),
    "negated when read": torch._neg_view(IMAGES),
    "without memory": IMAGES.to("meta"),
}


@pytest.mark.parametrize("x", DENSE.values(), ids=DENSE)
def test_the_memory_of_dense_tensors_has_all_their_values(x):
    address, size = dense_memory(x)
    assert size == x.numel()
    assert range_at(address, size) == range_of(flat_values(x)) == (x.min(), x.max())


@pytest.mark.parametrize("x", OTHERS.values(), ids=OTHERS)
def test_other_tensors_have_none(x):
    assert dense_memory(x) is None


@given(hnp.arrays(np.float32, st.integers(1, 3000), elements=st.floats(width=32)))
def test_the_range_is_the_same_also_when_a_value_is_not_finite(values):
    assert range_at(*dense_memory(torch.from_numpy(values))) == range_of(values)


@pytest.mark.parametrize("enough", [None, 1000])
@pytest.mark.parametrize("factor", [1.0, 1000.0], ids=["like the first", "more than there is room for"])
def test_a_histogram_is_the_same(enough, factor):
    batches = [np.random.default_rng(seed).standard_normal(50_000).astype(np.float32) for seed in range(4)]
    one, other = (FloatHistogram(tail=SHORT_TAIL, enough=enough) for _ in range(2))
    assert one.add_at(*dense_memory(torch.from_numpy(batches[0]))) is None, "the first batch needs an array"
    for histogram in (one, other):
        histogram.add_in_one_pass(batches[0])
    for batch in batches[1:]:
        batch *= np.float32(factor)
        found = one.add_at(*dense_memory(torch.from_numpy(batch)))
        assert found == other.add_in_one_pass(batch) == (batch.min(), batch.max())
    states = one.state(), other.state()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[1])


def test_a_batch_that_is_not_finite_changes_no_histogram():
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    histogram, untouched = FloatHistogram(tail=SHORT_TAIL), FloatHistogram(tail=SHORT_TAIL)
    for each in (histogram, untouched):
        each.add_in_one_pass(values)
    broken = torch.from_numpy(2 * values)
    broken[77] = torch.nan
    assert histogram.add_at(*dense_memory(broken)) is None
    states = histogram.state(), untouched.state()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[1])


@pytest.mark.parametrize("shape", [(40, 3, 31, 17), (2, 3, 5, 7), (1, 3, 1, 1)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layer_inputs_are_the_same(shape, layout):
    batches = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    quick, slow = LayerInputObserver(channel_axis=1), LayerInputObserver(channel_axis=1)
    for batch in batches:
        quick.observe(batch.to(memory_format=layout))
        wide = torch.zeros(*shape[:3], 2 * shape[3])
        wide[..., ::2] = batch
        assert dense_memory(wide[..., ::2]) is None
        slow.observe(wide[..., ::2])
    states = quick.state(), slow.state()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[1])


def test_layer_inputs_that_are_not_finite_raise():
    observer = LayerInputObserver(channel_axis=1)
    observer.observe(IMAGES)
    with pytest.raises(CalibrationError, match="NaN"):
        observer.observe(torch.full_like(IMAGES, torch.nan))
    assert observer.batches == 1


def test_an_observed_tensor_that_needs_gradients_is_no_hindrance():
    observer = MinMaxObserver()
    for x in (IMAGES.clone().requires_grad_(), (IMAGES.clone().requires_grad_() * 2)[:, ::2]):
        observer.observe(x)
    assert observer.batches == 2
