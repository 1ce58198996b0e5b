"""Every save runs what it wrote: numbers of the files, unusable files, wrong files, repairs, the kept batch."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import amct.onnx_model
import amct.pytorch
from amct.errors import ExportError
from amct.export import formats
from amct.export.check import batch as kept_batches
from amct.export.check import causes, checking, child, repair
from amct.export.check.batch import KeptBatches
from amct.export.check.losses import Reference
from amct.export.formats import ExportedModel, ExportReport
from amct.export.onnx.runtime import Runner
from amct.model.quant_json import FileCheck, read_quant_json

IMAGES = torch.from_numpy(np.random.default_rng(5).normal(size=(4, 3, 8, 8)).astype(np.float32))
FILES = ("qdq", "deploy", "fake_quant")


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 20)
    ).eval()


@pytest.fixture(scope="module")
def quantized():
    return amct.pytorch.quantize(network(), IMAGES)


@pytest.fixture(scope="module")
def saved(quantized, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    quantized.save(folder / "net")
    return folder


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="amct")
    return caplog


def checks_in(folder):
    document = read_quant_json(Path(folder) / "net_quant.json")
    return {entry.format: entry.check for entry in document.files.values() if entry.check is not None}


def sqnr(expected, got):
    expected, got = expected.astype(np.float64), got.astype(np.float64)
    return 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum())


def outputs_of(path):
    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})[0]


@pytest.mark.parametrize("name", ["qdq", "fake_quant"])
def test_the_numbers_are_those_of_the_file(saved, name):
    expected, got = network()(IMAGES).detach().numpy(), outputs_of(saved / f"net_{name}_model.onnx")
    check = checks_in(saved)[name]
    assert check.sqnr == pytest.approx(sqnr(expected, got), abs=0.05)
    cosine = (expected * got).sum() / np.sqrt((expected**2).sum() * (got**2).sum())
    assert check.cosine == pytest.approx(cosine, abs=1e-4)
    assert check.batch == "a calibration batch"


def test_the_simulation_and_the_speed_are_measured(quantized, saved):
    checks = checks_in(saved)
    assert set(checks) == set(FILES)
    simulated = sqnr(network()(IMAGES).detach().numpy(), quantized(IMAGES).detach().numpy())
    assert all(check.simulation_sqnr == pytest.approx(simulated, abs=1e-3) for check in checks.values())
    assert checks["qdq"].speed > 0
    assert 1 <= len(checks["qdq"].costliest) <= 3
    assert checks["deploy"].speed is None
    # Both files compute the integers of the simulation.
    assert checks["deploy"].sqnr == pytest.approx(checks["fake_quant"].sqnr, abs=0.1)


def test_the_text_of_a_check():
    check = FileCheck(output="y", cosine=0.99971, sqnr=34.21, speed=1.62)
    assert check.text() == "cosine 0.9997  SQNR 34.2 dB  1.6x float"
    assert FileCheck(cosine=1.0).text() == "cosine 1.0000  no error"
    assert FileCheck(not_checked="LSTM on integers").text() == "not checked: LSTM on integers"


def test_a_save_without_a_check(quantized, tmp_path, lines):
    quantized.save(tmp_path / "net", check=False)
    assert checks_in(tmp_path) == {}
    assert "cosine" not in lines.text


def test_a_short_job_is_checked_on_fewer_batches(tmp_path):
    """The check of a job may take as long as a share of it; five batches are run in any case."""
    quantized = amct.pytorch.quantize(network(), [IMAGES[index % 4 : index % 4 + 1] for index in range(7)])
    for seconds, count in ((0.0, 5), (math.inf, 7)):  # of one sample
        quantized._seconds = seconds
        quantized.save(tmp_path / "net", formats=["qdq"])
        assert checks_in(tmp_path)["qdq"].batch == f"{count} calibration batches"


# -- exporters with defects --------------------------------------------------------------------------------------------


def replace_exporter(monkeypatch, name, change):
    known = formats._FORMATS[name]

    def exporter(request):
        exported = known.exporter(request)
        change(exported.model)
        return exported

    monkeypatch.setitem(formats._FORMATS, name, formats.Format(exporter=exporter, file_name=known.file_name))


def cut_a_wire(model):
    model.graph.node[-1].input[0] = "nothing"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_loaded_is_not_saved(quantized, monkeypatch, tmp_path, name):
    (tmp_path / f"net_{name}_model.onnx").write_bytes(b"old")
    replace_exporter(monkeypatch, name, cut_a_wire)
    with pytest.raises(ExportError, match=rf"net_{name}_model\.onnx.*cannot be loaded or run.*so nothing was saved"):
        quantized.save(tmp_path / "net")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(f"net_{name}_model.onnx", b"old")]


def change_the_second_convolution(model):
    """As an exporter that overwrites a constant: the weights of the layer "2" are turned round."""
    node = next(node for node in model.graph.node if node.name == "2")
    made_by = {name: each for each in model.graph.node for name in each.output}
    name = node.input[1]
    while name in made_by:
        name = made_by[name].input[0]
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    turned = np.ascontiguousarray(numpy_helper.to_array(tensor)[::-1])
    tensor.CopyFrom(numpy_helper.from_array(turned, name))


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_reported_with_the_first_wrong_tensor(quantized, monkeypatch, tmp_path, lines, name):
    replace_exporter(monkeypatch, name, change_the_second_convolution)
    quantized.save(tmp_path / "net", formats=[name])
    check = checks_in(tmp_path)[name]
    second = next(node for node in quantized.prepared.float_model(None).graph.node if node.name == "2")
    assert check.differs_at == second.output[0]
    (warning,) = [record.message for record in lines.records if "worse than the simulation" in record.message]
    assert warning.startswith(f"net_{name}_model.onnx is ")
    assert f'the first tensor that is worse is "{second.output[0]}"' in warning


def test_the_first_wrong_tensor_is_found_when_each_is_looked_at_alone(quantized, monkeypatch, tmp_path):
    """As in models whose tensors need too much memory together."""
    run, watched = Runner.__init__, []

    def noted(self, model, tensors=(), **named):
        watched.append(len(tensors))
        run(self, model, tensors, **named)

    monkeypatch.setattr(causes, "_SMALLEST_PART", 1)
    monkeypatch.setattr(causes, "_MOST_PARTS", 1000)
    monkeypatch.setattr(causes.Runner, "__init__", noted)
    replace_exporter(monkeypatch, "fake_quant", change_the_second_convolution)
    quantized.save(tmp_path / "net", formats=["fake_quant"])
    second = next(node for node in quantized.prepared.float_model(None).graph.node if node.name == "2")
    assert checks_in(tmp_path)["fake_quant"].differs_at == second.output[0]
    assert set(watched) == {1}
    assert len(watched) > 3  # three models, and tensors before the wrong one


def test_sequences_of_tensors_are_passed_over_in_the_search(monkeypatch, tmp_path):
    """As torch exports an EmbeddingBag: values between the layers that are no single tensor."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 17]> g (float[4,3,8,8] x) => (float[4,4,4,4] y) {
          parts = SplitToSequence <axis = 0> (x)
          whole = ConcatFromSequence <axis = 0> (parts)
          first = Conv (whole, w1)
          y = Conv (first, w2)
        }""")
    for number, node in enumerate(model.graph.node, -1):
        node.name = str(number)  # "2" is the convolution that is changed
    weights = {"w1": (4, 3, 3, 3), "w2": (4, 4, 3, 3)}
    model.graph.initializer.extend(
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name) for name, shape in weights.items()
    )
    onnx.save(model, tmp_path / "float.onnx")
    quantized = amct.onnx_model.quantize(tmp_path / "float.onnx", [{"x": IMAGES.numpy()}])
    replace_exporter(monkeypatch, "fake_quant", change_the_second_convolution)
    quantized.save(tmp_path / "net", formats=["fake_quant"])
    assert checks_in(tmp_path)["fake_quant"].differs_at == "y"


def test_a_file_with_values_that_are_not_finite_is_reported(quantized, monkeypatch, tmp_path, lines):
    def spoil(model):
        tensor = next(tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32("nan"), tensor.name))

    replace_exporter(monkeypatch, "fake_quant", spoil)
    quantized.save(tmp_path / "net", formats=["fake_quant"])
    assert "has values that are not finite" in checks_in(tmp_path)["fake_quant"].not_checked
    assert "net_fake_quant_model.onnx: output " in lines.text


def test_a_file_is_not_saved_where_not_even_the_float_model_can_be_loaded(quantized, tmp_path):
    broken = onnx.ModelProto()
    broken.CopyFrom(quantized.prepared.float_model(None))
    broken.graph.node[0].input[0] = "nowhere"
    target = tmp_path / "net_fake_quant_model.onnx"
    onnx.save(broken, target)
    reference = Reference(inputs={broken.graph.input[0].name: IMAGES.numpy()}, origin="a batch")
    check = checking.OnnxCheck(reference=reference, original=broken, simulate=lambda: ExportedModel(model=broken))
    file = checking.FileToCheck(format="fake_quant", path=target, target=target, report=ExportReport())
    with pytest.raises(ExportError, match="cannot be loaded or run on a batch, so nothing was saved"):
        check.check(file)


def clip_the_input(model):
    """As an exporter whose range is too small: what lies beyond -1 and 1 is lost."""
    name = model.graph.input[0].name
    for node in model.graph.node:
        node.input[:] = ["clipped" if each == name else each for each in node.input]
    for limit in (-1.0, 1.0):
        model.graph.initializer.append(numpy_helper.from_array(np.float32(limit), f"limit{limit}"))
    model.graph.node.insert(0, helper.make_node("Clip", [name, "limit-1.0", "limit1.0"], ["clipped"]))


def test_a_loss_that_the_first_sample_does_not_show_is_reported(monkeypatch, tmp_path, lines):
    small = IMAGES[:1].clip(-1, 1)
    replace_exporter(monkeypatch, "qdq", clip_the_input)
    same_integers = {"formats": ["qdq"], "placement": "exact", "target": "exact8"}
    amct.pytorch.quantize(network(), [small]).save(tmp_path / "net", **same_integers)
    assert checks_in(tmp_path)["qdq"].sqnr > 30
    assert "worse than the simulation" not in lines.text
    several = amct.pytorch.quantize(network(), [small, *IMAGES[1:].split(1)])
    several.save(tmp_path / "net", **same_integers)
    check = checks_in(tmp_path)["qdq"]
    assert check.batch == "4 calibration batches"
    assert check.simulation_sqnr - check.sqnr > 10
    assert "worse than the simulation" in lines.text


class WritesToItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.convolution(x.mul_(0.5))


def test_a_forward_that_writes_to_its_input_does_not_change_the_users_data(tmp_path):
    torch.manual_seed(0)
    data = IMAGES.clone()
    quantized = amct.pytorch.quantize(WritesToItsInput().eval(), [data])
    quantized.save(tmp_path / "net", formats=["fake_quant"])
    check = checks_in(tmp_path)["fake_quant"]
    quantized(data)
    torch.testing.assert_close(data, IMAGES, rtol=0, atol=0)
    assert check.sqnr == pytest.approx(check.simulation_sqnr, abs=0.1)
    assert check.sqnr > 35


def test_kept_batches_are_copies_within_a_budget(monkeypatch):
    monkeypatch.setattr(kept_batches, "LARGEST_BATCH", 5 * 12)
    given = [np.full((1, 3), index, np.float32) for index in range(9)]
    kept = KeptBatches()
    for batch in kept.passing(iter(given)):
        batch += 100
    assert [float(batch[0, 0]) for batch in kept.kept] == [0, 1, 2, 3, 4]
    large = KeptBatches()
    list(large.passing(iter([np.zeros((20, 3), np.float32), np.zeros((20, 3), np.float32)])))
    assert len(large.kept) == 1


# -- formats that cannot be run ----------------------------------------------------------------------------------------


def test_an_operator_that_is_not_known_here_is_named(quantized, monkeypatch, tmp_path):
    def exporter(request):
        model = onnx.ModelProto()
        model.CopyFrom(request.model)
        model.graph.node[0].domain = "example.chip"
        return ExportedModel(model=model)

    monkeypatch.setitem(formats._FORMATS, "chip", formats.Format(exporter=exporter, file_name="chip_model.onnx"))
    quantized.save(tmp_path / "net", formats=["chip"])
    assert checks_in(tmp_path)["chip"].not_checked == 'operator "Conv" is not one of onnxruntime'


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(6, 4)

    def forward(self, x):
        return self.lstm(x)[0]


def test_a_recurrent_layer_on_integers_is_not_checked(tmp_path):
    amct.pytorch.quantize(Recurrent().eval(), torch.randn(5, 2, 6)).save(tmp_path / "net")
    checks = checks_in(tmp_path)
    assert "BasicLSTMInplaceFillWindowCache on integers cannot be computed" in checks["deploy"].not_checked
    assert checks["fake_quant"].cosine > 0.99


# -- repairs -----------------------------------------------------------------------------------------------------------


class WideSum(nn.Module):
    """A sum in which one channel is a thousand times larger than the others, which the last layer does not read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        a, b = self.first(x), self.second(x)
        spread = torch.ones(1, 8, 1, 1)
        spread[:, 0] = 1000
        wide = (a + b) * spread
        return self.last(wide * (spread < 10)) + wide * (spread < 10)


