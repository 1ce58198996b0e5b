"""A toy export format from outside the package: saved by the front doors and offered by the command line."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn
from typer.testing import CliRunner

import amct.caffe
import amct.onnx_model
import amct.pytorch
from amct.caffe import pycaffe
from amct.cli.app import app
from amct.errors import ArgumentError
from amct.extend import register_exporter

IMAGES = np.random.default_rng(5).normal(size=(4, 3, 8, 8)).astype(np.float32)


def toy(request):
    """The float model whose weights are rounded to the record's grid, as a model that says how many layers it has."""
    model = onnx.ModelProto()
    model.CopyFrom(request.model)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = {node.name: node for node in model.graph.node}
    for binding in request.bindings:
        tensor = stored[nodes[binding.node].input[1]]
        scale = request.qparams[binding.layer].scale_w.reshape(-1, 1, 1, 1)
        rounded = np.rint(numpy_helper.to_array(tensor) / scale) * scale
        tensor.CopyFrom(numpy_helper.from_array(rounded.astype(np.float32), tensor.name))
    helper.set_model_props(model, {"toy.layers": str(len(request.bindings))})
    return model


def toy_text(request):
    return "".join(f"{name} {factors.scale_d:.6g}\n" for name, factors in request.factors.items()).encode()


register_exporter(name="toy", exporter=toy)
register_exporter(name="toy_text", exporter=toy_text, file_name="scales.txt")


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.onnx itself
        torch.onnx.export(network(), (torch.from_numpy(IMAGES),), path, dynamo=True, opset_version=18, verbose=False)
    return path


@pytest.fixture(scope="module", params=["pytorch", "onnx"])
def quantized(request, onnx_file):
    if request.param == "pytorch":
        return amct.pytorch.quantize(network(), torch.from_numpy(IMAGES))
    return amct.onnx_model.quantize(onnx_file, IMAGES)


CAFFE_NET = """
name: "toy"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "gaussian" std: 0.3 } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "last" type: "Convolution" bottom: "conv" top: "last"
  convolution_param { num_output: 2 kernel_size: 1 weight_filler { type: "gaussian" std: 0.3 } } }
"""


@pytest.fixture
def caffe_net(tmp_path):
    files = tmp_path / "toy.prototxt", tmp_path / "toy.caffemodel"
    files[0].write_text(CAFFE_NET)
    net = pycaffe.Net(str(files[0]), pycaffe.TEST)
    net.save(str(files[1]))
    return net, files


def test_the_caffe_door_and_its_command_offer_the_format(caffe_net, tmp_path):
    net, files = caffe_net
    amct.caffe.quantize(*files, [IMAGES]).save(tmp_path / "q", formats=("toy", "toy_text", "deploy"))
    assert (tmp_path / "q_deploy_model.prototxt").exists()
    assert len((tmp_path / "q_scales.txt").read_text().splitlines()) == 2
    net.blobs["data"].data[...] = IMAGES
    expected = net.forward()["last"]
    got = onnxruntime.InferenceSession(tmp_path / "q_toy_model.onnx").run(None, {"data": IMAGES})[0]
    assert 0 < np.abs(got - expected).max() < 0.05 * np.abs(expected).max()
    listed = json.loads((tmp_path / "q_quant.json").read_text())["files"]
    assert {"q_toy_model.onnx", "q_scales.txt"} <= set(listed)
    np.save(tmp_path / "images.npy", IMAGES)
    command = ["quantize", *map(str, files), "--data", str(tmp_path / "images.npy"), "-o", str(tmp_path / "c")]
    result = CliRunner().invoke(app, [*command, "--formats", "toy"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "c_toy_model.onnx").exists()


def check_file(path):
    expected = network()(torch.from_numpy(IMAGES)).detach().numpy()
    got = onnxruntime.InferenceSession(path).run(None, {onnx.load(path).graph.input[0].name: IMAGES})[0]
    assert 0 < np.abs(got - expected).max() < 0.05
    assert {entry.key: entry.value for entry in onnx.load(path).metadata_props}["toy.layers"] == "2"


def test_save_offers_the_format(quantized, tmp_path):
    written = quantized.save(tmp_path / "q", formats=("toy", "toy_text", "qdq"))
    names = ["q_toy_model.onnx", "q_scales.txt", "q_qdq_model.onnx", "q_quant.json"]
    assert [path.name for path in written] == names
    check_file(tmp_path / "q_toy_model.onnx")
    assert [line.split()[0] for line in (tmp_path / "q_scales.txt").read_text().splitlines()] == list(quantized.layers)
    files = json.loads((tmp_path / "q_quant.json").read_text())["files"]
    assert {name: entry["format"] for name, entry in files.items()} == {
        "q_toy_model.onnx": "toy",
        "q_scales.txt": "toy_text",
        "q_qdq_model.onnx": "qdq",
    }


def test_the_command_line_offers_the_format(onnx_file, tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    command = ["quantize", str(onnx_file), "--data", str(tmp_path / "images.npy"), "-o", str(tmp_path / "q")]
    result = CliRunner().invoke(app, [*command, "--formats", "toy,qdq"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    check_file(tmp_path / "q_toy_model.onnx")
    assert (tmp_path / "q_qdq_model.onnx").exists()
    assert not (tmp_path / "q_deploy_model.onnx").exists()


def test_mistakes(quantized, tmp_path):
    with pytest.raises(ArgumentError, match=r'"toi" is unknown\. Did you mean "toy"'):
        quantized.save(tmp_path / "q", formats=("toi",))
    with pytest.raises(ArgumentError, match='an exporter "qdq" is registered already'):
        register_exporter(name="qdq", exporter=toy)
    with pytest.raises(ArgumentError, match='expected letters, digits and "_"'):
        register_exporter(name="a b", exporter=toy)
