"""Exported files take batches of any size where the model lets it vary; else the log says why."""

from __future__ import annotations

import logging

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import amct.pytorch
from amct.pytorch import IoOptions


class Attention(nn.Module):
    """With sizes of the batch in Reshape, Expand and Transpose."""

    def __init__(self):
        super().__init__()
        self.first, self.token = nn.Linear(8, 24), nn.Parameter(torch.rand(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        q, k, v = self.first(x).reshape(x.shape[0], -1, 3, 8).permute(2, 0, 1, 3)
        return self.attention(q, k, v)[0].mean(1)


class Fixed(nn.Module):
    """Its forward fixes the size of the batch."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 4)

    def forward(self, x):
        return self.first(x.reshape(4, -1, 8)).sum(1)


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def shapes_and_outputs(path, data):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return given.shape[0], [session.run(None, {given.name: each.numpy()})[0] for each in data]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("make", "shape"), [(convolutions, (3, 8, 8)), (Attention, (5, 8))], ids=["convolutions", "attention"]
)
def test_the_files_take_one_sample_and_two(make, shape, size, tmp_path):
    torch.manual_seed(0)
    model, batch = make().eval(), torch.rand(size, *shape)
    quantized = amct.pytorch.quantize(model, [batch])
    quantized.save(tmp_path / "net", ("qdq", "fake_quant"))
    data = [torch.rand(count, *shape) for count in (1, 2, 7)]
    with torch.no_grad():
        expected = [quantized.model(each).numpy() for each in data]
    for name in ("qdq", "fake_quant"):
        axis, found = shapes_and_outputs(tmp_path / f"net_{name}_model.onnx", data)
        assert axis == "batch"
        for exact, got in zip(expected, found, strict=True):
            assert np.abs(exact - got).max() < 0.05 * np.abs(exact).max()


def test_a_model_that_fixes_the_batch_says_so(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        quantized = amct.pytorch.quantize(Fixed(), torch.rand(4, 2, 8))
    assert "Fixed: the files take batches of 4 samples only, as the model does not let their number vary" in caplog.text
    quantized.save(tmp_path / "net", ("fake_quant",))
    assert shapes_and_outputs(tmp_path / "net_fake_quant_model.onnx", [torch.rand(4, 2, 8)])[0] == 4


def test_a_fixed_batch_can_be_asked_for(tmp_path):
    options = IoOptions(dynamic_axes={})
    amct.pytorch.quantize(convolutions().eval(), torch.rand(3, 3, 8, 8), io=options).save(tmp_path / "net", ("qdq",))
    assert shapes_and_outputs(tmp_path / "net_qdq_model.onnx", [torch.rand(3, 3, 8, 8)])[0] == 3


def test_training_does_not_cap_the_batch(tmp_path):
    trained = amct.pytorch.prepare_qat(convolutions(), torch.rand(80, 3, 8, 8)).eval()
    trained.save(tmp_path / "net", ("qdq",))
    assert shapes_and_outputs(tmp_path / "net_qdq_model.onnx", [torch.rand(100, 3, 8, 8)])[0] == "batch"


def test_a_second_quantization_uses_the_same_trace_with_its_own_names(tmp_path):
    model = convolutions().eval()
    for name in ("first", "second"):
        io = IoOptions(input_names=[name])
        amct.pytorch.quantize(model, torch.rand(2, 3, 8, 8), io=io).save(tmp_path / name, ("fake_quant",))
        session = onnxruntime.InferenceSession(tmp_path / f"{name}_fake_quant_model.onnx")
        assert (session.get_inputs()[0].name, session.get_inputs()[0].shape[0]) == (name, "batch")
