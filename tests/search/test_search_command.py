"""``amct quantize`` with a goal, its points, and ``amct certificate check``."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from three_doors import caffe_pair, onnx_file, torch_network

import amct.pytorch
from amct.caffe import pycaffe as caffe
from amct.cli import main
from amct.cli.options import DataOptions
from amct.cli.search import _read
from amct.errors import ArgumentError, ParseError
from amct.model.quant_json import read_quant_json

PICTURES = np.random.default_rng(9).normal(0.2, 1, (700, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    model = torch_network()
    onnx_file(model, folder)
    caffe_pair(model, folder)
    with torch.no_grad():
        labels = model(torch.from_numpy(PICTURES)).argmax(1).numpy()
    np.savez(folder / "data.npz", data=PICTURES, labels=labels)
    return folder


@pytest.fixture(scope="module")
def searched(folder):
    arguments = [str(folder / "net.onnx"), "--data", str(folder / "data.npz"), "--max-drop", "3"]
    assert main(["quantize", *arguments, "-o", str(folder / "out" / "net"), "--no-check"]) == 0
    return folder / "out"


def test_a_goal_on_the_command_line(searched, capsys):
    document = read_quant_json(searched / "net_quant.json")
    assert document.certificate.met
    assert document.curve
    assert not (searched / "net_search.jsonl").exists()
    assert main(["certificate", "check", str(searched / "net_quant.json")]) == 0
    assert "follow from the losses" in capsys.readouterr().out


def test_the_config_of_every_point_is_read_by_amct(searched, folder):
    document = read_quant_json(searched / "net_quant.json")
    for point in document.curve:
        config = searched / "net_points" / f"{point.number}.json"
        assert json.loads(config.read_text()) == json.loads(json.dumps(point.config))
        assert main(["config", "check", str(config), "--model", str(folder / "net.onnx")]) == 0


def test_another_point_is_written_without_searching(searched, folder, capsys):
    document = read_quant_json(searched / "net_quant.json")
    other = next(point for point in document.curve if not point.chosen)
    arguments = [str(folder / "net.onnx"), "--data", str(folder / "data.npz"), "--point", str(other.number)]
    assert main(["quantize", *arguments, "-o", str(searched / "net"), "--no-check"]) == 0
    assert f"point {other.number} of a search" in capsys.readouterr().out
    again = read_quant_json(searched / "net_quant.json")
    assert [point.chosen for point in again.curve] == [point.number == other.number for point in again.curve]
    float_layers = {name for name, choice in other.choices.items() if choice == "float"}
    assert float_layers == {skip.layer for skip in again.skipped}
    assert main(["quantize", *arguments[:-1], "99", "-o", str(searched / "net")]) == 2
    assert "has no point 99" in capsys.readouterr().err


def test_a_changed_certificate_is_noticed(folder, tmp_path, capsys):
    arguments = [str(folder / "net.onnx"), "--data", str(folder / "data.npz"), "--min-agreement", "95"]
    assert main(["quantize", *arguments, "-o", str(tmp_path / "net"), "--no-check", "--formats", "qdq"]) == 0
    path = tmp_path / "net_quant.json"
    document = json.loads(path.read_text())
    document["certificate"]["bound"] /= 2
    path.write_text(json.dumps(document))
    assert main(["certificate", "check", str(path)]) == 2
    assert "the certificate is not right: bound" in capsys.readouterr().err


def test_labels_of_pictures_and_a_caffe_model(folder, tmp_path, capsys):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    lines = []
    with torch.no_grad():
        for number, values in enumerate(np.random.default_rng(3).integers(0, 255, (120, 8, 8, 3), np.uint8)):
            Image.fromarray(values).save(pictures / f"{number}.png")
            shown = torch.from_numpy(values[..., ::-1].transpose(2, 0, 1)[None].copy()).float() / 64
            lines.append(f"{number}.png\t{int(torch_network()(shown).argmax())}")
    labels = tmp_path / "labels.tsv"
    labels.write_text("\n".join(lines))
    arguments = [str(folder / "net.prototxt"), str(folder / "net.caffemodel"), "--data", str(pictures)]
    arguments += [
        "--scale",
        "0.015625",
        "--max-drop",
        "8",
        "--batch-size",
        "4",
        "-o",
        str(tmp_path / "out"),
        "--no-check",
    ]
    assert main(["quantize", *arguments, "--labels", str(labels)]) == 0
    assert "certificate a drop of at most 8 points" in capsys.readouterr().out
    assert main(["quantize", *arguments]) == 2
    assert "give --labels" in capsys.readouterr().err
    labels.write_text("0.png\tcat")
    assert main(["quantize", *arguments, "--labels", str(labels)]) == 2
    assert "labels.tsv:1: expected a file name, a tab and a class number" in capsys.readouterr().err


def test_an_interrupted_search_leaves_its_best_and_goes_on(folder, tmp_path, monkeypatch, capsys):
    from amct.search.journal import Journal

    original, calls = Journal.add, []

    def add(self, name, losses):
        original(self, name, losses)
        calls.append(name)
        if name.startswith("certificate"):
            raise KeyboardInterrupt

    arguments = [str(folder / "net.onnx"), "--data", str(folder / "data.npz"), "--max-drop", "5"]
    arguments += ["-o", str(tmp_path / "net"), "--no-check"]
    monkeypatch.setattr(Journal, "add", add)
    assert main(["quantize", *arguments]) == 130
    best = read_quant_json(tmp_path / "net_quant.json")
    assert best.certificate.remark == "not certified: the search has not ended"
    assert (tmp_path / "net_search.jsonl").exists()
    monkeypatch.setattr(Journal, "add", lambda self, name, losses: calls.append(name) or original(self, name, losses))
    calls.clear()
    assert main(["quantize", *arguments, "--resume"]) == 0
    assert {name.split()[0] for name in calls} == {"certificate"}
    assert read_quant_json(tmp_path / "net_quant.json").certificate.met
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--labels", "data.npz"], "--labels: goes with --max-drop"),
        (["--point", "1", "--max-drop", "1"], "leave out the goal"),
        (["--max-drop", "1", "--evaluate", "json"], "module:function"),
        (["--max-drop", "1", "--evaluate", "json:nothing"], 'has no function "nothing"'),
        (["--max-drop", "1", "--minimize", "weight"], "expected one of size, latency, bitops"),
        (["--max-drop", "1", "--choices", "int3"], '"int3" is unknown'),
        (["--point", "1"], "does not exist"),
    ],
)
def test_wrong_options_are_answered(folder, tmp_path, options, message, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["quantize", "net.onnx", "--data", "data.npz", "-o", str(tmp_path / "net"), *options]) == 2
    assert message in capsys.readouterr().err


TWO_INPUTS = """
import torch
from torch import nn


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(12, 32), nn.Linear(6, 32), nn.Linear(32, 5)

    def forward(self, left, right):
        return self.out(torch.relu(self.left(left) + self.right(right)))


