"""Before training means the float model that was handed in, not the trained weights without their quantizers."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import re

import pytest
import torch
from torch import nn

import amct.pytorch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)).mean((2, 3)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().eval()


DATA = [torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def size(output, batch):
    """A metric that tells models apart: the mean of what they return."""
    del batch
    return float(output.detach().mean())


def trained(model, **options):
    """Trained so far away that its weights without quantizers are quite another model."""
    made = amct.pytorch.prepare_qat(model, DATA, **options)
    with torch.no_grad():
        made.second.bias += 10.0
    return made.eval()


def metric_before(made, tmp_path):
    page = made.report(tmp_path / "report.html", DATA, size).read_text()
    return float(re.search(r">size<.*?<span class=\"before\">([^<]+)<", page, re.DOTALL)[1]), page


def test_the_metric_before_is_that_of_the_model_that_was_handed_in(model, tmp_path):
    expected = sum(size(model(batch), batch) for batch in DATA) / 2
    made = trained(model)
    found, page = metric_before(made, tmp_path)
    assert found == pytest.approx(expected, abs=2e-3)
    assert "Outputs and metric before are those of the float model that was handed in" in page
    assert not model.training


def test_without_the_model_its_copy_as_teacher_serves(model, tmp_path):
    expected = sum(size(model(batch), batch) for batch in DATA) / 2
    made = trained(model, teacher=model)
    with torch.no_grad():
        model.second.bias += 5.0  # it is not what was handed in any more
    assert metric_before(made, tmp_path)[0] == pytest.approx(expected, abs=2e-3)


def test_a_model_that_is_gone_is_said(model, tmp_path, caplog):
    made = trained(copy.deepcopy(model))
    gc.collect()
    found, page = metric_before(made, tmp_path)
    assert found > 5
    assert "trained weights without quantizers" in page
    assert "Give prepare_qat data and metric" in caplog.text


def test_the_summary_compares_with_the_outputs_that_were_kept(model):
    line = r"verdict .*SQNR is (-?[\d.]+) dB.*compared with the float model that was handed in \(the simulation\)"
    start = amct.pytorch.prepare_qat(model, DATA)
    near = float(re.search(line, start.summary())[1])
    made = trained(model)
    for each in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert float(re.search(line, each.summary())[1]) < near - 20
    assert float(re.search(line, made.summary())[1]) == pytest.approx(distance(model, made, torch.cat(DATA)), abs=0.06)
    assert made.summary().splitlines()[-4].startswith("verdict Broken")


def distance(model, made, batch=DATA[0]):
    """The SQNR of both models' outputs in dB."""
    with torch.no_grad():
        expected, got = model(batch).double(), made(batch).double()
    return float(10 * torch.log10(expected.square().sum() / (expected - got).square().sum()))


def test_files_are_judged_by_the_outputs_that_were_kept(model, tmp_path, caplog):
    made = trained(copy.deepcopy(model))
    gc.collect()
    paths = made.save(tmp_path / "net")
    document = json.loads((tmp_path / "net_quant.json").read_text())
    found = distance(model, made, torch.cat(DATA))
    assert document["verdict"]["level"] == "broken"
    assert "to the float model that was handed in" in document["verdict"]["reasons"][0]
    checks = [entry["check"] for entry in document["files"].values() if entry.get("check")]
    assert len(checks) == 3
    of_files = [check["handed_in_sqnr"] for check in checks]
    assert of_files[0] == pytest.approx(found, abs=0.1), "the QDQ file runs on all batches"
    assert of_files[1:] == pytest.approx([distance(model, made)] * 2, abs=0.1)
    for check in checks:
        assert check["sqnr"] > 20, "that to the trained weights without quantizers tells whether the file is right"
    warned = next(each for each in caplog.records if each.message.startswith("verdict Broken"))
    assert warned.levelname == "WARNING"
    assert "report(path, data, metric)" in warned.message
    assert made.quantized().verdict.level == "broken"
    page = made.report(tmp_path / "report.html", DATA, files=paths).read_text()
    assert "The verdict compares with outputs of the float model that was handed in" in page
    assert 'id="verdict" class="broken"' in page


def test_training_that_did_no_harm_is_good_everywhere(model, tmp_path):
    made = amct.pytorch.prepare_qat(model, DATA).eval()
    made.save(tmp_path / "net", batch_size=2)
    made.save(tmp_path / "net")
    assert json.loads((tmp_path / "net_quant.json").read_text())["verdict"]["level"] == "good"
    for data in (None, DATA):
        page = made.report(tmp_path / "report.html", data).read_text()
        assert 'id="verdict" class="good"' in page
        assert "compared with the float model that was handed in" in page


class FixedNet(Net):
    def forward(self, x):
        return super().forward(x.reshape(100, 3, 8, 8))


def test_a_model_of_a_fixed_batch_larger_than_what_is_kept_is_judged_by_all_of_it(tmp_path):
    model = FixedNet().eval()
    batch = torch.rand(100, 3, 8, 8)
    made = amct.pytorch.prepare_qat(model, [batch])
    with torch.no_grad():
        made.second.bias += 10.0
    made.eval().save(tmp_path / "net", formats=["fake_quant"])
    check = json.loads((tmp_path / "net_quant.json").read_text())["files"]["net_fake_quant_model.onnx"]["check"]
    assert check["handed_in_sqnr"] == pytest.approx(distance(model, made, batch), abs=0.01)


def test_a_metric_that_was_measured_before_training_needs_no_float_model(model, tmp_path, caplog):
    expected = sum(size(model(batch), batch) for batch in DATA) / 2
    made = trained(copy.deepcopy(model), data=DATA, metric=size)
    gc.collect()
    for each in (made, pickle.loads(pickle.dumps(made))):
        found, page = metric_before(each, tmp_path)
        assert found == pytest.approx(expected, abs=2e-3)
        assert "measured then on 2 batches" in page
        assert f"size before training, on 2 batches: {expected:.4g} of the float model" in each.summary()
    assert not caplog.records or "trained weights without quantizers" not in caplog.text
    page = made.report(tmp_path / "other.html", DATA, lambda output, _: float(output.detach().mean())).read_text()
    assert "trained weights without quantizers" in page, "another metric than the one that was measured"


def test_a_metric_needs_data(model):
    with pytest.raises(amct.errors.ArgumentError, match="it needs data"):
        amct.pytorch.prepare_qat(model, DATA, metric=size)
