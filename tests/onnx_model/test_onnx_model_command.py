"""``amct quantize``, ``amct inspect`` and ``amct config`` on ONNX files."""

from __future__ import annotations

import json
import re

import numpy as np
import onnx
import pytest
from onnx_nets import graph_model, node, normal, run
from PIL import Image

from amct.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nodes = [
        node("Conv", "x w", "a", "conv"),
        node("BatchNormalization", "a s s s s", "b", "norm"),
        node("Relu", "b", "c", "relu"),
        node("Flatten", "c", "d", "flatten"),
        node("Gemm", "d g", "y", "fc"),
    ]
    weights = {"w": normal(4, 3, 3, 3), "s": np.ones(4, np.float32), "g": normal(144, 2)}
    model = graph_model(nodes, weights, ("n", 3, 8, 8))
    onnx.save(model, tmp_path / "net.onnx")
    np.save(tmp_path / "data.npy", np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32))
    np.save(tmp_path / "wrong.npy", np.zeros((4, 2, 8, 8), np.float32))
    (tmp_path / "broken.onnx").write_bytes((tmp_path / "net.onnx").read_bytes()[:200])
    (tmp_path / "bad.cfg").write_text('skip_layers: "convv"\n')
    return tmp_path


def test_quantize_writes_the_files_and_says_what_it_did(folder, capsys):
    arguments = ["net.onnx", "--data", "data.npy", "--batch-size", "2", "-o", "out/net"]
    assert main(["quantize", *arguments, "--json", "--report"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["quantized"] == ["conv", "fc"]
    assert [row["layer"] for row in result["layers"]] == ["conv", "fc"]
    names = {name.removeprefix("out/") for name in result["files"]}
    expected = {
        "qdq_model.onnx",
        "deploy_model.onnx",
        "fake_quant_model.onnx",
        "quant.json",
        "record.txt",
        "report.html",
    }
    assert {f"net_{name}" for name in expected} <= names
    assert all((folder / name).stat().st_size > 0 for name in result["files"])
    x = np.load("data.npy")
    before, after = run(folder / "net.onnx", {"x": x})[0], run(folder / "out/net_qdq_model.onnx", {"x": x})[0]
    assert 0 < np.abs(before - after).max() < 0.05 * np.abs(before).max()


@pytest.mark.usefixtures("folder")
def test_quantize_as_text_and_with_a_config(capsys):
    with open("quant.cfg", "w") as file:  # noqa: PTH123  the current folder
        file.write('batch_num: 2\nskip_layers: "fc"\n')
    arguments = ["net.onnx", "--data", "data.npy", "--config", "quant.cfg", "-o", "out/net"]
    assert main(["quantize", *arguments]) == 0
    text = capsys.readouterr().out
    assert "quantized   1 layer; 1 left as they are" in text
    assert re.search(r"quant\.cfg:2:1.*: fc", text)
    assert "wrote       out/net_qdq_model.onnx" in text


@pytest.mark.usefixtures("folder")
def test_inspect_and_config(capsys):
    assert main(["inspect", "net.onnx"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["conv", "Conv2d", "quantized"]
    assert lines[1].split(maxsplit=2) == [
        "norm",
        "BatchNormalization",
        "folded into the layer before it, if only this one reads that layer",
    ]
    assert lines[-1] == "2 of 3 layers quantized by default"
    assert main(["config", "check", "bad.cfg", "--model", "net.onnx"]) == 2
    assert 'Did you mean "conv"' in capsys.readouterr().err


def two_inputs(folder, *, batch="n"):
    """Words and a mask, as language models have them."""
    nodes = [
        node("Gather", "table words", "a"),
        node("Mul", "a mask", "b"),
        node("MatMul", "b w", "y", "product"),
    ]
    model = graph_model(nodes, {"table": normal(9, 6), "w": normal(6, 4)}, ("n",))
    del model.graph.input[:]
    kinds = (("words", onnx.TensorProto.INT64, [batch, 3]), ("mask", onnx.TensorProto.FLOAT, [batch, 3, 1]))
    model.graph.input.extend(onnx.helper.make_tensor_value_info(*kind) for kind in kinds)
    onnx.save(model, folder / "text.onnx")
    words = np.random.default_rng(0).integers(0, 9, (5, 3))
    np.savez(folder / "text.npz", words=words, mask=np.ones((5, 3, 1), np.float32), labels=np.arange(5))


TEXT = ["quantize", "text.onnx", "--data", "text.npz", "-o", "out/text"]


def test_several_inputs_come_from_the_arrays_of_their_names(folder, capsys):
    two_inputs(folder)
    assert main([*TEXT, "--batch-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantized"] == ["product"]


def test_several_inputs_are_compared_and_reported(folder, capsys):
    two_inputs(folder)
    assert main([*TEXT, "--batch-size", "2"]) == 0
    capsys.readouterr()
    compare = ["compare", "text.onnx", "out/text", "--data", "text.npz", "--batch-size", "2"]
    assert main([*compare, "--report", "out/text.html", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["batches"] == 3
    assert [layer["layer"] for layer in told["layers"]] == ["product"]
    assert 30 < told["layers"][0]["sqnr"] < 80
    assert "product" in (folder / "out/text.html").read_text()
    assert main([*compare, "--top1"]) == 2
    assert "has no labels beside them" in capsys.readouterr().err


def test_a_fixed_batch_size_is_kept(folder, capsys):
    two_inputs(folder, batch=2)
    assert main([*TEXT, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["quantized"] == ["product"]
    assert "--batch-size" not in captured.err
    assert main([*TEXT, "--json", "--batch-size", "3"]) == 0
    assert "--batch-size 3 is left out: the model takes 2 samples at once" in capsys.readouterr().err
    two_inputs(folder, batch=7)
    assert main([*TEXT, "--json"]) == 2
    assert "the model takes 7 samples at once, got 5" in capsys.readouterr().err


def test_arrays_that_do_not_fit_the_inputs(folder, capsys):
    two_inputs(folder)
    for arrays, message in (
        ({"words": np.zeros((5, 3), int)}, 'the model has an input "mask", and there is no array of that name'),
        (
            {"words": np.zeros((5, 3), int), "mask": np.ones((4, 3, 1))},
            "expected as many samples in every array, got words 5, mask 4",
        ),
    ):
        np.savez(folder / "text.npz", **arrays)
        assert main(TEXT) == 2
        assert message in capsys.readouterr().err
    assert main([*TEXT, "--mean", "3"]) == 2
    assert "arrays of inputs are used as they are" in capsys.readouterr().err
    Image.new("RGB", (4, 4)).save(folder / "picture.png")
    assert main(["quantize", "text.onnx", "--data", ".", "-o", "out/text"]) == 2
    assert "a model with the inputs words, mask needs an .npz" in capsys.readouterr().err
    assert not (folder / "out").exists()


QUANTIZE = ["--data", "data.npy", "-o", "out/x"]
BAD = {
    "no file": (["quantize", "none.onnx", *QUANTIZE], r"none\.onnx"),
    "truncated": (["quantize", "broken.onnx", *QUANTIZE], r'broken\.onnx" is not an ONNX model'),
    "no data": (["quantize", "net.onnx", "--data", "none", "-o", "out/x"], "none: there is no such file"),
    "wrong data": (
        ["quantize", "net.onnx", "--data", "wrong.npy", "-o", "out/x"],
        r'input "x": expected shape \[n, 3, 8, 8\], got \[1, 2, 8, 8\]',
    ),
    "bad config": (["quantize", "net.onnx", *QUANTIZE, "--config", "bad.cfg"], r'bad\.cfg:1:1: .*Did you mean "conv"'),
    "nowhere to write": (["quantize", "net.onnx", "--data", "data.npy", "-o", "/proc/x/y"], "/proc/x"),
    "inspect": (["inspect", "broken.onnx"], r'broken\.onnx" is not an ONNX model'),
    "neither": (["quantize", "net.onx", *QUANTIZE], "expected a prototxt and a caffemodel, an .onnx file"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_error_and_nothing_is_written(folder, capsys, arguments, message):
    assert main(arguments) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[AMCT]")]
    assert len(error) == 1
    assert error[0].startswith("error: ")
    assert re.search(message, error[0])
    assert not (folder / "out").exists()
