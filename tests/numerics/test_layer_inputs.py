"""Means and balance of a layer's input, against NumPy and against the noise of really rounded layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from amct.errors import ArgumentError, CalibrationError
from amct.numerics.layer_inputs import LayerInputObserver


def linear_inputs(outlier, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 40, 16, generator=generator)
    x[..., 5] *= outlier
    return x, torch.randn(24, 16, generator=generator)


def rounded(values, low, high, bits):
    step = (high - low) / (2**bits - 1)
    return ((values / step).round() * step).clamp(low, high)


def output_error(x, weight, factors):
    """The squared error of a linear layer with 8-bit inputs of one step and 7-bit weights of a step per output."""
    divided, multiplied = x / factors, weight * factors
    largest = multiplied.abs().amax(1, keepdim=True)
    approximate = rounded(divided, divided.min(), divided.max(), 8) @ rounded(multiplied, -largest, largest, 7).T
    return float((approximate - x @ weight.T).square().mean())


def test_an_outlier_channel_is_balanced_and_the_layer_really_loses_less():
    x, weight = linear_inputs(outlier=60)
    observer = LayerInputObserver(channel_axis=-1, weight=weight)
    for part in x:
        observer.observe(part)
    found = observer.result()
    assert found.balance is not None
    assert int(found.balance.argmax()) == 5
    divided = x / found.balance
    assert float(found.scale) == pytest.approx(float(divided.max() - divided.min()) / 255, rel=1e-5)
    assert found.clip_min <= divided.min() + found.scale
    assert output_error(x, weight, found.balance) < output_error(x, weight, torch.ones(16)) / 2


def test_channels_of_one_size_are_left_alone():
    x, weight = linear_inputs(outlier=1)
    observer = LayerInputObserver(channel_axis=-1, weight=weight)
    observer.observe(x)
    assert observer.result().balance is None


def test_means_of_linear_inputs_are_exact():
    x, weight = linear_inputs(outlier=3)
    observer = LayerInputObserver(channel_axis=-1, weight=weight)
    for part in x:
        observer.observe(part)
    assert observer.batches == 3
    np.testing.assert_allclose(observer.result().mean, x.numpy().astype(np.float64).mean((0, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 3, 500), (2, 3, 64, 48), (2, 3, 5, 5), (2, 3, 9, 20, 11)])
def test_means_of_convolution_inputs_come_from_evenly_spread_positions(shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 5.0]).reshape(
        1, 3, *[1] * (len(shape) - 2)
    )
    observer = LayerInputObserver(channel_axis=1)
    observer.observe(x)
    found = observer.result()
    assert found.balance is None
    # Uniform values have a deviation of 0.29; five standard errors of at least 2 * 16 positions.
    np.testing.assert_allclose(found.mean / torch.tensor([1.0, 2.0, 5.0]), 0.5, atol=5 * 0.29 / np.sqrt(32))


def test_a_small_picture_is_seen_whole():
    x = torch.randn(2, 3, 7, 8)
    observer = LayerInputObserver(channel_axis=1)
    observer.observe(x)
    torch.testing.assert_close(observer.result().mean, x.mean((0, 2, 3)))


def test_nothing_seen_or_nothing_but_zeros():
    observer = LayerInputObserver(channel_axis=-1, weight=torch.ones(2, 4))
    observer.observe(torch.zeros(0, 4))
    assert observer.result() is None
    observer.observe(torch.zeros(3, 4))
    assert observer.result().balance is None
    assert observer.result().mean.tolist() == [0, 0, 0, 0]


def test_data_that_cannot_be_used():
    observer = LayerInputObserver(channel_axis=1)
    observer.observe(torch.ones(1, 3, 4, 4))
    with pytest.raises(ArgumentError, match=r"expected 3 channels, got an activation \[1, 5, 4, 4\]"):
        observer.observe(torch.ones(1, 5, 4, 4))
    with pytest.raises(CalibrationError, match="1 NaN"):
        observer.observe(torch.full((1, 3, 1, 1), torch.nan).where(torch.tensor([0, 1, 0]).reshape(1, 3, 1, 1) == 1, 0))
    assert observer.batches == 1
