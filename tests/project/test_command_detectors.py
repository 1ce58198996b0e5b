"""Detectors of all doors: boxes are matched when a file is saved, by ``amct compare`` and in the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save_model

from amct.cli import main
from amct.export.check.batch import CALIBRATION
from amct.export.check.losses import ComparedBatch, compared
from amct.model.quant_json import read_quant_json

HEAD = """\
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 16 dim: 16 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 stride: 4 weight_filler { type: "gaussian" std: 0.3 } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
"""
SSD = (
    HEAD
    + """
layer { name: "loc" type: "Convolution" bottom: "conv" top: "loc"
  convolution_param { num_output: 4 kernel_size: 1 weight_filler { type: "gaussian" std: 0.3 } } }
layer { name: "loc_perm" type: "Permute" bottom: "loc" top: "loc_perm"
  permute_param { order: 0 order: 2 order: 3 order: 1 } }
layer { name: "loc_flat" type: "Flatten" bottom: "loc_perm" top: "loc_flat" }
layer { name: "conf" type: "Convolution" bottom: "conv" top: "conf"
  convolution_param { num_output: 2 kernel_size: 1 weight_filler { type: "gaussian" std: 0.8 } } }
layer { name: "conf_perm" type: "Permute" bottom: "conf" top: "conf_perm"
  permute_param { order: 0 order: 2 order: 3 order: 1 } }
layer { name: "rows" type: "Reshape" bottom: "conf_perm" top: "rows" reshape_param { shape { dim: 0 dim: -1 dim: 2 } } }
layer { name: "prob" type: "Softmax" bottom: "rows" top: "prob" softmax_param { axis: 2 } }
layer { name: "conf_flat" type: "Flatten" bottom: "prob" top: "conf_flat" }
layer { name: "priors" type: "PriorBox" bottom: "conv" bottom: "data" top: "priors"
  prior_box_param { min_size: 4 variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.2 } }
layer { name: "found" type: "DetectionOutput" bottom: "loc_flat" bottom: "conf_flat" bottom: "priors" top: "found"
  detection_output_param { num_classes: 2 code_type: CENTER_SIZE confidence_threshold: 0.1 keep_top_k: 20
    nms_param { nms_threshold: 0.45 top_k: 20 } } }
"""
)
YOLO = (
    HEAD
    + """
layer { name: "maps" type: "Convolution" bottom: "conv" top: "maps"
  convolution_param { num_output: 14 kernel_size: 1 weight_filler { type: "gaussian" std: 0.8 } } }
layer { name: "found" type: "YoloDetectionOutput" bottom: "maps" top: "found"
  yolo_detection_output_param { num_classes: 2 num_box: 2 confidence_threshold: 0.3 nms_threshold: 0.6
    biases: 1.2 biases: 1.4 biases: 0.8 biases: 0.7 } }
