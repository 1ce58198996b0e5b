"""Our own functions and commands write only the files that the user asks for; AMCT's functions also write their log."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import amct.caffe
import amct.onnx_model
import amct.pytorch
import amct_pytorch
from amct import log
from amct.caffe.pycaffe import TEST, Net
from amct.cli import main

PROTOTXT = """name: "n"
input: "data" input_shape { dim: 1 dim: 2 dim: 4 dim: 4 }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
        convolution_param { num_output: 2 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip"
        inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
"""
BATCHES = [np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32) for _ in range(2)]
TORCH_MODULE = """from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 3))
"""


def torch_model():
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def onnx_model():
    weight = numpy_helper.from_array(np.ones((2, 2, 3, 3), np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 2, 2])
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"], name="conv")], "g", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log.stop()
    (tmp_path / "net.prototxt").write_text(PROTOTXT)
    Net("net.prototxt", TEST).save("net.caffemodel")
    (tmp_path / "its_model_for_logs.py").write_text(TORCH_MODULE)
    onnx.save(onnx_model(), "net.onnx")
    np.save("data.npy", np.concatenate(BATCHES))
    yield tmp_path
    log.stop()


def test_the_three_front_doors(folder, capsys):
    amct.pytorch.quantize(torch_model(), [torch.from_numpy(batch) for batch in BATCHES]).save("torch/net")
    amct.onnx_model.quantize("net.onnx", BATCHES).save("onnx/net")
    amct.caffe.quantize("net.prototxt", "net.caffemodel", BATCHES).save("caffe/net")
    assert "[AMCT][INFO]" in capsys.readouterr().err
    assert not (folder / "amct_log").exists()


@pytest.mark.parametrize("model", [["net.prototxt", "net.caffemodel"], ["net.onnx"], ["its_model_for_logs:build"]])
def test_the_command_line(folder, model):
    assert main(["quantize", *model, "--data", "data.npy", "-o", "out/net"]) == 0
    assert not (folder / "amct_log").exists()


def test_functions_of_amct_do(folder):
    amct_pytorch.create_quant_config("config.json", torch_model(), torch.from_numpy(BATCHES[0]))
    assert "wrote" in (folder / "amct_log" / "amct_pytorch.log").read_text()
