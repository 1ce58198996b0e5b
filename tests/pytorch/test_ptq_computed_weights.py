"""Layers whose forward computes the weight from parameters, as weight standardization does."""

from __future__ import annotations

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional

import amct.pytorch
from amct.pytorch.capture.cached_trace import cached_trace


class Standardized(nn.Conv2d):
    """Weight standardization, with padding of its own."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return functional.conv2d(functional.pad(x, (1, 1, 1, 1)), weight, bias=self.bias, stride=self.stride)


class Gained(nn.Linear):
    """A weight in the direction of rows, and a bias that is computed too."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.rand(outputs, 1) + 0.5)

    def forward(self, x):
        return functional.linear(x, self.gain * functional.normalize(self.weight), self.bias * 2)


class Conditional(nn.Linear):
    """A weight that depends on the input."""

    def forward(self, x):
        return functional.linear(x, self.weight * x.mean(), self.bias)


class Net(nn.Module):
    def __init__(self, last=Gained):
        super().__init__()
        self.conv = Standardized(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = last(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = Net().eval()
    net.norm.running_mean.uniform_(-1, 1)
    return net


def batches(count=3):
    return list(torch.randn(count, 2, 3, 12, 12, generator=torch.Generator().manual_seed(1)))


def test_the_computed_weight_is_quantized(model, tmp_path):
    before = copy.deepcopy(model.state_dict())
    quantized = amct.pytorch.quantize(model, batches())
    assert quantized.layers == ("conv", "head")
    assert not quantized.skipped  # the batch norm is folded into the computed weight
    quantized.save(tmp_path / "net", ["qdq"])
    session = onnxruntime.InferenceSession(tmp_path / "net_qdq_model.onnx")
    exact = onnxruntime.InferenceSession(quantized.prepared.float_model(None).SerializeToString())
    for batch in batches():
        wanted = model(batch).detach().numpy()
        np.testing.assert_allclose(exact.run(None, {"x": batch.numpy()})[0], wanted, rtol=1e-4, atol=1e-5)
        for given in (session.run(None, {"x": batch.numpy()})[0], quantized(batch).numpy()):
            assert np.square(given - wanted).sum() < 1e-3 * np.square(wanted).sum()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert [each.sqnr > 30 for each in quantized.compare(batches())] == [True, True]


def test_a_change_of_the_parameters_is_seen(model):
    def head_of(net):
        return cached_trace(net, batches()[0], all_layers=True, stored_weights=True).model.head.weight

    before = head_of(model).clone()
    with torch.no_grad():
        model.head.gain.mul_(2)
    torch.testing.assert_close(head_of(model), 2 * before)


def test_a_weight_that_depends_on_the_input_stays_float():
    quantized = amct.pytorch.quantize(Net(Conditional).eval(), batches())
    assert quantized.layers == ("conv",)
    (skip,) = quantized.skipped
    assert skip.layer == "head"
    assert "its forward computes the weight it uses" in skip.reason
    assert "into a plain Linear" in skip.reason


def test_training_goes_on_with_the_parameters(model):
    """A weight that is stored would not be trained."""
    traced = cached_trace(model, batches()[0], all_layers=True)
    assert {skip.layer for skip in traced.skips} == {"conv", "head"}


class Product(nn.Linear):
    """As in Falcon: the weight is transposed and multiplied by."""

    def forward(self, x):
        return x @ self.weight.T


def test_a_linear_layer_written_as_a_product(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(Product(6, 8, bias=False), nn.ReLU(), Product(8, 4, bias=False)).eval()
    data = [torch.randn(3, 6) for _ in range(3)]
    quantized = amct.pytorch.quantize(net, data)
    assert quantized.layers == ("0", "2")
    assert not quantized.skipped
    quantized.save(tmp_path / "net", ["qdq"])
    session = onnxruntime.InferenceSession(tmp_path / "net_qdq_model.onnx")
    wanted = net(data[0]).detach().numpy()
    given = session.run(None, {session.get_inputs()[0].name: data[0].numpy()})[0]
    assert np.square(given - wanted).sum() < 1e-3 * np.square(wanted).sum()