def build():
    torch.manual_seed(3)
    return Two().eval()
"""
TWO_PROTOTXT = """
name: "two"
input: "left" input_shape { dim: 1 dim: 12 }
input: "right" input_shape { dim: 1 dim: 6 }
layer { name: "l" type: "InnerProduct" bottom: "left" top: "l" inner_product_param { num_output: 32 } }
layer { name: "r" type: "InnerProduct" bottom: "right" top: "r" inner_product_param { num_output: 32 } }
layer { name: "sum" type: "Eltwise" bottom: "l" bottom: "r" top: "sum" }
layer { name: "relu" type: "ReLU" bottom: "sum" top: "relu" }
layer { name: "out" type: "InnerProduct" bottom: "relu" top: "out" inner_product_param { num_output: 5 } }
"""


@pytest.fixture(scope="module")
def two_inputs(tmp_path_factory):
    """A model with two inputs for every door, and its data with labels."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "two.py").write_text(TWO_INPUTS)
    names = {}
    exec(TWO_INPUTS, names)
    model = names["build"]()
    left, right = torch.randn(600, 12), torch.randn(600, 6)
    with torch.no_grad():
        labels = model(left, right).argmax(1).numpy()
    np.savez(folder / "data.npz", left=left.numpy(), right=right.numpy(), labels=labels)
    made = amct.pytorch.quantize(model, [{"left": left[:8], "right": right[:8]}])
    onnx.save(made.prepared.float_model(None), folder / "two.onnx")
    (folder / "two.prototxt").write_text(TWO_PROTOTXT)
    net = caffe.Net(str(folder / "two.prototxt"), caffe.TEST)
    for name, layer in (("l", model.left), ("r", model.right), ("out", model.out)):
        net.params[name][0].data[...] = layer.weight.detach().numpy()
        net.params[name][1].data[...] = layer.bias.detach().numpy()
    net.save(str(folder / "two.caffemodel"))
    return folder


@pytest.mark.parametrize("model", [["two.onnx"], ["./two.py:build"], ["two.prototxt", "two.caffemodel"]])
def test_models_with_several_inputs(model, two_inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(two_inputs)
    arguments = [*model, "--data", "data.npz", "--batch-size", "1" if len(model) > 1 else "8"]
    goal = ["--max-drop", "5", "-o", str(tmp_path / "net"), "--no-check"]
    assert main(["quantize", *arguments, *goal]) == 0
    document = read_quant_json(tmp_path / "net_quant.json")
    assert document.certificate.met
    assert document.certificate.samples > 200
    assert main(["doctor", *arguments, "--batches", "16", "-o", str(tmp_path / "best.json")]) == 0
    assert "SQNR of the output" in capsys.readouterr().out
    assert main(["quantize", *arguments, "--min-agreement", "80", "-o", str(tmp_path / "other"), "--no-check"]) == 0


def test_arrays_without_labels_are_told(two_inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(two_inputs)
    known = np.load("data.npz")
    np.savez(tmp_path / "bare.npz", left=known["left"], right=known["right"])
    assert main(["quantize", "two.onnx", "--data", str(tmp_path / "bare.npz"), "--max-drop", "1", "-o", "o/n"]) == 2
    assert (
        "the samples have no labels, which --max-drop needs; give an array of the name labels"
        in capsys.readouterr().err
    )
    assert main(["quantize", "two.onnx", "--data", str(tmp_path / "absent.npz"), "--max-drop", "1", "-o", "o/n"]) == 2
    assert "absent.npz" in capsys.readouterr().err


def test_labels_of_pictures_with_one_name_in_several_folders(tmp_path):
    folders = tmp_path / "a", tmp_path / "b"
    for number, folder in enumerate(folders):
        folder.mkdir()
        Image.fromarray(np.full((8, 8, 3), 40 * number, np.uint8)).save(folder / "1.png")
    data = DataOptions(data=tmp_path)
    labels = tmp_path / "labels.tsv"
    labels.write_text("\ufeffa/1.png\t3\nb/1.png\t5\n")  # as some editors write it
    assert sorted(_read(data, labels, ()).labels) == [3, 5]
    labels.write_text("1.png\t3\n")
    with pytest.raises(ArgumentError, match="write their folders too"):
        _read(data, labels, ())
    labels.write_text("1.png\t3\n1.png\t4\n")
    with pytest.raises(ParseError, match=r'labels.tsv:2: "1.png" has the label 3 before and 4 here'):
        _read(data, labels, ())
