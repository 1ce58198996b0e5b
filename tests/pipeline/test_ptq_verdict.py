"""The verdict of a quantized model and the layers to blame, for each front door and on the command line."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from three_doors import LAYERS, caffe_pair, onnx_file, torch_network
from torch import nn

import amct.caffe
import amct.onnx_model
import amct.pytorch
from amct.cli import main
from amct.export.onnx.kept_weights import with_values
from amct.model.quant_json import FileCheck, read_quant_json, verdict_of_files

BATCHES = [np.random.default_rng(seed).normal(0.2, 1.0, (4, 3, 8, 8)).astype(np.float32) for seed in (1, 2)]
DATA_ONLY = ("Eltwise", "Concat", "Pooling")


def decibel(expected, got):
    noise = np.square(np.float64(got) - expected).sum()
    return 10 * math.log10(np.square(np.float64(expected)).sum() / noise)


def quantize(door, folder, **settings):
    """The network through one door, and a function that computes it in float."""
    model = torch_network()
    if door == "pytorch":
        data = [torch.from_numpy(batch) for batch in BATCHES]
        return amct.pytorch.quantize(model, data, amct.pytorch.QuantConfig(**settings))
    if door == "onnx":
        return amct.onnx_model.quantize(onnx_file(model, folder), BATCHES, amct.pytorch.QuantConfig(**settings))
    config = amct.caffe.QuantConfig(skip_layer_types=DATA_ONLY, **settings)
    return amct.caffe.quantize(*caffe_pair(model, folder), BATCHES, config)


def outputs(quantized, door):
    found = [quantized(torch.from_numpy(batch) if door == "pytorch" else batch) for batch in BATCHES]
    arrays = [each.detach().numpy() if door == "pytorch" else next(iter(each.values())) for each in found]
    return np.concatenate(arrays)


@pytest.fixture(scope="module")
def expected():
    model = torch_network()
    return np.concatenate([model(torch.from_numpy(batch)).detach().numpy() for batch in BATCHES])


@pytest.mark.parametrize("door", ["pytorch", "onnx", "caffe"])
def test_a_layer_alone_does_what_quantizing_only_this_layer_does(door, tmp_path, expected):
    found = {each.layer: each for each in quantize(door, tmp_path).sensitivity()}
    assert set(found) == set(LAYERS)
    assert [each.sqnr for each in found.values()] == sorted(each.sqnr for each in found.values())
    assert sum(each.share for each in found.values()) == pytest.approx(1)
    for layer in ("conv1", "fc"):
        # The input of the first layer is the same whatever else is quantized; that of the last is calibrated behind
        # layers with rounded weights, so its range may differ a little.
        others = tuple(name for name in LAYERS if name != layer)
        alone = decibel(expected, outputs(quantize(door, tmp_path, skip_layers=others), door))
        assert found[layer].sqnr == pytest.approx(alone, abs=0.3 if layer == "conv1" else 1.0)


class Deceptive(nn.Module):
    """The second layer's input has one value a thousand times as large as the others: it alone is coarse."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(17, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        wide = torch.cat([hidden, 1000 * torch.ones_like(hidden[:, :1])], 1)
        return self.last(torch.relu(self.second(wide)))


def broken_model():
    torch.manual_seed(0)
    model = Deceptive().eval()
    with torch.no_grad():
        model.second.weight[:, 16] = 0
    return model


def test_the_cause_is_named_where_the_comparison_shows_victims(tmp_path):
    data = torch.randn(16, 16)
    quantized = amct.pytorch.quantize(broken_model(), data)
    assert quantized.sensitivity()[0].layer == "second"
    assert quantized.sensitivity()[0].share > 0.9
    page = quantized.report(tmp_path / "report.html", data).read_text()
    causes = page[page.index("Layers that harm most") :]
    assert causes.index("second") < causes.index("first")


def test_one_verdict_in_the_log_the_summary_the_model_and_quant_json(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="amct")
    quantized = amct.pytorch.quantize(broken_model(), torch.randn(16, 16))
    assert quantized.verdict.of == "the simulation"
    quantized.save(tmp_path / "net")
    verdict = quantized.verdict
    document = read_quant_json(tmp_path / "net_quant.json")
    assert document.verdict == verdict
    assert verdict.level in ("poor", "broken")
    assert quantized.summary().splitlines()[-1] == f"verdict {verdict}"
    (line,) = [record for record in caplog.records if record.message.startswith("verdict ")]
    assert str(verdict) in line.message
    assert line.levelno == logging.WARNING
    assert "sensitivity" in line.message
    worst = min(entry.check.sqnr for entry in document.files.values() if entry.check is not None)
    assert verdict.reasons == (f"the output's SQNR is {worst:.1f} dB",)


