"""``amct compare`` and ``amct report`` on small models made here; Ctrl-C in the middle of each command."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save_model
from PIL import Image

import amct.pytorch
from amct.cli import main

PROTOTXT = """\
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
"""
FACTORY = """\
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a float Caffe, ONNX and PyTorch model, their quantized files, and data with labels."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "net.prototxt").write_text(PROTOTXT)
    (folder / "my_nets_of_compare_test.py").write_text(FACTORY)
    random = np.random.default_rng(0)
    values = random.normal(size=(6, 3, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", data=values, labels=np.arange(6) % 5)
    np.save(folder / "bare.npy", values)
    save_model(onnx_model(random), folder / "net.onnx")
    (folder / "broken.onnx").write_bytes(b"no model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("AMCT_LOG_LEVEL", "error")
        from amct_caffe import caffe

        caffe.Net("net.prototxt", caffe.TEST).save("net.caffemodel")
        common = ["--data", "data.npz", "--batch-size", "2", "-o"]
        assert main(["quantize", "net.prototxt", "net.caffemodel", *common, "out/caffe"]) == 0
        assert main(["quantize", "net.onnx", *common, "out/onnx"]) == 0
        assert main(["quantize", "my_nets_of_compare_test:build", *common, "out/torch"]) == 0
    return folder


def onnx_model(random):
    """``relu(conv(x))``, flat, times a matrix."""
    weights = {
        "w": random.normal(size=(4, 3, 3, 3)),
        "b": random.normal(size=4),
        "v": random.normal(size=(144, 5)),
        "c": random.normal(size=5),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["a"], name="conv"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("Flatten", ["r"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "v", "c"], ["y"], name="fc"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


MODELS = {
    "Caffe": (["net.prototxt", "net.caffemodel", "out/caffe"], ["conv", "fc"], "fc"),
    "Caffe deploy": (["net.prototxt", "out/caffe_deploy_model.prototxt"], ["conv", "fc"], "fc"),
    "Caffe all files": (
        [
            "net.prototxt",
            "net.caffemodel",
            "out/caffe_fake_quant_model.prototxt",
            "out/caffe_fake_quant_weights.caffemodel",
        ],
        ["conv", "fc"],
        "fc",
    ),
    "ONNX": (["net.onnx", "out/onnx"], ["conv", "fc"], "y"),
    "ONNX file": (["net.onnx", "out/onnx_fake_quant_model.onnx"], ["conv", "fc"], "y"),
    "PyTorch": (["my_nets_of_compare_test:build", "out/torch"], ["0", "4"], "linear"),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("models", "layers", "output"), MODELS.values(), ids=MODELS)
def test_outputs_and_layers_as_json(models, layers, output, capsys):
    assert main(["compare", *models, "--data", "data.npz", "--batch-size", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in found["layers"]] == layers
    assert [row["output"] for row in found["outputs"]] == [output]
    for row in (*found["layers"], *found["outputs"]):
        assert row["cosine"] > 0.99
        assert row["sqnr"] > 20
    # The last layer makes the output.
    assert found["outputs"][0]["sqnr"] == pytest.approx(found["layers"][-1]["sqnr"], abs=1e-6)
    assert found["batches"] == 3


@pytest.mark.usefixtures("folder")
def test_caffe_numbers_are_those_of_the_api(capsys):
    import amct.caffe as amct

    assert main(["compare", "net.prototxt", "out/caffe", "--data", "data.npz", "--batch-size", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layers"]
    pair = ("out/caffe_fake_quant_model.prototxt", "out/caffe_fake_quant_weights.caffemodel")
    expected = amct.compare(("net.prototxt", "net.caffemodel"), pair, np.load("data.npz")["data"])
    assert [(row["sqnr"], row["cosine"]) for row in found] == [(each.sqnr, each.cosine) for each in expected]


@pytest.mark.usefixtures("folder")
def test_the_table_tells_outputs_accuracy_and_the_worst_layers(capsys):
    arguments = ["net.prototxt", "out/caffe", "--data", "data.npz", "--batch-size", "4", "--top1", "--worst", "1"]
    assert main(["compare", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["float", "net.prototxt", "net.caffemodel"]
    assert lines[2].split() == ["data", "2", "batches"]
    from amct_caffe import caffe

    net = caffe.Net("net.prototxt", "net.caffemodel", caffe.TEST)
    data = np.load("data.npz")
    net.blobs["data"].reshape(*data["data"].shape)
    right = net.forward(data=data["data"])["fc"].argmax(1) == data["labels"]
    assert lines[3].startswith(f"top-1      {right.mean():.2%} in float, ")
    assert re.fullmatch(r"fc +\d\d\.\d dB  0\.99\d+", lines[6])
    assert lines[8] == "most harmed of 2 layers"
    assert len(lines) == 11


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("kind", ["Caffe", "ONNX", "PyTorch"])
def test_a_report_from_the_files(kind, tmp_path, capsys):
    models, layers, _ = MODELS[kind]
    target = tmp_path / "new" / "report.html"
    arguments = [*models, "--data", "data.npz", "--batch-size", "2", "--top1"]
    assert main(["report", *arguments, "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"wrote {target}\n"
    text = target.read_text(encoding="utf-8")
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [layer["name"] for layer in data["layers"]] == layers
    assert all("bars" in layer["inputs"][0] and "weights" in layer for layer in data["layers"])
    assert "measured on 3 batches" in text
    assert ">top1<" in text
    assert "source: defaults\nbatch_num: " in text  # the config that quant.json tells
    if kind == "Caffe":
        assert main(["compare", *arguments, "--report", str(tmp_path / "again.html"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["report"] == str(tmp_path / "again.html")
        again = (tmp_path / "again.html").read_text(encoding="utf-8")
        assert re.sub(r"\d+:\d+ \w+</p>", "", again) == re.sub(r"\d+:\d+ \w+</p>", "", text)  # but for the minute


def test_a_file_of_a_fixed_batch_size_gets_full_batches(capsys, caplog, monkeypatch, folder):
    monkeypatch.syspath_prepend(str(folder))
    from my_nets_of_compare_test import build

    data = np.load("bare.npy")
    amct.pytorch.quantize(build(), [data[:2]], io=amct.pytorch.IoOptions(dynamic_axes={})).save("out/fixed")
    np.save("five.npy", data[:5])
    caplog.clear()
    capsys.readouterr()
    assert main(["compare", "my_nets_of_compare_test:build", "out/fixed", "--data", "five.npy", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["batches"] == 2
    assert "left out, as the model takes 2 at once: 1 sample" in caplog.text
    # although a command before showed errors only
    assert "[AMCT][WARNING]left out, as the model takes 2 at once: 1 sample" in printed.err


# ------------------------------------------------------------------ bad input

CAFFE = ["net.prototxt", "net.caffemodel", "out/caffe"]
DATA = ["--data", "data.npz"]
BAD = {
    "one model": (["net.prototxt", "net.caffemodel", *DATA], "expected a float and a quantized model"),
    "no float model": (["net", "out/caffe", *DATA], '"net": expected a float model'),
    "missing prototxt": (["none.prototxt", "net.caffemodel", "out/caffe", *DATA], '"none.prototxt" does not exist'),
    "missing weights": (["out/caffe_qdq.prototxt", "out/caffe", *DATA], "caffe_qdq.prototxt"),
    "no weights beside": (["lonely.prototxt", "out/caffe", *DATA], "there is no .lonely.caffemodel"),
    "missing onnx": (["none.onnx", "out/onnx", *DATA], '"none.onnx" does not exist'),
    "missing prefix": (["net.onnx", "out/none", *DATA], "there is no out/none_qdq_model.onnx or"),
    "too many": ([*CAFFE, "more", *DATA], 'got "more" behind them'),
    "Caffe beside ONNX": (["net.prototxt", "net.caffemodel", "out/caffe_qdq_model.onnx", *DATA], "a Caffe model is"),
    "not quantized": (["net.prototxt", "net.prototxt", *DATA], "has no Quant layer"),
    "quantized already": (["out/onnx_qdq_model.onnx", "out/onnx", *DATA], "already quantized"),
    "broken file": (["broken.onnx", "out/onnx", *DATA], "broken.onnx"),
    "wrong shape of ONNX": (["net.onnx", "out/onnx", "--data", "wide.npy"], "expected shape"),
    "another net": (["net.prototxt", "net.caffemodel", "odd_fake_quant_model.prototxt", *DATA], "not the same net"),
    "deploy file": (["net.onnx", "out/onnx_deploy_model.onnx", *DATA], "onnx_deploy_model.onnx"),
    "no such module": (["nowhere_at_all:build", "out/torch", *DATA], '"nowhere_at_all" was not found'),
    "no data": ([*CAFFE, "--data", "none"], "none: there is no such file or folder"),
    "no labels": ([*CAFFE, "--data", "bare.npy", "--top1"], "--top1: bare.npy has samples without a label"),
    "wrong shape": ([*CAFFE, "--data", "wide.npy"], "conv|fc"),
    "bad size": ([*CAFFE, *DATA, "--size", "1,2,3"], "--size"),
    "bad mean": ([*CAFFE, *DATA, "--mean", "a"], "--mean"),
    "bad colour": ([*CAFFE, *DATA, "--color", "hsv"], "hsv"),
    "no batches": ([*CAFFE, *DATA, "--batches", "0"], "--batches: expected at least 1"),
    "empty batches": ([*CAFFE, *DATA, "--batch-size", "0"], "at least one sample"),
}


@pytest.fixture
def lonely(folder):
    (folder / "lonely.prototxt").write_text(PROTOTXT)
    for part in ("model.prototxt", "weights.caffemodel"):
        content = (folder / f"out/caffe_fake_quant_{part}").read_bytes()
        (folder / f"odd_fake_quant_{part}").write_bytes(content.replace(b'"data"', b'"pics"'))
    np.save(folder / "wide.npy", np.zeros((2, 7, 8, 8), np.float32))
    return folder


def told(arguments, capsys):
    """The one line that the command says, with exit code 2."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    error = [line for line in output.err.splitlines() if not line.startswith("[AMCT]")]
    assert len(error) == 1
    assert error[0].startswith("error: ")
    return error[0]


@pytest.mark.usefixtures("lonely")
@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_error_and_nothing_is_written(arguments, message, tmp_path, capsys):
    for command in (["report", "-o", str(tmp_path / "x" / "r.html")], ["compare"]):
        assert re.search(message, told([command[0], *arguments, *command[1:]], capsys))
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("target", ["/proc/x/report.html", "report.txt", "out"])
def test_a_report_needs_a_place(target, capsys):
    assert target.split("/")[-1] in told(["compare", *CAFFE, *DATA, "--report", target], capsys) or "/proc" in target


# ------------------------------------------------------------------ Ctrl-C


@pytest.mark.parametrize("command", ["quantize", "compare", "report"])
def test_control_c_leaves_nothing_behind(command, made, tmp_path):
    """The second picture is a pipe: when the command opens it, the work has begun, and it waits for the signal."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "list.txt").write_text("a.png\nb.png\n")
    models = [str(made / name) for name in ("net.prototxt", "net.caffemodel", "out/caffe")]
    target = {
        "quantize": [*models[:2], "-o", "new/net", "--report"],
        "compare": [*models, "--report", "new/report.html"],
        "report": [*models, "-o", "new/report.html"],
    }[command]
    code = "import sys; from amct.cli import main; raise SystemExit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, command, *target, "--data", "list.txt"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pipe = wait_for_reader(tmp_path / "b.png", process)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        os.close(pipe)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert error.splitlines()[-1] == "interrupted: nothing was left half-written"
    assert "Traceback" not in error
    left = {path.name for path in tmp_path.rglob("*")} - {"a.png", "b.png", "list.txt", "amct_log", "amct_caffe.log"}
    assert left == set()


def wait_for_reader(pipe, process):
    """Open the pipe once the process reads it; while it is open, the process waits for data."""
    for _ in range(600):
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # it means that nobody reads yet
                raise
        assert process.poll() is None
        time.sleep(0.1)
    raise AssertionError("the command never came to its data")


TWO_INPUTS = """\
name: "two"
layer { name: "image" type: "Input" top: "image" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "more" type: "Input" top: "weight" top: "ids" input_param { shape { dim: 2 dim: 4 } } }
layer { name: "conv" type: "Convolution" bottom: "image" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "times" type: "Eltwise" bottom: "fc" bottom: "weight" top: "times" eltwise_param { operation: PROD } }
layer { name: "sum" type: "Eltwise" bottom: "times" bottom: "ids" top: "sum" }
"""
FAKE_QUANT = [f"out/two_fake_quant_{ending}" for ending in ("model.prototxt", "weights.caffemodel")]


def test_a_caffe_net_with_several_inputs_takes_arrays_of_their_names(tmp_path, monkeypatch, capsys):
    from amct_caffe import caffe

    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.prototxt").write_text(TWO_INPUTS)
    caffe.set_random_seed(0)
    caffe.Net("two.prototxt", caffe.TEST).save("two.caffemodel")
    random = np.random.default_rng(0)
    shapes = {"image": (6, 3, 8, 8), "weight": (6, 4), "ids": (6, 4)}
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    np.savez("data.npz", **arrays, unused=np.zeros(3))
    np.savez("one.npz", image=arrays["image"])
    np.save("data.npy", arrays["image"])
    pair, data = ["two.prototxt", "two.caffemodel"], ["--data", "data.npz", "--batch-size", "2"]
    assert main(["quantize", *pair, *data, "-o", "out/two", "--report", "--fixed-batch-size", "2"]) == 0
    assert main(["report", *pair, "out/two", *data, "-o", "report.html"]) == 0
    capsys.readouterr()
    assert main(["compare", *pair, "out/two", *data, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["batches"] == 3
    exact, found = (
        np.concatenate(
            [net.forward(**{k: v[at : at + 2] for k, v in arrays.items()})["sum"].copy() for at in (0, 2, 4)]
        )
        for net in (caffe.Net(*files, caffe.TEST) for files in (pair, FAKE_QUANT))
    )
    noise = found.astype(float) - exact
    (output,) = result["outputs"]
    assert output["sqnr"] == pytest.approx(
        10 * np.log10(np.square(exact, dtype=float).sum() / np.square(noise).sum()), abs=0.01
    )
    file = ["out/two_qdq_model.onnx", "--runtime", "onnxruntime-basic"]
    assert main(["compare", *file, "--data", "data.npz", "--json"]) == 0  # two samples at once, as the file takes them
    assert json.loads(capsys.readouterr().out)["batches"] == 3
    for command in (["quantize", *pair, "-o", "no/two"], ["compare", *pair, "out/two"]):
        assert main([*command, "--data", "one.npz"]) == 2
        assert 'the model has an input "weight", and there is no array of that name' in capsys.readouterr().err
        assert main([*command, "--data", "data.npy"]) == 2
        assert 'the model has an input "image"' in capsys.readouterr().err
    assert not (tmp_path / "no").exists() or not any((tmp_path / "no").iterdir())
