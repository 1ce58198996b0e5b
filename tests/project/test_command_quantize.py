"""``amct quantize`` and ``amct inspect`` on small models made here."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest

from amct.cli import main

PROTOTXT = """\
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "relu" }
layer { name: "fc" type: "InnerProduct" bottom: "relu" top: "fc"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
"""
FACTORY = """\
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
def build_two():
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Flatten(), nn.Linear(144, 2)).eval()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(PROTOTXT)
    (tmp_path / "my_nets_of_quantize_test.py").write_text(FACTORY)
    np.save(tmp_path / "data.npy", np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32))
    from amct_caffe import caffe

    caffe.Net("net.prototxt", caffe.TEST).save("net.caffemodel")
    return tmp_path


def test_quantize_a_caffe_pair(folder, capsys):
    arguments = ["net.prototxt", "net.caffemodel", "--data", "data.npy", "--batch-size", "2", "-o", "out/net", "--json"]
    assert main(["quantize", *arguments, "--report"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "measured on 2 batches" in (folder / "out/net_report.html").read_text(encoding="utf-8")
    assert result["quantized"] == ["conv", "fc"]
    assert "relu" in result["left_float"]
    assert [row["layer"] for row in result["layers"]]
    assert (folder / "out/net_deploy_weights.caffemodel").stat().st_size > 0
    assert all((folder / name).exists() for name in result["files"])


def test_quantize_a_part_of_a_model_by_name(folder, capsys):
    arguments = ["--data", "data.npy", "--batch-size", "2", "-o", "out/net", "--json", "--part", "0"]
    assert main(["quantize", "my_nets_of_quantize_test:build_two", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["quantized"] == ["0"]
    session = onnxruntime.InferenceSession(folder / "out/net_qdq_model.onnx")
    assert session.get_outputs()[0].shape[1:] == [4, 6, 6]
    assert main(["quantize", "net.prototxt", "net.caffemodel", *arguments]) == 2
    assert "--part is for PyTorch models" in capsys.readouterr().err


@pytest.mark.parametrize("model", [["net.prototxt", "net.caffemodel"], ["my_nets_of_quantize_test:build"]])
@pytest.mark.usefixtures("folder")
def test_the_numbers_shown_are_those_of_the_file(capsys, model):
    """SQNR of outputs and layers is that of the QDQ file in onnxruntime, computed here from its outputs."""
    arguments = ["quantize", *model, "--data", "data.npy", "--batch-size", "2", "-o", "out/net"]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["measured"] == "out/net_qdq_model.onnx"
    session = onnxruntime.InferenceSession("out/net_qdq_model.onnx")
    data = np.load("data.npy")
    name = session.get_inputs()[0].name
    got = np.concatenate([session.run(None, {name: data[i : i + 2]})[0] for i in (0, 2)]).astype(np.float64)
    expected = float_outputs(model, data).astype(np.float64)
    sqnr = 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum())
    assert result["outputs"][0]["sqnr"] == pytest.approx(sqnr, abs=0.01)
    assert main(arguments) == 0
    assert "measured on the calibration data, of net_qdq_model.onnx" in capsys.readouterr().out


PAGES = [["pooled.prototxt", "pooled.caffemodel"], ["my_nets_of_quantize_test:build"]]


@pytest.mark.parametrize("model", PAGES, ids=["caffe", "torch"])
def test_the_page_has_the_numbers_that_are_printed(folder, capsys, monkeypatch, model):
    """They are measured once, of the QDQ file; Caffe's layers without weights are among them."""
    monkeypatch.setattr("amct.pipeline.quantized_model.QuantizedModel.report", None)
    make_pooled(folder)
    arguments = ["quantize", *model, "--data", "data.npy", "--batch-size", "2", "-o", "out/net", "--json"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--report"]) == 0
    with_page = json.loads(capsys.readouterr().out)
    assert with_page["layers"] == printed["layers"]
    assert [row["layer"] for row in printed["layers"]] == printed["quantized"]
    text = (folder / "out/net_report.html").read_text(encoding="utf-8")
    assert "All numbers are those of net_qdq_model.onnx" in text
    assert shown_sqnr(text) == pytest.approx([row["sqnr"] for row in printed["layers"]], abs=0.051)
    measured = json.loads((folder / "out/net_quant.json").read_text())["measured"]
    assert (measured["of"], list(measured["layers"])) == ("net_qdq_model.onnx", printed["quantized"])
    assert with_page["files"] == [*printed["files"], "out/net_report.html"]


def make_pooled(folder):
    """A Caffe net with a layer that has no weights and is quantized."""
    from amct_caffe import caffe

    pool = (
        'layer { name: "pool" type: "Pooling" bottom: "relu" top: "pool" pooling_param { pool: AVE kernel_size: 2 } }\n'
    )
    before, after = PROTOTXT.split('layer { name: "fc"')
    text = before + pool + 'layer { name: "fc"' + after.replace('bottom: "relu"', 'bottom: "pool"')
    (folder / "pooled.prototxt").write_text(text)
    caffe.Net("pooled.prototxt", caffe.TEST).save("pooled.caffemodel")


def test_a_file_that_does_not_show_every_layer_is_reported_by_the_simulation(folder, capsys):
    """An LSTM has several outputs and no form in integers."""
    (folder / "my_sequences_of_quantize_test.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Tagger(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        torch.manual_seed(0)\n"
        "        self.lstm, self.last = nn.LSTM(6, 4), nn.Linear(4, 3)\n"
        "    def forward(self, x):\n"
        "        return self.last(self.lstm(x)[0])\n"
        "def build():\n"
        "    return Tagger().eval()\n"
    )
    np.save("sequences.npy", np.random.default_rng(0).normal(size=(8, 2, 6)).astype(np.float32))
    arguments = ["my_sequences_of_quantize_test:build", "--data", "sequences.npy", "--batch-size", "4", "-o", "out/net"]
    assert main(["quantize", *arguments, "--report", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    text = (folder / "out/net_report.html").read_text(encoding="utf-8")
    assert "layers those of the simulation" in text
    assert len(shown_sqnr(text)) == len(result["quantized"]) == 2


def shown_sqnr(page):
    """The SQNR of each layer in the table of a report."""
    return [float(number) for number in re.findall(r'class="number level[^"]*">([^<]+)</td>', page)]


def float_outputs(model, data):
    if len(model) == 2:
        from amct_caffe import caffe

        net = caffe.Net(*model, caffe.TEST)
        return np.concatenate([net.forward(data=data[i : i + 2])["fc"].copy() for i in (0, 2)])
    import importlib

    import torch

    with torch.no_grad():
        return importlib.import_module("my_nets_of_quantize_test").build()(torch.from_numpy(data)).numpy()


@pytest.mark.parametrize("model", [["net.prototxt", "net.caffemodel"], ["my_nets_of_quantize_test:build"]])
def test_a_warning_about_the_config_is_shown_once(folder, capsys, model):
    (folder / "q.cfg").write_text("batch_num: 1\nbatch_num: 2\n")
    options = ["--data", "data.npy", "--config", "q.cfg", "-o", "out/net", "--no-check", "--formats", "record"]
    assert main(["quantize", *model, *options]) == 0
    assert capsys.readouterr().err.count("q.cfg:2:1: batch_num is given again") == 1


def test_quantize_an_equalized_caffe_pair(folder, capsys):
    from amct_caffe import caffe

    net = caffe.Net("net.prototxt", "net.caffemodel", caffe.TEST)
    net.params["conv"][0].data[0] *= 20
    net.save("net.caffemodel")
    arguments = ["net.prototxt", "net.caffemodel", "--data", "data.npy", "--batch-size", "2", "-o", "out/net", "--json"]
    assert main(["quantize", *arguments, "--equalize"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert "out/net_equalized_weights.caffemodel" in files
    assert json.loads((folder / "out/net_quant.json").read_text())["equalized"] == ["conv"]


def test_quantize_a_torch_reference(folder):
    arguments = [
        "quantize",
        "my_nets_of_quantize_test:build",
        "--data",
        "data.npy",
        "--batch-size",
        "2",
        "-o",
        "out/net",
        "--report",
    ]
    code = f"from amct.cli import main; raise SystemExit(main({arguments!r}))"
    result = subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, capture_output=True, text=True)
    assert "quantized   2 layers" in result.stdout
    assert "out/net_report.html" in result.stdout
    session = onnxruntime.InferenceSession(folder / "out/net_qdq_model.onnx")
    (scores,) = session.run(None, {session.get_inputs()[0].name: np.load(folder / "data.npy")[:2]})
    assert scores.shape == (2, 2)


def test_target_opset_and_the_mode_of_adaround_are_passed_on(folder, monkeypatch):
    import amct.pytorch

    (folder / "adaround.cfg").write_text("common_config { ada_quantize { num_iteration: 5 } }")
    modes, quantize = [], amct.pytorch.quantize

    def noticed(*arguments, **options):
        modes.append(options.get("adaround"))
        return quantize(*arguments, **options)

    monkeypatch.setattr(amct.pytorch, "quantize", noticed)
    monkeypatch.syspath_prepend(folder)
    chosen = ["--target", "exact8", "--opset", "17", "--adaround", "fast", "--config", "adaround.cfg"]
    for prefix, options in {"chosen": chosen, "default": []}.items():
        given = ["my_nets_of_quantize_test:build", "--data", "data.npy", "-o", f"out/{prefix}", *options]
        assert main(["quantize", *given]) == 0
    assert modes == ["fast", None]
    files = [onnx.load(folder / f"out/{prefix}_qdq_model.onnx") for prefix in ("chosen", "default")]
    assert [file.opset_import[0].version for file in files] == [17, 18]
    kinds = [{array.data_type for array in file.graph.initializer} for file in files]
    assert [onnx.TensorProto.INT8 in found for found in kinds] == [False, True]


def test_reconstruction_is_asked_for_and_refused_where_it_cannot_be(folder, monkeypatch, capsys):
    import amct.pytorch

    given, quantize = [], amct.pytorch.quantize

    def noticed(*arguments, reconstruct, reconstruct_seconds, **options):
        given.append((reconstruct, reconstruct_seconds))
        return quantize(*arguments, **options)

    monkeypatch.setattr(amct.pytorch, "quantize", noticed)
    monkeypatch.syspath_prepend(folder)
    begin = ["quantize", "my_nets_of_quantize_test:build", "--data", "data.npy", "-o", "out/net", "--no-check"]
    assert main([*begin, "--reconstruct", "blocks", "--reconstruct-seconds", "3"]) == 0
    assert given == [("blocks", 3.0)]
    for options, expected in (
        (["--reconstruct", "layers"], "--reconstruct: expected blocks"),
        (["--reconstruct-seconds", "3"], "add --reconstruct blocks"),
        (["--reconstruct", "blocks", "--reconstruct-seconds", "0"], "expected a positive number"),
        (["--reconstruct", "blocks", "--max-drop", "1"], "is for PyTorch and Caffe models without a goal"),
    ):
        assert main([*begin, *options]) != 0
        assert expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("folder")
def test_a_caffe_model_learns_where_it_is_asked_to(monkeypatch):
    import amct.caffe

    learned, quantize = [], amct.caffe.quantize

    def noticed(*arguments, **options):
        quantized = quantize(*arguments, **options)
        learned.append([weights.custom_rounding for weights in quantized.prepared.graph.weights.values()])
        return quantized

    monkeypatch.setattr(amct.caffe, "quantize", noticed)
    begin = ["quantize", "net.prototxt", "net.caffemodel", "--data", "data.npy", "--no-check", "-o", "out/net"]
    for options in ([], ["--adaround", "fast"], ["--reconstruct", "blocks"]):
        assert main([*begin, *options]) == 0
    assert not any(learned[0])
    assert any(map(any, learned[1:]))


def test_the_help_has_the_options_of_a_save_with_their_defaults(capsys):
    assert main(["quantize", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for option, default in {"--target": "[default: portable]", "--adaround": "(plain unless given)"}.items():
        assert default in text.partition(f"{option} <str>")[2].partition(" --")[0]
    assert "16 to 21; that of the ONNX model, else 18, unless given" in text.partition("--opset <int>")[2]


@pytest.mark.usefixtures("folder")
def test_inspect_says_what_can_be_quantized(capsys):
    assert main(["inspect", "net.prototxt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["conv", "Convolution", "quantized"]
    assert "off by default" in lines[2]
    assert lines[-1] == "2 of 3 layers quantized by default"


NET_WITH_MISTAKE = """
layer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ dim: 1 dim: 3 dim: 8 dim: 8 }} }} }}
layer {{ name: "relu" type: "ReLU" bottom: "data" top: "data" }}
layer {{ name: "wrong" bottom: "{bottom}" top: "wrong" {options} }}
layer {{ name: "conv" type: "Convolution" bottom: "wrong" top: "conv"
  convolution_param {{ num_output: 2 kernel_size: 3 }} }}
"""
MISTAKES = {
    "an option is missing": ("data", 'type: "Pooling" pooling_param { pool: MAX }', "kernel_size"),
    "an option is impossible": ("data", 'type: "LRN" lrn_param { local_size: 4 }', "local_size"),
    "an unknown blob": ("dta", 'type: "Softmax"', 'no layer before it writes the blob "dta"'),
}


@pytest.mark.parametrize(("bottom", "options", "reason"), MISTAKES.values(), ids=MISTAKES)
def test_inspect_says_which_layer_cannot_be_built(tmp_path, capsys, bottom, options, reason):
    prototxt = tmp_path / "net.prototxt"
    prototxt.write_text(NET_WITH_MISTAKE.format(bottom=bottom, options=options))
    assert main(["inspect", str(prototxt)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "cannot be built: " in lines["wrong"]
    assert reason in lines["wrong"]
    assert lines["conv"].endswith("quantized")


CAFFE = ["net.prototxt", "net.caffemodel", "--data", "data.npy", "-o", "out/x"]
BAD = {
    "no weights": (["net.prototxt", "--data", "data.npy", "-o", "out/x"], "expected a prototxt and a caffemodel"),
    "no data": (["net.prototxt", "net.caffemodel", "--data", "none", "-o", "out/x"], "none"),
    "no model": (["none.prototxt", "net.caffemodel", "--data", "data.npy", "-o", "out/x"], "none.prototxt"),
    "bad mean": (["net.prototxt", "net.caffemodel", "--data", "data.npy", "--mean", "a", "-o", "out/x"], "--mean"),
    "bad scale": (["net.prototxt", "net.caffemodel", "--data", "data.npy", "--scale", "1;2", "-o", "out/x"], "--scale"),
    "bad size": (["net.prototxt", "net.caffemodel", "--data", "data.npy", "--size", "1,2,3", "-o", "out/x"], "--size"),
    "bad colour": (["net.prototxt", "net.caffemodel", "--data", "data.npy", "--color", "hsv", "-o", "out/x"], "hsv"),
    "nowhere to write": (["net.prototxt", "net.caffemodel", "--data", "data.npy", "-o", "/proc/x/y"], "/proc/x"),
    "bad target": (
        ["net.prototxt", "net.caffemodel", "--data", "data.npy", "--target", "gpu", "-o", "out/x"],
        "target",
    ),
    "bad opset": (["net.prototxt", "net.caffemodel", "--data", "data.npy", "--opset", "9", "-o", "out/x"], "16..21"),
    "fast AdaRound with a goal": (
        [*CAFFE, "--adaround", "fast", "--max-drop", "1", "--labels", "labels.txt"],
        "--adaround fast is for PyTorch and Caffe models",
    ),
    "no mode of AdaRound": ([*CAFFE, "--adaround", "slow"], "expected plain or fast"),
    "bad config": (
        ["net.prototxt", "net.caffemodel", "--data", "data.npy", "--config", "bad.cfg", "-o", "out/x"],
        'bad.cfg:1:1: .*"convv".*Did you mean "conv"',
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_error_and_nothing_is_written(folder, capsys, arguments, message):
    (folder / "bad.cfg").write_text('skip_layers: "convv"\n')
    assert main(["quantize", *arguments]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[AMCT]")]
    assert len(error) == 1
    assert error[0].startswith("error: ")
    assert re.search(message, error[0])
    assert not (folder / "out").exists()


def test_pictures_that_only_the_calibration_can_take_are_refused_before_a_file_is_written(folder, capsys):
    from PIL import Image

    from amct_caffe import caffe

    (folder / "any.prototxt").write_text(PROTOTXT[: PROTOTXT.index('layer { name: "fc"')])
    caffe.Net("any.prototxt", caffe.TEST).save("any.caffemodel")
    (folder / "pictures").mkdir()
    Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(folder / "pictures" / "a.png")
    arguments = ["quantize", "any.prototxt", "any.caffemodel", "--data", "pictures", "--size", "12", "-o", "out/net"]
    assert main(arguments) == 2
    wanted = 'a sample would be [3, 12, 12], but the model\'s input "data" is [3, 8, 8]'
    assert wanted in capsys.readouterr().err
    assert not (folder / "out").exists()
    assert main([*arguments, "--formats", "deploy,record", "--no-check"]) == 0
    np.save("big.npy", np.ones((2, 3, 12, 12), np.float32))
    assert main(["quantize", "any.prototxt", "any.caffemodel", "--data", "big.npy", "-o", "arrays/net"]) == 2
    assert wanted in capsys.readouterr().err
    assert not (folder / "arrays").exists()


@pytest.mark.parametrize(("option", "name"), [("--report", "net_report.html"), ("--resume", "net.calibration.npz")])
def test_a_folder_in_the_place_of_a_file_is_refused_before_a_file_is_written(folder, capsys, option, name):
    (folder / "out" / name).mkdir(parents=True)
    assert main(["quantize", "net.prototxt", "net.caffemodel", "--data", "data.npy", "-o", "out/net", option]) == 2
    assert name in capsys.readouterr().err
    assert [path.name for path in (folder / "out").iterdir()] == [name]


@pytest.mark.parametrize("model", [["net.prototxt", "net.caffemodel"], ["my_nets_of_quantize_test:build"]])
def test_one_line_tells_the_numbers_of_each_file(folder, capsys, model):
    arguments = ["quantize", *model, "--data", "data.npy", "--batch-size", "2", "-o", "out/net", "--report"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    pattern = (
        r"out/net_qdq_model\.onnx  ((?:Good|Acceptable)  cosine [01]\.\d{4}  SQNR \d+\.\d dB  \d+\.\dx float) \(.+\)"
    )
    (found,) = [match for line in lines if (match := re.fullmatch(pattern, line))]
    assert found[1] in (folder / "out/net_report.html").read_text(encoding="utf-8")
    check = json.loads((folder / "out/net_quant.json").read_text())["files"]["net_qdq_model.onnx"]["check"]
    assert f"SQNR {check['sqnr']:.1f} dB  {check['speed']:.1f}x float" in found[1]
    assert main([*arguments, "--no-check"]) == 0
    assert "cosine" not in capsys.readouterr().out
