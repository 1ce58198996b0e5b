"""``amct caffe to-onnx``."""

from __future__ import annotations

import onnx
from typer.testing import CliRunner

import amct.caffe
from amct.caffe.engine.messages import parse_message
from amct.caffe.engine.net import Net
from amct.cli.caffe import app

NET = """
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 } } }
layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
layer { name: "prob" type: "Softmax" bottom: "ip" top: "prob" }
layer { name: "accuracy" type: "Accuracy" bottom: "prob" bottom: "label" top: "accuracy" }
"""


def written(tmp_path):
    (tmp_path / "net.prototxt").write_text(NET)
    Net(parse_message(NET, "NetParameter", "test")).save_weights(tmp_path / "net.caffemodel")
    return ["to-onnx", "--model", str(tmp_path / "net.prototxt"), "--weights", str(tmp_path / "net.caffemodel")]


def test_a_file_and_its_notes(tmp_path):
    target = tmp_path / "net.onnx"
    result = CliRunner().invoke(app, [*written(tmp_path), "-o", str(target), "--opset", "20"])
    assert result.exit_code == 0, result.output
    assert 'note: the file ends before layer "accuracy"' in result.output
    assert f"written: {target}" in result.output.replace("\n", "")
    model = onnx.load(target)
    assert model.opset_import[0].version == 20
    assert [value.name for value in model.graph.output] == ["prob"]


def test_an_end(tmp_path):
    target = tmp_path / "net.onnx"
    CliRunner().invoke(app, [*written(tmp_path), "-o", str(target), "--end", "ip"], catch_exceptions=False)
    assert [value.name for value in onnx.load(target).graph.output] == ["ip"]


def test_the_function_is_in_the_package(tmp_path):
    arguments = written(tmp_path)
    notes = amct.caffe.export_onnx(arguments[2], arguments[4], tmp_path / "net.onnx")
    assert len(notes) == 1
    assert (tmp_path / "net.onnx").exists()