def test_tensors_that_cost_too_much_stay_float_in_the_fast_file(tmp_path, lines):
    data = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    quantized = amct.pytorch.quantize(WideSum().eval(), data)
    quantized.save(tmp_path / "net")
    check = checks_in(tmp_path)["qdq"]
    quantized.save(tmp_path / "unchecked", check=False)
    before = sqnr(WideSum()(data).detach().numpy(), _run(tmp_path / "unchecked_qdq_model.onnx", data))
    after = sqnr(WideSum()(data).detach().numpy(), _run(tmp_path / "net_qdq_model.onnx", data))
    assert check.left_float
    assert after > before + 3
    assert check.sqnr == pytest.approx(after, abs=0.1)
    assert "stay float, because the file would be worse than the simulation" in lines.text
    entry = json.loads((tmp_path / "net_quant.json").read_text())
    assert not set(check.left_float) & set(entry["files"]["net_qdq_model.onnx"]["tensors"])
    # What the record quantizes stays quantized.
    assert {"first", "second", "last"} == {name for name, each in entry["layers"].items() if "qdq" in each["files"]}


def test_a_file_that_is_good_enough_is_not_repaired(tmp_path, lines, monkeypatch):
    """Float tensors would make it slower, for a noise below that of its 8-bit outputs."""
    quantized = amct.pytorch.quantize(WideSum().eval(), torch.randn(4, 3, 8, 8))
    monkeypatch.setattr(checking, "ENOUGH", 0.0)
    monkeypatch.setattr(repair, "TINY_WORK", 0.0)  # as if it were large
    quantized.save(tmp_path / "net", formats=("qdq",))
    check = checks_in(tmp_path)["qdq"]
    assert check.sqnr > 0
    assert not check.left_float
    assert "worse than the simulation" in lines.text


