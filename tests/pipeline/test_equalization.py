"""Equalization across layers changes nothing in float, in PyTorch as in ONNX, and makes channels more alike."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import amct.onnx_model
import amct.pytorch
from amct.errors import ConfigError
from amct.export.onnx.runtime import Runner

IMAGES = np.random.default_rng(5).normal(0.2, 1.0, size=(8, 3, 12, 12)).astype(np.float32)


def uneven(module, seed):
    """Output channels of very different size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        sizes = 10 ** (torch.rand(module.weight.shape[0], generator=generator) * 3 - 1.5)
        module.weight.mul_(sizes.reshape(-1, *[1] * (module.weight.ndim - 1)))
        if module.bias is not None:
            module.bias.mul_(sizes)
    return module


class Chain(nn.Module):
    """Convolutions, a depthwise one, activations, a Flatten with positions, linear layers."""

    def __init__(self, activation, flatten=True):
        super().__init__()
        torch.manual_seed(4)
        self.a = uneven(nn.Conv2d(3, 8, 3), 1)
        self.depthwise = uneven(nn.Conv2d(8, 8, 3, groups=8), 2)
        self.b = uneven(nn.Conv2d(8, 6, 1), 3)
        self.activation, self.pool = activation, nn.MaxPool2d(2)
        self.fc = nn.Linear(6 * 16 if flatten else 6, 10)
        self.out = nn.Linear(10, 4)
        self.flatten = flatten

    def forward(self, x):
        x = self.activation(self.depthwise(self.activation(self.a(x))))
        x = self.pool(self.activation(self.b(x)))
        x = x.flatten(1) if self.flatten else x.mean((2, 3))
        return self.out(self.activation(self.fc(x)))


class Residual(nn.Module):
    """A sum and an output read channels: nothing may be divided there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b, self.c = (uneven(nn.Conv2d(3, 3, 1), seed) for seed in (1, 2, 3))

    def forward(self, x):
        y = self.a(x)
        return self.c(self.b(y).relu() + y), y


def exported(model, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.onnx itself
        options = {"dynamo": True, "opset_version": 18, "verbose": False}
        torch.onnx.export(model, (torch.from_numpy(IMAGES),), folder / "net.onnx", **options)
    return folder / "net.onnx"


def floats(quantized, x):
    """The outputs of the folded float model in which weights were equalized."""
    return np.asarray(next(iter(Runner(quantized.prepared.float_model(None)).run({x: IMAGES}).values())))


def decibels(expected, got):
    return 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum())


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "leaky": nn.LeakyReLU(0.1),
    "prelu": nn.PReLU(init=0.2),
    "relu6": nn.ReLU6(),
    "silu": nn.SiLU(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("flatten", [True, False])
def test_nothing_changes_in_float(name, flatten):
    model = Chain(ACTIVATIONS[name], flatten).eval()
    expected = model(torch.from_numpy(IMAGES)).detach().numpy()
    quantized = amct.pytorch.quantize(model, [torch.from_numpy(IMAGES)], equalize=True)
    got = floats(quantized, quantized.prepared.traced.names.inputs[0])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    changed = not torch.equal(quantized.prepared.fused.model.a.weight, model.a.weight)
    assert changed == (name in {"relu", "leaky", "prelu"})


def test_channels_become_alike_and_less_is_lost():
    model = Chain(nn.ReLU()).eval()
    x = torch.from_numpy(IMAGES)
    expected = model(x).detach().numpy()
    plain, equal = (amct.pytorch.quantize(model, [x], equalize=each) for each in (False, True))
    before, after = (decibels(expected, each.model(x).detach().numpy()) for each in (plain, equal))
    assert after > before + 3


def test_both_doors_choose_the_same_factors(tmp_path):
    model = Chain(nn.ReLU(), flatten=False).eval()
    torch_side = amct.pytorch.quantize(model, [torch.from_numpy(IMAGES)], equalize=True)
    onnx_side = amct.onnx_model.quantize(exported(model, tmp_path), [IMAGES], equalize=True)
    expected = model(torch.from_numpy(IMAGES)).detach().numpy()
    name = onnx.load(tmp_path / "net.onnx").graph.input[0].name
    np.testing.assert_allclose(floats(onnx_side, name), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    pairs = zip(torch_side.prepared.weights.values(), onnx_side.prepared.weights.values(), strict=True)
    for first, second in pairs:
        torch.testing.assert_close(first.sources[0].tensor, second.sources[0].tensor, rtol=1e-4, atol=1e-6)


def test_channels_that_something_else_reads_stay():
    model = Residual().eval()
    quantized = amct.pytorch.quantize(model, [torch.from_numpy(IMAGES)], equalize=True)
    for name in ("a", "b", "c"):
        assert torch.equal(quantized.prepared.fused.model.get_submodule(name).weight, model.get_submodule(name).weight)


def test_it_is_refused_together_with_dmq():
    config = amct.pytorch.QuantConfig(common=amct.pytorch.LayerConfig(migration_strength=0.5))
    with pytest.raises(ConfigError, match="dmq_balancer and equalize scale the same channels"):
        amct.pytorch.quantize(Chain(nn.ReLU()).eval(), [torch.from_numpy(IMAGES)], config, equalize=True)