"""
)
COMMON = ["--data", "data.npy", "--batch-size", "1"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AMCT_LOG_LEVEL", "warning")
    np.save("data.npy", np.random.default_rng(0).normal(size=(6, 3, 16, 16)).astype(np.float32))
    return tmp_path


def caffe_net(text):
    from amct_caffe import caffe

    Path("net.prototxt").write_text(text)
    caffe.set_random_seed(3)
    caffe.Net("net.prototxt", caffe.TEST).save("net.caffemodel")
    return "net.prototxt", "net.caffemodel"


def onnx_net(*, selects):
    """Rows of x1, y1, x2, y2, score, label: those above 0.5, or all of them."""
    random = np.random.default_rng(3)
    weights = {
        "w": random.normal(size=(6, 3, 4, 4)).astype(np.float32) * 0.15,
        "scale": np.array([0, 0, 0, 0, 1, 0], np.float32),
        "corner": np.array([0, 0, 9, 9, 0, 1], np.float32),
        "move": np.array([1, 1, 1, 1, 0, 0], np.float32),
        "least": np.array(0.5, np.float32),
        "shape": np.array([-1, 6]),
        "score": np.array([4]),
        "one": np.array([-1]),
    }
    nodes = [
        helper.make_node("Conv", ["data", "w"], ["maps"], "conv", strides=[4, 4]),
        helper.make_node("Transpose", ["maps"], ["last"], perm=[0, 2, 3, 1]),
        helper.make_node("Reshape", ["last", "shape"], ["numbers"]),
        helper.make_node("Sigmoid", ["numbers"], ["shares"]),
        helper.make_node("Mul", ["numbers", "move"], ["moved"]),
        helper.make_node("Mul", ["shares", "scale"], ["scored"]),
        helper.make_node("Add", ["moved", "scored"], ["both"]),
        helper.make_node("Add", ["both", "corner"], ["rows"]),
        helper.make_node("Gather", ["rows", "score"], ["scores"], axis=1),
        helper.make_node("Greater", ["scores", "least"], ["is_sure"]),
        helper.make_node("Reshape", ["is_sure", "one"], ["mask"]),
        helper.make_node("Compress", ["rows", "mask"], ["found"], axis=0),
    ]
    output = "found" if selects else "rows"
    graph = helper.make_graph(
        nodes,
        "detector",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [None, 6])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), "net.onnx")
    return ("net.onnx",)


def boxes_of(argv, capsys):
    capsys.readouterr()
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("text", "output"), [(SSD, "found"), (YOLO, "found")], ids=["SSD", "YOLO"])
def test_boxes_of_a_caffe_detector(text, output, here, capsys):
    net = caffe_net(text)
    assert main(["quantize", *net, *COMMON, "-o", "out/net"]) == 0
    shown = capsys.readouterr()
    assert "could not be compared" not in shown.out + shown.err
    document = read_quant_json(here / "out" / "net_quant.json")
    for name in ("net_fake_quant_model.prototxt", "net_deploy_model.prototxt"):
        (found,) = document.files[name].check.boxes
        assert found.output == output
        assert found.boxes >= 3
        assert found.found >= 0.8 * found.boxes
        assert document.files[name].check.verdict is not None
        assert f"{found.found} of {found.boxes} boxes found again" in shown.out
    result = boxes_of(["compare", *net, "out/net", *COMMON, "--json"], capsys)
    assert result["outputs"] == []
    assert result["boxes"][0]["boxes"] >= 3
    assert main(["compare", *net, "out/net", *COMMON]) == 0
    assert result["boxes"][0]["text"] in capsys.readouterr().out
    assert main(["report", *net, "out/net", *COMMON, "-o", "page.html"]) == 0
    page = (here / "page.html").read_text()
    assert "boxes found again in found" in page
    assert "no output could be compared" not in page


@pytest.mark.usefixtures("here")
def test_selected_boxes_of_an_onnx_model(capsys):
    """In some of these batches a box is just above the least score in one model and just below it in the other."""
    net = onnx_net(selects=True)
    assert main(["quantize", *net, *COMMON, "-o", "out/net", "--formats", "qdq"]) == 0
    np.save("more.npy", np.random.default_rng(1).normal(size=(60, 3, 16, 16)).astype(np.float32))
    result = boxes_of(["compare", *net, "out/net", "--data", "more.npy", "--batch-size", "1", "--json"], capsys)
    (box,) = result["boxes"]
    assert box["output"] == "found"
    assert 0.9 * box["boxes"] <= box["found"] <= box["boxes"]


def test_the_check_of_a_file_matches_boxes_whose_number_differs(tmp_path):
    row = np.array([[10, 10, 30, 30, 0.9, 1], [50, 50, 70, 70, 0.8, 1]], np.float32)
    batches = [ComparedBatch(inputs={}, expected={"found": row}, simulated={"found": row})] * 2
    check = compared(tmp_path / "file.onnx", CALIBRATION, batches, [{"found": row[::-1]}, {"found": row[:1]}])
    assert str(check.boxes[0]) == "3 of 4 boxes found again, mean IoU 1.00, scores differ by 0.000"
    assert (check.cosine, check.verdict, check.not_checked) == (None, "acceptable", "")
    nothing = compared(tmp_path / "file.onnx", CALIBRATION, batches, [{"found": row[:0]}] * 2)
    assert nothing.verdict == "broken"
    unsure = [ComparedBatch(inputs={}, expected={"found": row - 0.7}, simulated={"found": row})]
    assert (
        "no box has a score of 0.5 or more"
        in compared(tmp_path / "f", CALIBRATION, unsure, [{"found": row[:0]}]).text()
    )


def test_boxes_of_a_fixed_number_are_matched_on_demand(here, capsys):
    net = onnx_net(selects=False)
    assert main(["quantize", *net, *COMMON, "-o", "out/net", "--formats", "qdq"]) == 0
    command = ["compare", *net, "out/net", *COMMON, "--json"]
    plain = boxes_of(command, capsys)
    assert (len(plain["outputs"]), plain["boxes"]) == (1, [])
    asked = boxes_of([*command, "--boxes", "--report", "page.html"], capsys)
    assert asked["outputs"] == []
    assert asked["boxes"][0]["boxes"] >= 3
    assert "boxes found again in rows" in (here / "page.html").read_text()


@pytest.mark.usefixtures("here")
def test_a_model_without_boxes_says_so(capsys):
    net = caffe_net(HEAD)
    assert main(["quantize", *net, *COMMON, "-o", "out/net"]) == 0
    assert main(["compare", *net, "out/net", *COMMON, "--boxes"]) == 2
    assert "no output holds boxes; known are rows of image, label, score" in capsys.readouterr().err


def test_two_quantizations_of_a_detector_side_by_side(here):
    net = caffe_net(SSD)
    for name in ("a", "b"):
        assert main(["quantize", *net, *COMMON, "-o", f"out/{name}", "--formats", "deploy", "--report"]) == 0
    assert main(["report", "--compare", "out/a_quant.json", "out/b_quant.json", "-o", "both.html"]) == 0
    assert "boxes found again" in (here / "both.html").read_text()