@pytest.mark.parametrize(("above", "is_repaired"), [(0.01, False), (8.0, True)])
def test_a_loss_that_a_few_samples_lift_over_the_bound_is_no_reason_for_a_repair(
    tmp_path, monkeypatch, above, is_repaired
):
    """Many float tensors would halve the speed, and on other samples the loss may be below the bound."""
    samples = torch.randn(3, 1, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    quantized = amct.pytorch.quantize(
        WideSum().eval(), list(samples * torch.tensor([1.0, 0.5, 0.2]).view(3, 1, 1, 1, 1))
    )
    monkeypatch.setattr(checking, "ENOUGH", 0.0)
    monkeypatch.setattr(repair, "TINY_WORK", 0.0)  # as if it were large
    quantized.save(tmp_path / "net", formats=("qdq",))
    loss = checking.lost(checks_in(tmp_path)["qdq"])
    monkeypatch.undo()
    monkeypatch.setattr(repair, "TINY_WORK", 0.0)  # as if it were large
    monkeypatch.setattr(checking, "expected_loss", lambda *_: loss - checking.WORSE - above)
    quantized.save(tmp_path / "net", formats=("qdq",))
    assert bool(checks_in(tmp_path)["qdq"].left_float) == is_repaired


@pytest.mark.parametrize(("samples", "expected"), [(1, 5), (2, 3), (5, 1)])
def test_the_number_of_batches_that_decide_on_a_repair_does_not_depend_on_time(
    tmp_path, monkeypatch, samples, expected
):
    """It follows from their samples, of which five are enough."""
    used = []

    class Spy(checking.Repair):
        def __init__(self, model, export, batches, outputs):
            used.append(len(batches))
            super().__init__(model, export, batches, outputs)

    monkeypatch.setattr(checking, "Repair", Spy)
    data = list(torch.randn(6, samples, 3, 8, 8, generator=torch.Generator().manual_seed(2)))
    quantized = amct.pytorch.quantize(WideSum().eval(), data)
    quantized.save(tmp_path / "net", formats=("qdq",))
    assert used == [expected]


def _run(path, data):
    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: data.numpy()})[0]


