"""The deploy file of a layer that is computed several times: each node in true integers, as in the fake-quant file."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from export_nets import run_all
from numpy_nets import AscendExecutor
from torch import nn

import amct.pytorch as amct


class Twice(nn.Module):
    """A convolution that reads its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(torch.relu(self.conv(x)))


def test_each_call_of_a_layer_computes_the_same_integers_as_the_fake_quant_file(tmp_path):
    torch.manual_seed(0)
    quantized = amct.quantize(Twice().eval(), [torch.randn(2, 3, 6, 6)])
    quantized.save(tmp_path / "net", formats=["deploy", "fake_quant"])
    deploy, simulated = (onnx.load(tmp_path / f"net_{name}_model.onnx") for name in ("deploy", "fake_quant"))
    feeds = {deploy.graph.input[0].name: torch.randn(2, 3, 6, 6).numpy()}
    executor = AscendExecutor(deploy)
    executor.run(feeds)
    tensors = run_all(onnx.shape_inference.infer_shapes(simulated), feeds)
    for name in ("conv", "conv@1"):
        (accumulator,) = [node.input[0] for node in deploy.graph.node if node.name == f"{name}.dequant"]
        (expected,) = [node.input[0] for node in simulated.graph.node if node.name == f"{name}.fakedequant.mul"]
        np.testing.assert_array_equal(executor.tensors[accumulator].values, tensors[expected])
