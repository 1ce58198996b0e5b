"""``save(batch_size=…)`` fixes the first axis of the files; without, they take batches of any size."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import amct.caffe
import amct.onnx_model
import amct.pytorch
from amct.cli import main
from amct.errors import ArgumentError
from amct.export.onnx.messages import fixed_batch_size
from amct.pytorch.door import reference_onnx
from amct_caffe import caffe

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
"""


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


@pytest.fixture(scope="module")
def quantized():
    return amct.pytorch.quantize(network(), [torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))])


@pytest.mark.parametrize("size", [1, 3, 8])
def test_all_files_take_one_batch_size(quantized, tmp_path, size):
    paths = quantized.save(tmp_path / "net", batch_size=size)
    models = [onnx.load(path) for path in paths if path.suffix == ".onnx"]
    assert len(models) == 3
    for model in models:
        assert fixed_batch_size(model) == size
        assert [value.type.tensor_type.shape.dim[0].dim_value for value in model.graph.output] == [size]
    session = onnxruntime.InferenceSession(tmp_path / "net_qdq_model.onnx")
    data = np.random.default_rng(0).normal(size=(size, 3, 8, 8)).astype(np.float32)
    found = session.run(None, {session.get_inputs()[0].name: data})[0]
    free = amct_free(quantized, tmp_path, data)
    np.testing.assert_array_equal(found, free)
    assert (tmp_path / "net_quant.json").read_text().count('"check"') == 3


def amct_free(quantized, folder, data):
    """The outputs of the file that takes any size."""
    quantized.save(folder / "free", ["qdq"], check=False)
    session = onnxruntime.InferenceSession(folder / "free_qdq_model.onnx")
    assert fixed_batch_size(onnx.load(folder / "free_qdq_model.onnx")) is None
    return session.run(None, {session.get_inputs()[0].name: data})[0]


def test_the_command_fixes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(reference_onnx(network(), np.zeros((2, 3, 8, 8), np.float32)), "net.onnx")
    np.save("data.npy", np.random.default_rng(0).normal(size=(6, 3, 8, 8)).astype(np.float32))
    arguments = ["quantize", "net.onnx", "--data", "data.npy", "--batch-size", "3", "-o", "out/net"]
    assert main([*arguments, "--fixed-batch-size", "4", "--formats", "qdq"]) == 0
    assert fixed_batch_size(onnx.load("out/net_qdq_model.onnx")) == 4
    assert main(arguments) == 0
    assert fixed_batch_size(onnx.load("out/net_qdq_model.onnx")) is None
    assert main([*arguments, "--fixed-batch-size", "0"]) == 2


def test_training_does_not_cap_it(tmp_path):
    model = amct.pytorch.prepare_qat(network(), torch.randn(2, 3, 8, 8))
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    model.save(tmp_path / "any", ["qdq"])
    assert fixed_batch_size(onnx.load(tmp_path / "any_qdq_model.onnx")) is None
    model.save(tmp_path / "six", ["qdq"], batch_size=6)
    assert fixed_batch_size(onnx.load(tmp_path / "six_qdq_model.onnx")) == 6


def test_a_size_that_the_files_cannot_have_is_refused(quantized, tmp_path):
    with pytest.raises(ArgumentError, match="batch_size: expected at least 1, got 0"):
        quantized.save(tmp_path / "net", batch_size=0)
    (tmp_path / "net.prototxt").write_text(NET)
    caffe.Net(str(tmp_path / "net.prototxt"), caffe.TEST).save(str(tmp_path / "net.caffemodel"))
    data = [np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)]
    fixed = amct.caffe.quantize(tmp_path / "net.prototxt", tmp_path / "net.caffemodel", data)
    with pytest.raises(
        ArgumentError, match=r"batch_size=4: this model cannot be run with other batches .* have 2; calibrate"
    ):
        fixed.save(tmp_path / "net", batch_size=4)
    assert not list(tmp_path.glob("*_qdq_model.onnx"))
    fixed.save(tmp_path / "net", ["qdq"], batch_size=2)
    assert fixed_batch_size(onnx.load(tmp_path / "net_qdq_model.onnx")) == 2