def test_the_verdict_of_a_save_is_that_of_its_worst_file():
    better, worse = (FileCheck(verdict="good", cosine=0.999, sqnr=sqnr) for sqnr in (34.0, 31.0))
    poor = FileCheck(verdict="poor", cosine=0.999)
    found = verdict_of_files({"better": better, "worse": worse, "not run": None})
    assert (found.of, found.reasons) == ("worse", ("the output's SQNR is 31.0 dB",))
    assert verdict_of_files({"worse": worse, "poor": poor}).of == "poor"
    assert verdict_of_files({"not run": None}) is None


@pytest.mark.parametrize("door", ["pytorch", "onnx", "caffe"])
def test_a_good_save_does_not_warn_of_accuracy(door, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="amct")
    quantized = quantize(door, tmp_path)
    quantized.save(tmp_path / "net")
    assert quantized.verdict.level == "good"
    accuracy = [each.message for each in caplog.records if "slower" not in each.message and each.levelno > logging.INFO]
    assert not accuracy


def test_a_report_with_a_metric_renews_the_verdict(tmp_path):
    data = [(torch.from_numpy(BATCHES[0]), torch.zeros(4))]
    quantized = amct.pytorch.quantize(torch_network(), data)
    files = quantized.save(tmp_path / "net")

    scores = iter([1.0, 0.97])

    def falling(output, batch):  # noqa: ARG001  as a metric is called
        return next(scores)

    quantized.report(tmp_path / "report.html", data, falling, files=files)
    assert quantized.verdict.level == "poor"
    assert read_quant_json(tmp_path / "net_quant.json").verdict == quantized.verdict
    assert ">Poor<" in (tmp_path / "report.html").read_text().replace(" Poor", ">Poor")


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx_file(torch_network(), tmp_path)
    np.save(tmp_path / "data.npy", np.concatenate(BATCHES))
    return ["net.onnx", "--data", "data.npy", "--batch-size", "4"]


def test_the_command_ends_with_the_verdict(command, capsys):
    assert main(["quantize", *command, "-o", "out/net"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("verdict     Good: the output's SQNR is ")
    assert main(["quantize", *command, "-o", "out/net", "--json", "--fail-on", "poor"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["level"] == "good"


def test_the_command_judges_by_the_batches_that_its_numbers_come_from(command, capsys):
    """Data whose last batch is unlike the others: the last line, the page and quant.json are of all of them."""
    loud = np.concatenate([*BATCHES, *BATCHES, *BATCHES, *BATCHES, 3 * BATCHES[1]])
    np.save("data.npy", loud)
    assert main(["quantize", *command, "-o", "out/net", "--formats", "qdq", "--report", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = found["outputs"][0]["sqnr"]
    first = found["checks"][str(Path("out/net_qdq_model.onnx"))]
    assert abs(measured - first["sqnr"]) > 1, "the data is to tell the batches apart"
    assert first["text"].endswith(f"({first['batch']})")
    reason = f"the output's SQNR is {measured:.1f} dB"
    assert reason in found["verdict"]["reasons"]
    assert reason in read_quant_json(Path("out/net_quant.json")).verdict.reasons
    assert reason.replace("'", "&#39;") in Path("out/net_report.html").read_text()


def test_a_verdict_can_fail_the_command(command, capsys):
    data = torch.randn(16, 16)
    model = amct.pytorch.quantize(broken_model(), data).prepared.float_model(None)
    onnx.save(with_values(model), "net.onnx")
    np.save("data.npy", data.numpy())
    assert main(["quantize", *command[:3], "--batch-size", "16", "-o", "out/net", "--fail-on", "poor"]) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith(("verdict     Poor: ", "verdict     Broken: "))
    assert Path("out/net_quant.json").is_file()


def test_fail_on_is_checked_before_any_work(command, capsys, tmp_path):
    assert main(["quantize", *command, "-o", "out/net", "--fail-on", "good"]) == 2
    assert "--fail-on: expected acceptable, poor, broken" in capsys.readouterr().err
    assert main(["quantize", *command, "-o", "out/net", "--fail-on", "poor", "--no-check"]) == 2
    assert not (tmp_path / "out").exists()


def test_the_sensitivity_command(command, capsys, tmp_path):
    assert main(["sensitivity", *command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["layer", "SQNR", "of", "the", "noise"]
    assert {line.split()[0] for line in lines[2:]} == set(LAYERS)
    assert main(["sensitivity", *command, "--json"]) == 0
    assert {row["layer"] for row in json.loads(capsys.readouterr().out)} == set(LAYERS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.npy", "net.onnx"]
