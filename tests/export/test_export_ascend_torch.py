"""Deploy files of torch models, every kind of layer, executed in true integers: bit for bit those of fake-quant."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from export_nets import run_all
from numpy_nets import AscendExecutor
from onnx import numpy_helper
from torch import Tensor, nn

import amct.pytorch as amct


class EveryKind(nn.Module):
    """All layers whose products are integers, each reading its input through a Relu or straight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(4, 6, 3, padding=1, stride=2)
        self.up1d = nn.ConvTranspose1d(6, 4, 2, stride=2, groups=2)
        self.conv2d = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.pool = nn.AvgPool2d(2)
        self.up2d = nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2)
        self.conv3d = nn.Conv3d(2, 4, 3, padding=1)
        self.fc = nn.Linear(6 * 8 * 8, 5)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        line = self.up1d(torch.relu(self.conv1d(a)))
        plane = self.up2d(self.pool(torch.relu(self.conv2d(b))))
        return line, self.fc(plane.flatten(1)), torch.relu(self.conv3d(c))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    shapes = ((2, 4, 8), (2, 4, 8, 8), (2, 2, 4, 4, 4))
    calibration, unseen = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    quantized = amct.quantize(EveryKind().eval(), [tuple(calibration)])
    folder = tmp_path_factory.mktemp("ascend")
    quantized.save(folder / "net", formats=["deploy", "fake_quant"])
    models = [onnx.load(folder / f"net_{name}_model.onnx") for name in ("deploy", "fake_quant")]
    names = [value.name for value in models[0].graph.input]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, unseen, strict=True)}
    return quantized, *models, feeds


def accumulators(model, layer):
    """The tensor that a layer's AscendDequant reads."""
    return next(node for node in model.graph.node if node.name == f"{layer}.dequant").input[0]


def test_inputs_and_sums_of_every_layer_are_the_same_integers(exported):
    quantized, deploy, simulated, feeds = exported
    assert set(quantized.layers) == {name for name, _ in EveryKind().named_children()}
    executor = AscendExecutor(deploy)
    results = executor.run(feeds)
    tensors = run_all(onnx.shape_inference.infer_shapes(simulated), feeds)
    multiplied = {node.name: node.input[0] for node in simulated.graph.node if node.input}
    for layer in quantized.layers:
        integers = executor.tensors[f"{layer}.quant.output0"].values
        assert np.array_equal(integers, tensors[f"{layer}.quant.fakequant.clip.output0"]), layer
        sums = executor.tensors[accumulators(deploy, layer)].values
        assert np.array_equal(sums, tensors[multiplied[f"{layer}.fakedequant.mul"]]), layer
    for name, result in results.items():
        assert np.array_equal(result, tensors[name]), name


def test_no_weight_and_no_bias_is_stored_as_float(exported):
    quantized, deploy, _, _ = exported
    model = EveryKind()
    stored = [numpy_helper.to_array(tensor) for tensor in deploy.graph.initializer]
    assert {array.dtype for array in stored if array.ndim > 1} <= {np.dtype(np.int8)}
    floats = sum(array.size for array in stored if array.dtype.kind == "f")
    assert floats == 0
    held = sum(array.size for array in stored if array.dtype == np.int8)
    assert held == sum(model.get_submodule(name).weight.numel() for name in quantized.layers if name != "pool")


@pytest.mark.parametrize("layer", ["conv1d", "up1d", "conv2d", "up2d", "conv3d", "fc"])
def test_one_bit_of_any_layers_weight_changes_what_it_computes(layer, exported):
    _, deploy, _, feeds = exported
    executor = AscendExecutor(deploy)
    executor.run(feeds)
    tensor = accumulators(deploy, layer)
    expected = executor.tensors[tensor].values
    changed = onnx.ModelProto()
    changed.CopyFrom(deploy)
    weight = next(node for node in changed.graph.node if node.name == layer).input[1]
    store = next(item for item in changed.graph.initializer if item.name == weight)
    raw = bytearray(store.raw_data)
    raw[len(raw) // 2] ^= 1
    store.raw_data = bytes(raw)
    other = AscendExecutor(changed)
    other.run(feeds)
    assert not np.array_equal(other.tensors[tensor].values, expected)
