"""AMCT's accuracy-based calibration: its classes, its files, and what the reference found."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from ptq_goldens import GOLDEN, resnet20
from torch import nn

import amct_pytorch as amct
from amct.errors import EvaluatorError
from amct.pytorch import auto_calibration
from amct_pytorch.common.auto_calibration import (
    AutoCalibrationEvaluatorBase,
    AutoCalibrationStrategyBase,
    BinarySearchStrategy,
    CosineSimilaritySensitivity,
    MseSimilaritySensitivity,
    SensitivityBase,
)

ABC = GOLDEN / "amct" / "abc_ok"
NAMES = {
    "ranking": "accuracy_based_auto_calibration_ranking_information.json",
    "final": "accuracy_based_auto_calibration_final_config.json",
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 36, 5)

    def forward(self, x):
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return self.fc(x.flatten(1))


def net():
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        model.conv2.weight[:, 3] *= 40
        model.conv1.weight[3] /= 40
    return model


BATCH = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class Evaluator(AutoCalibrationEvaluatorBase):
    """Content once at most ``allowed`` of the layers are quantized, or with what ``accepts`` says."""

    def __init__(self, limit=1e9):
        self.limit, self.calibrations, self.evaluations = limit, 0, 0
        self.expected = None

    def calibration(self, model):
        self.calibrations += 1
        model(BATCH)

    def evaluate(self, model):
        self.evaluations += 1
        output = model(BATCH)
        self.expected = output if self.expected is None else self.expected
        return float(((output - self.expected) ** 2).mean())

    def metric_eval(self, original, new):
        return new - original <= self.limit, new - original


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    amct.create_quant_config("config.json", net(), BATCH)
    return tmp_path


def run(evaluator, **options):
    amct.accuracy_based_auto_calibration(net(), evaluator, "config.json", "record.txt", "out/net", BATCH, **options)


def test_what_the_reference_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, batches = resnet20()

    class Content(AutoCalibrationEvaluatorBase):
        def calibration(self, model):
            model(*batches[0])

        def evaluate(self, model):
            return float(model(*batches[1]).argmax(1).double().mean())

        def metric_eval(self, original, new):
            return True, abs(new - original)

    (tmp_path / "config.json").write_text((ABC / "config.json").read_text())
    amct.accuracy_based_auto_calibration(model, Content(), "config.json", "record.txt", "out/q", batches[0])
    final = json.loads((tmp_path / "out" / NAMES["final"]).read_text())
    assert final == json.loads((ABC / NAMES["final"]).read_text())
    assert (tmp_path / "config.json").read_text() == (ABC / "config.json").read_text()
    ours = dict(json.loads((tmp_path / "out" / NAMES["ranking"]).read_text()))
    theirs = dict(json.loads((ABC / NAMES["ranking"]).read_text()))
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, abs=3e-5), name
    assert list(ours.values()) == sorted(ours.values())
    assert (tmp_path / "out" / "q_deploy_model.onnx").exists()
    assert (tmp_path / "out" / "q_fake_quant_model.onnx").exists()


def test_layers_are_rolled_back_with_one_calibration(files):
    before = (files / "config.json").read_text()
    evaluator = Evaluator()
    run(evaluator)
    assert evaluator.calibrations == 1
    assert evaluator.evaluations == 2  # float and all layers
    metrics = []
    for limit in (3e-4, 1e-9):
        evaluator = Evaluator(limit)
        run(evaluator)
        assert evaluator.calibrations == 1
        final = json.loads((files / "out" / NAMES["final"]).read_text())
        metrics.append([name for name in ("conv1", "conv2", "fc") if not final[name]["quant_enable"]])
    ranking = [name for name, _ in json.loads((files / "out" / NAMES["ranking"]).read_text())]
    for floats in metrics:
        assert set(floats) == set(ranking[: len(floats)])
    assert metrics[1] == ["conv1", "conv2", "fc"]
    assert (files / "config.json").read_text() == before
    history = (files / "amct_log" / "accuracy_based_auto_calibration_record.json").read_text()
    decoder, tried = json.JSONDecoder(), []
    while history:
        entry, end = decoder.raw_decode(history)
        tried.append(entry)
        history = history[end:]
    assert all(set(entry["roll_back_config"]) == {"conv1", "conv2", "fc"} for entry in tried)
    assert tried[-1]["stop_flag"]


@pytest.mark.parametrize("needed", range(7))
def test_binary_search_finds_the_fewest_layers(needed):
    ranking = {f"layer{index}": index / 10 for index in range(6)}
    strategy = BinarySearchStrategy()
    strategy.initialize(ranking)
    floats = 0
    for _ in range(10):
        answer = strategy.update_quant_config((floats >= needed, 0.0))
        floats = sum(not quantized for quantized in answer["roll_back_config"].values())
        if answer["stop_flag"]:
            break
    assert answer["stop_flag"]
    assert floats == needed
    assert list(answer["roll_back_config"].values()) == [False] * needed + [True] * (6 - needed)


def test_own_strategies_and_sensitivities(files):
    class One(AutoCalibrationStrategyBase):
        def initialize(self, ranking_info):
            self.ranking = ranking_info

        def update_quant_config(self, metric_eval):
            assert metric_eval[0]
            return {"stop_flag": True, "roll_back_config": {name: name != "fc" for name in self.ranking}}

    class Largest(SensitivityBase):
        def compare(self, original_tensor, fake_quant_tensor):
            return float((original_tensor - fake_quant_tensor).abs().max())

    run(Evaluator(), strategy=One(), sensitivity=Largest())
    final = json.loads((files / "out" / NAMES["final"]).read_text())
    assert [final[name]["quant_enable"] for name in ("conv1", "conv2", "fc")] == [True, True, False]
    run(Evaluator(), sensitivity="MseSimilarity")


class Never(AutoCalibrationStrategyBase):
    def initialize(self, ranking_info):
        self.ranking = ranking_info

    def update_quant_config(self, metric_eval):
        return {"stop_flag": False, "roll_back_config": dict.fromkeys(self.ranking, metric_eval[0])}


class Raising(Never):
    def update_quant_config(self, metric_eval):
        raise KeyError(metric_eval)


class Nothing(SensitivityBase):
    def compare(self, original_tensor, fake_quant_tensor):
        del original_tensor, fake_quant_tensor


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": Never()}, "named only 1 config: update_quant_config must return"),
        ({"strategy": Raising()}, "update_quant_config of the strategy raised KeyError"),
        ({"sensitivity": Nothing()}, "compare returned None"),
    ],
)
def test_mistakes_of_own_classes(options, message):
    with pytest.raises(EvaluatorError, match=message):
        run(Evaluator(), **options)


@pytest.mark.usefixtures("files")
def test_an_evaluator_that_changes_what_it_evaluates():
    class Resets(Evaluator):
        def evaluate(self, model):
            found = super().evaluate(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            return found

    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    amct.accuracy_based_auto_calibration(model, Resets(), "config.json", "record.txt", "out/net", BATCH)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_sensitivities():
    one, other = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    cosine, mse = CosineSimilaritySensitivity(), MseSimilaritySensitivity()
    assert cosine.compare(one, torch.from_numpy(one)) == 1.0
    assert cosine.compare(one, other) == 0.5
    assert cosine.compare(one, -one) == 0.0
    assert cosine.compare(0 * one, 0 * one) == 1.0
    assert cosine.compare(one, 0 * one) == 0.0
    assert mse.compare(one, other) == -1.0


class Bad(Evaluator):
    def __init__(self, **returns):
        super().__init__()
        self.returns = returns

    def evaluate(self, model):
        return self.returns["evaluate"] if "evaluate" in self.returns else super().evaluate(model)

    def metric_eval(self, original, new):
        return self.returns.get("metric_eval", (True, new - original))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ({"evaluate": None}, "evaluate returned None"),
        ({"evaluate": float("nan")}, "expected a finite number"),
        ({"evaluate": torch.zeros(3)}, "returned 3 numbers"),
        ({"evaluate": Evaluator().evaluate}, "instead of its result: call it"),
        ({"metric_eval": (False, 1.0)}, "does not accept the metric of the float model itself"),
        ({"metric_eval": True}, "expected (whether it is enough, the loss)"),
        ({"metric_eval": None}, "expected (whether it is enough, the loss)"),
    ],
)
def test_evaluators_that_return_something_else(returns, message):
    evaluator = Bad(**returns)
    with pytest.raises(EvaluatorError, match=re.escape(message)):
        run(evaluator)
    assert evaluator.calibrations == 0  # nothing else was done before


@pytest.mark.usefixtures("files")
def test_wrong_objects():
    with pytest.raises(RuntimeError, match="derived from AutoCalibrationEvaluatorBase"):
        run(object())
    with pytest.raises(RuntimeError, match="derived from AutoCalibrationStrategyBase"):
        run(Evaluator(), strategy=object())
    with pytest.raises(ValueError, match="expected BinarySearch"):
        run(Evaluator(), strategy="Binary")
    with pytest.raises(RuntimeError, match="derived from SensitivityBase"):
        run(Evaluator(), sensitivity=3)

    class TooFew(Evaluator):
        def calibration(self, model):
            del model

    with pytest.raises(RuntimeError, match="batch"):
        run(TooFew())


# -- ModelEvaluator ----------------------------------------------------------------------------------------------------


def test_raw_files_are_run(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in range(2):
            np.full(6, number, np.float32 if folder == "a" else np.int64).tofile(tmp_path / folder / f"{number}.bin")
    seen = []

    class Two(nn.Module):
        def forward(self, x, y):
            seen.append((x, y))
            return x + y

    evaluator = amct.ModelEvaluator(f"{tmp_path / 'a'};{tmp_path / 'b'}", "x:0:2,3;y:2,3", "float32;int64")
    model = Two()
    evaluator.calibration(model, 2)
    assert model.training
    assert [(float(x[0, 0]), int(y[0, 0]), tuple(x.shape)) for x, y in seen] == [(0, 0, (2, 3)), (1, 1, (2, 3))]
    evaluator.evaluate(model, 1)
    with pytest.raises(ValueError, match="iterations: expected at least 1"):
        evaluator.evaluate(model, 0)
    with pytest.raises(RuntimeError, match="3 forwards need as many"):
        evaluator.calibration(model, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, "x:1", "int8"), TypeError, "data_dir must be str"),
        ((".", "x:1", "complex64"), TypeError, '"complex64" is unknown'),
        ((".;.", "x:1", "int8"), ValueError, "2 folders, 1 shapes and 1 types"),
        ((".", "1,2", "int8"), ValueError, 'expected "name:n,c,h,w"'),
        (("nowhere", "x:1", "int8"), OSError, "there is no folder nowhere"),
    ],
)
def test_wrong_descriptions_of_raw_files(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        amct.ModelEvaluator(*arguments)


def test_the_names_are_where_amct_has_them():
    assert amct.accuracy_based_auto_calibration is auto_calibration.accuracy_based_auto_calibration
    from amct_pytorch.common.auto_calibration.auto_calibration_strategy_base import AutoCalibrationStrategyBase as Base

    assert Base is AutoCalibrationStrategyBase
    from amct_pytorch.common.auto_calibration import AccuracyBasedAutoCalibrationBase as Whole

    assert Whole.__abstractmethods__ == {"calibrated", "evaluated", "ranking"}
