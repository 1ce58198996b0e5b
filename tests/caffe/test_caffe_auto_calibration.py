"""AMCT's accuracy-based calibration of Caffe models: one calibration by the evaluator, probes as files."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
from ptq_caffe_flow import batch, golden_flow

import amct_caffe as amct
from amct.caffe import pycaffe as caffe
from amct.errors import CalibrationError, ConfigError, EvaluatorError, RecordError
from amct.record import read_caffe_record
from amct_caffe.common.auto_calibration import (
    AutoCalibrationEvaluatorBase,
    BinarySearchStrategy,
    CosineSimilaritySensitivity,
)

FINAL = "accuracy_based_auto_calibration_final_config.json"
RANKING = "accuracy_based_auto_calibration_ranking_information.json"


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


class Evaluator(AutoCalibrationEvaluatorBase):
    """Content if the mean squared error of the output is at most ``limit``."""

    def __init__(self, limit=1e9):
        self.limit, self.calibrations, self.seen, self.expected = limit, 0, [], None

    def calibration(self, model_file, weights_file):
        self.calibrations += 1
        net = caffe.Net(model_file, weights_file, caffe.TEST)
        for seed in range(2):
            net.forward(**batch(net, seed))

    def evaluate(self, model_file, weights_file):
        self.seen.append(model_file)
        net = caffe.Net(model_file, weights_file, caffe.TEST)
        output = next(iter(net.forward(**batch(net, 7)).values())).copy()
        self.expected = output if self.expected is None else self.expected
        return float(((output - self.expected) ** 2).mean())

    def metric_eval(self, original, new):
        return new - original <= self.limit, new - original


@pytest.fixture
def flow(golden, tmp_path):
    return golden_flow("mini_resnet", golden, tmp_path).configure()


def run(flow, evaluator, **options):
    amct.accuracy_based_auto_calibration(
        str(flow.model), str(flow.weights), evaluator, str(flow.config), str(flow.record), str(flow.prefix), **options
    )


def enabled(path):
    return {name for name, own in json.loads(path.read_text()).items() if isinstance(own, dict) and own["quant_enable"]}


def test_a_content_evaluator_gets_what_save_model_writes(flow):
    evaluator = Evaluator()
    run(flow, evaluator)
    assert evaluator.calibrations == 1
    assert evaluator.seen[0] == str(flow.model)
    assert len(evaluator.seen) == 2  # the float model and one fake-quant model
    ours = read_caffe_record(flow.record)
    saved = {path.name: path.read_bytes() for path in flow.prefix.parent.iterdir()}
    assert not [name for name in saved if name.startswith("temp")]
    assert enabled(flow.prefix.parent / FINAL) == set(ours) == enabled(flow.config)
    flow.run()
    assert read_caffe_record(flow.out("quant_param_record.txt")) == ours
    for kind in ("deploy_model.prototxt", "fake_quant_model.prototxt", "deploy_weights.caffemodel"):
        assert saved[f"net_{kind}"] == flow.out(kind).read_bytes(), kind


def test_the_ranking_is_that_of_layers_quantized_alone(flow):
    run(flow, Evaluator())
    ranking = dict(json.loads((flow.prefix.parent / RANKING).read_text()))
    assert set(ranking) == enabled(flow.config)
    assert list(ranking.values()) == sorted(ranking.values())
    # independent: the whole flow with only this layer quantized, its output in both nets on the first batch
    config = json.loads(flow.config.read_text())
    for name, own in config.items():
        if isinstance(own, dict):
            own["quant_enable"] = name == "fc"
    flow.config.write_text(json.dumps(config))
    flow.run()
    nets = flow.original(), flow.result("fake_quant")
    data = batch(nets[0], 0)
    for net in nets:
        net.forward(**data)
    one, other = (net.blobs["fc"].data.astype(np.float64).ravel() for net in nets)
    expected = 0.5 + 0.5 * one @ other / np.sqrt((one @ one) * (other @ other))
    assert ranking["fc"] == pytest.approx(expected, abs=1e-5)


def test_layers_are_rolled_back_with_one_calibration(flow):
    before = flow.config.read_text()
    content = Evaluator()
    run(flow, content)
    full = content.metric_eval(0.0, 0.0)
    assert full == (True, 0.0)
    all_layers = enabled(flow.prefix.parent / FINAL)
    net = caffe.Net(str(flow.out("fake_quant_model.prototxt")), str(flow.out("fake_quant_weights.caffemodel")), 1)
    loss = float(((next(iter(net.forward(**batch(net, 7)).values())) - content.expected) ** 2).mean())
    evaluator = Evaluator(loss * 0.3)
    run(flow, evaluator, strategy=BinarySearchStrategy(), sensitivity=CosineSimilaritySensitivity())
    assert evaluator.calibrations == 1
    left = all_layers - enabled(flow.prefix.parent / FINAL)
    assert left
    assert flow.config.read_text() == before
    ranking = list(dict(json.loads((flow.prefix.parent / RANKING).read_text())))
    assert left == set(ranking[: len(left)])  # the most sensitive ones
    assert set(read_caffe_record(flow.record)) == all_layers - left
    net = caffe.Net(str(flow.out("fake_quant_model.prototxt")), str(flow.out("fake_quant_weights.caffemodel")), 1)
    assert float(((next(iter(net.forward(**batch(net, 7)).values())) - content.expected) ** 2).mean()) <= loss * 0.3
    tried = (flow.folder / "amct_log" / "accuracy_based_auto_calibration_record.json").read_text()
    assert tried.count("stop_flag") == len(evaluator.seen) - 1


def test_an_evaluator_that_accepts_nothing_leaves_every_layer_float(flow):
    run(flow, Evaluator(0.0))
    assert enabled(flow.prefix.parent / FINAL) == set()
    assert not flow.out("deploy_model.prototxt").exists()


class Lazy(Evaluator):
    def calibration(self, *_):
        pass


class Bound(Evaluator):
    def evaluate(self, *_):
        return self.metric_eval


class Raises(Evaluator):
    def calibration(self, *_):
        raise KeyError("label")


@pytest.mark.parametrize(
    ("evaluator", "error", "match"),
    [
        (Lazy(), RecordError, "batches"),
        (Bound(), EvaluatorError, r"returned the function .*call it"),
        (Raises(), EvaluatorError, "calibration of the evaluator raised KeyError"),
        (object(), CalibrationError, "AutoCalibrationEvaluatorBase"),
    ],
)
def test_mistakes_of_the_evaluator(flow, evaluator, error, match):
    with pytest.raises(error, match=match):
        run(flow, evaluator)
    assert not list(flow.folder.glob("out/temp*"))


def test_updated_batch_norms_are_refused(golden, tmp_path):
    flow = golden_flow("mini_resnet", golden, tmp_path)
    flow.configure(text="update_bn: true\n")
    with pytest.raises(ConfigError, match="update_bn needs two calibrations"):
        run(flow, Evaluator())


def test_classes_are_the_same_under_every_name():
    other = importlib.import_module("hotwheels.amct_caffe.common.auto_calibration")
    assert other.AutoCalibrationEvaluatorBase is AutoCalibrationEvaluatorBase
    assert amct.accuracy_based_auto_calibration.__module__ == "amct.caffe.auto_calibration"