# -- large models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(checking, "LARGE", 0)


@pytest.mark.usefixtures("large")
def test_a_large_model_is_checked_in_a_process_of_its_own(quantized, saved, tmp_path):
    quantized.save(tmp_path / "net")
    inside, outside = checks_in(saved), checks_in(tmp_path)
    for name in FILES:
        assert outside[name].sqnr == pytest.approx(inside[name].sqnr, abs=0.01)
        assert outside[name].simulation_sqnr == pytest.approx(inside[name].simulation_sqnr, abs=0.01)
    assert outside["qdq"].speed > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in saved.iterdir())


@pytest.mark.usefixtures("large")
def test_a_large_model_has_a_limit_of_time(quantized, monkeypatch, tmp_path, lines):
    monkeypatch.setattr(child, "LONGEST", 0.0)
    quantized.save(tmp_path / "net", formats=["qdq"])
    assert checks_in(tmp_path)["qdq"].not_checked == "it took more than 0 s"
    assert "net_qdq_model.onnx: not checked: it took more than 0 s" in lines.text


@pytest.mark.usefixtures("large")
def test_a_large_file_that_cannot_be_loaded_is_not_saved(quantized, monkeypatch, tmp_path):
    replace_exporter(monkeypatch, "qdq", cut_a_wire)
    with pytest.raises(ExportError, match="cannot be loaded or run on a calibration batch, so nothing was saved"):
        quantized.save(tmp_path / "net", formats=["qdq"])
    assert list(tmp_path.iterdir()) == []
