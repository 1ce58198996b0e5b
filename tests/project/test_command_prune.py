"""``amct prune``."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from amct.cli import main

NET = """
from torch import nn
def net():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "prunednet.py").write_text(NET)
    np.save(tmp_path / "data.npy", np.random.default_rng(0).standard_normal((4, 3, 8, 8), dtype=np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_prune_writes_files_and_says_what_was_removed(folder, capsys):
    given = [
        "prunednet:net",
        "--input-shape",
        "1,3,8,8",
        "--ratio",
        "0.5",
        "--data",
        "data.npy",
        "--report",
        "-o",
        "out/n",
    ]
    assert main(["prune", *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["channels"] == {"0": [16, 8], "2": [4, 4]}
    assert found["left_as_they_are"] == {"2": "its channels are an output of the model"}
    names = {path.name for path in (folder / "out").iterdir()}
    assert names == {"n_float_model.onnx", "n_quant.json", "n_record.txt", "n_report.html", "n_state.pth"}


@pytest.mark.usefixtures("folder")
def test_sparse(capsys):
    assert main(["prune", "prunednet:net", "--input-shape", "1,3,8,8", "--sparse", "-o", "out/n"]) == 0
    assert "2 layers sparse (2:4)" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_options_that_exclude_each_other(capsys):
    given = ["prune", "prunednet:net", "--input-shape", "1,3,8,8", "--ratio", "0.5", "-o", "out/n"]
    assert main([*given, "--sparse"]) != 0
    assert "leave --ratio" in capsys.readouterr().err
    assert main([*given, "--flops", "0.5"]) != 0
    assert "give one of them" in capsys.readouterr().err


SEARCHED = ["prunednet:net", "--input-shape", "4,3,8,8", "--data", "data.npy", "-o", "out/n", "--search"]


def test_search_to_a_budget(folder, capsys):
    assert main(["prune", *SEARCHED, "--flops", "0.6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["channels"]["0"] == [16, 8]
    assert found["ladder"][-1]["share"] == found["macs"][1] / found["macs"][0] <= 0.6
    assert "prune_ratio: 0.5" in (folder / "out" / "n_prune.cfg").read_text()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([*SEARCHED], "one budget of flops, latency, params"),
        ([*SEARCHED, "--flops", "0.5", "--ratio", "0.5"], "--ratio: not with --search"),
        ([*SEARCHED, "--flops", "0.5", "--sparse"], "--sparse: not with --search"),
        ([*SEARCHED, "--flops", "0.5", "--reach", "amct"], "leave --reach out"),
        ([*SEARCHED[:3], "-o", "out/n", "--search", "--flops", "0.5"], "give --data"),
        ([*SEARCHED[:3], "-o", "out/n", "--latency", "0.5"], "--latency: only with --search"),
    ],
)
def test_options_of_a_search(given, message, capsys):
    assert main(["prune", *given]) != 0
    assert message in capsys.readouterr().err


MISTAKES = """
def needs(width): return width
def nothing(): pass
"""


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        ("mistakes:needs", "1,3,8,8", "cannot be called without arguments"),
        ("mistakes:nothing", "1,3,8,8", "gives a NoneType"),
        ("os:system", "1,3,8,8", "a function of Python itself"),
        ("json:loads", "1,3,8,8", "cannot be called without arguments"),
        ("..mistakes:needs", "1,3,8,8", "was not found"),
        ("./missing.py:net", "1,3,8,8", "does not exist"),
        ("prunednet:net", "1,3", "Sequential fails on the example input"),
        ("prunednet:net", "1,3,999999,999999", "more than the"),
        ("prunednet:net", "1" * 5000, "expected positive whole numbers"),
    ],
)
def test_a_model_or_shape_that_does_not_fit_is_one_line(folder, capsys, model, shape, message):
    (folder / "mistakes.py").write_text(MISTAKES)
    assert main(["prune", model, "--input-shape", shape, "-o", "out/n"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("reach", ["full", "amct"])
@pytest.mark.parametrize("data", [np.zeros((4, 5), np.float32), np.zeros((4, 2, 8, 8), np.float32), np.array(["a"])])
def test_data_that_does_not_fit_the_model_is_one_line(folder, capsys, data, reach):
    np.save(folder / "other.npy", data)
    given = ["prune", "prunednet:net", "--input-shape", "1,3,8,8", "--reach", reach, "-o", "out/n"]
    assert main([*given, "--data", "other.npy"]) == 2
    error = capsys.readouterr().err
    assert any(text in error for text in ("expected inputs such as", "fails on one of them", "not numbers"))
    assert error.count("\n") == 1


def test_a_folder_of_pictures_is_prepared_as_for_quantize(folder):
    """The fitted weights are those of the same pictures, prepared here."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    (folder / "pictures").mkdir()
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(folder / "pictures" / f"{number}.png")
    prepared = (pixels.transpose(0, 3, 1, 2).astype(np.float32) - 100) * np.float32(0.02)
    np.save(folder / "prepared.npy", prepared)
    given = ["prune", "prunednet:net", "--input-shape", "3,3,8,8", "--ratio", "0.5"]
    pictures = ["--data", "pictures", "--mean", "100,100,100", "--scale", "0.02"]
    for name, data in (("a", pictures), ("b", ["--data", "prepared.npy"]), ("c", [])):
        torch.manual_seed(0)  # the factory draws its weights
        assert main([*given, *data, "-o", f"out/{name}"]) == 0
    states = [torch.load(folder / "out" / f"{name}_state.pth", weights_only=True) for name in "abc"]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name])
    assert any(not torch.equal(tensor, states[2][name]) for name, tensor in states[0].items())
    assert main([*given, "--data", "pictures", "--size", "x", "-o", "out/d"]) == 2


def test_a_folder_in_the_place_of_the_report_is_refused_before_a_file_is_written(folder, capsys):
    (folder / "out" / "n_report.html").mkdir(parents=True)
    assert main(["prune", "prunednet:net", "--input-shape", "1,3,8,8", "--report", "-o", "out/n"]) == 2
    assert "n_report.html" in capsys.readouterr().err
    assert [path.name for path in (folder / "out").iterdir()] == ["n_report.html"]


@pytest.mark.parametrize(("value", "code"), [(0.0, 0), (0.3, 0), (np.nan, 2)])
def test_data_that_say_nothing(folder, capsys, value, code):
    """Channels that never vary cannot be fitted to each other; NaN is no data."""
    np.save("constant.npy", np.full((4, 3, 8, 8), value, np.float32))
    given = ["prune", "prunednet:net", "--input-shape", "1,3,8,8", "--ratio", "0.5", "--data", "constant.npy"]
    assert main([*given, "-o", "out/n"]) == code
    if code:
        assert 'the input of layer "0" holds NaN or infinite values' in capsys.readouterr().err
        assert not (folder / "out").exists()
    else:
        state = torch.load(folder / "out" / "n_state.pth", weights_only=True)
        assert all(tensor.abs().max() < 10 for tensor in state.values())


def test_a_factory_in_a_named_file(folder, capsys):
    (folder / "nets").mkdir()
    (folder / "nets" / "my-net.py").write_text(NET)
    assert main(["prune", "./nets/my-net.py:net", "--input-shape", "1,3,8,8", "-o", "out/n"]) == 0
    assert "wrote" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("size", ["100000", "9" * 5000])
def test_a_size_beyond_any_picture_is_one_line(capsys, size):
    assert main(["quantize", "prunednet:net", "--data", "data.npy", "--size", size, "-o", "out/n"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --size: ")
    assert error.count("\n") == 1
