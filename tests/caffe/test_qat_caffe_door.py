"""Retraining in one call (``amct.caffe.prepare_qat``) and by ``amct caffe retrain``."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from qat_caffe_flow import Retraining, write_digits

import amct.caffe
from amct.caffe import pycaffe as caffe
from amct.caffe.engine.solvers.solver import Action
from amct.cli import main
from amct.errors import ArgumentError, ArgumentTypeError, ConfigError, FileError, TrainingError

SOLVER = 'base_lr: 0.01 momentum: 0.9 lr_policy: "fixed" max_iter: 12 test_iter: 2 test_interval: 5 random_seed: 3'


@pytest.fixture(scope="module")
def float_net(tmp_path_factory):
    """A net that has learned digits, and the solver of its user."""
    folder = tmp_path_factory.mktemp("float")
    write_digits(folder)
    run = Retraining(folder, folder)
    run.train_float(40)
    (folder / "user_solver.prototxt").write_text(f'net: "{run.model}" {SOLVER}')
    return run


@pytest.fixture
def arguments(float_net, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return float_net.model, float_net.weights, float_net.folder / "user_solver.prototxt"


def test_in_one_call(arguments, tmp_path):
    retraining = amct.caffe.prepare_qat(*arguments, folder="work")
    assert retraining.train() is retraining
    assert len(retraining.losses) == 12
    assert retraining.losses[-1] < 1
    files = retraining.save("out/net")
    assert {path.name for path in files} == {path.name for path in (tmp_path / "out").iterdir()}
    assert retraining.scores_after["accuracy"] >= retraining.scores_before["accuracy"] - 0.03
    net = caffe.Net("out/net_deploy_model.prototxt", "out/net_deploy_weights.caffemodel", caffe.TEST)
    assert abs(sum(float(net.forward()["accuracy"]) for _ in range(2)) / 2 - retraining.scores_after["accuracy"]) < 1e-6
    page = retraining.report("out/report.html", files).read_text()
    assert "accuracy" in page
    assert f"{retraining.scores_after['accuracy']:.4g}" in page
    assert "net_atc_model.prototxt" in page
    assert '<section id="training">' in page
    assert "Loss, 12 values" in page
    assert not (tmp_path / "amct_log").exists()
    before, after = retraining.scores_before["accuracy"], retraining.scores_after["accuracy"]
    lost = max(0.0, (before - after) / before)
    expected = next(level for limit, level in ((0.01, "good"), (0.025, "acceptable"), (0.05, "poor")) if lost <= limit)
    assert retraining.verdict.level == expected
    document = json.loads(Path("out/net_quant.json").read_text())
    assert (document["verdict"]["level"], document["measured"]["metric"]["quantized"]) == (expected, after)


def test_training_that_spoils_the_net_is_judged_by_the_float_model(arguments, tmp_path, caplog):
    """Beside its own weights without quantizers a spoilt net would be good."""
    model, weights, solver = arguments
    wild = tmp_path / "wild.prototxt"
    text = solver.read_text().replace("base_lr: 0.01", "base_lr: 0.3")
    wild.write_text(text.replace("max_iter: 12", "max_iter: 3").replace("test_interval: 5", "test_interval: 3"))
    retraining = amct.caffe.prepare_qat(model, weights, wild, folder="work").train()
    files = retraining.save("out/net")
    check = json.loads(Path("out/net_quant.json").read_text())["files"]["net_qdq_model.onnx"]["check"]
    assert check["sqnr"] > 20
    assert check["handed_in_sqnr"] == pytest.approx(distance(model, weights), abs=0.5)
    assert retraining.verdict.level in ("poor", "broken")
    assert any(each.levelname == "WARNING" and "whether for the better" in each.message for each in caplog.records)
    page = retraining.report("out/report.html", files).read_text()
    assert "those of the float model that was handed in" in page
    lost = 1 - retraining.scores_after["accuracy"] / retraining.scores_before["accuracy"]
    assert retraining.verdict.reasons[0] == f"the metric loses {lost:.2%} of its value"


def distance(model, weights):
    """The SQNR of the scores of the trained net, with its quantizers, to those of the float net, on one picture."""
    float_net = caffe.Net(str(model), str(weights), caffe.TEST)
    trained = caffe.Net("out/net_fake_quant_model.prototxt", "out/net_fake_quant_weights.caffemodel", caffe.TEST)
    expected, got = (np.array(net.forward() and net.blobs["fc"].data[:1], float) for net in (float_net, trained))
    return 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum())


def test_solver_is_adapted(arguments):
    solver = amct.caffe.prepare_qat(*arguments, folder="work").solver
    assert solver.net == str(Path("work/modified_model.prototxt").absolute())
    assert (solver.test_interval, solver.test_initialization) == (12, False)
    assert amct.caffe.prepare_qat(*arguments, folder="work", iterations=10).solver.test_interval == 5


@pytest.mark.parametrize("form", ["cfg", "json", "dict"])
def test_configs(arguments, tmp_path, form):
    cfg = tmp_path / "retrain.cfg"
    cfg.write_text('skip_layers: "conv1" retrain_data_quant_config { ulq_quantize { num_bits: 12 } }')
    first = amct.caffe.prepare_qat(*arguments, cfg, folder="work")
    written = json.loads((first.folder / "config.json").read_text())
    config = {"cfg": cfg, "json": first.folder / "config.json", "dict": written}[form]
    again = amct.caffe.prepare_qat(*arguments, config, folder="again")
    assert json.loads((again.folder / "config.json").read_text()) == written
    assert written["conv1"]["retrain_enable"] is False
    assert written["fc"]["retrain_data_config"]["num_bits"] == 12


def test_going_on_after_a_stop(arguments):
    retraining = amct.caffe.prepare_qat(*arguments, folder="work")
    requests = iter([Action.NONE, Action.NONE, Action.STOP])
    with pytest.raises(TrainingError, match=r"stopped at iteration 3 of 12; go on with .*retrain_iter_3.solverstate"):
        retraining.train(action_source=lambda: next(requests))
    retraining.train("work/retrain_iter_3.solverstate")
    assert retraining.snapshot.is_file()


def test_mistakes(arguments, tmp_path):
    model, weights, solver = arguments
    with pytest.raises(FileError, match="weights"):
        amct.caffe.prepare_qat(model, tmp_path / "none", solver)
    with pytest.raises(
        ArgumentTypeError, match=r"config: expected the path of a .cfg or .json, a dict or None, got int"
    ):
        amct.caffe.prepare_qat(*arguments, 3)
    with pytest.raises(ArgumentError, match="trains 0 iterations"):
        amct.caffe.prepare_qat(*arguments, iterations=0)
    untested = tmp_path / "untested.prototxt"
    untested.write_text(f'net: "{model}" {SOLVER}'.replace("test_iter: 2", ""))
    with pytest.raises(ConfigError, match="set test_iter and test_interval above 0"):
        amct.caffe.prepare_qat(model, weights, untested, folder="work").train()
    with pytest.raises(TrainingError, match="save the trained model first"):
        amct.caffe.prepare_qat(*arguments, folder="work").report("report.html")


def test_a_loss_that_diverges(arguments, tmp_path, capsys):
    model, weights, _ = arguments
    wild = tmp_path / "wild.prototxt"
    wild.write_text(f'net: "{model}" {SOLVER}'.replace("base_lr: 0.01", "base_lr: 1e30"))
    with pytest.raises(TrainingError, match=r"NaN or infinite; lower base_lr"):
        amct.caffe.prepare_qat(model, weights, wild, folder="work").train()
    options = ["--solver", str(wild), "--model", str(model), "--weights", str(weights), "-o", "out/net"]
    assert main(["caffe", "retrain", *options]) not in (0, 130)
    assert "lower base_lr" in capsys.readouterr().err


def test_command(arguments, tmp_path, capsys):
    model, weights, solver = map(str, arguments)
    options = ["--solver", solver, "--model", model, "--weights", weights, "-o", "out/net", "--iterations", "5"]
    assert main(["caffe", "retrain", *options]) == 0
    output = capsys.readouterr().out
    assert "accuracy: 0." in output
    assert "written: out/net_report.html" in output
    assert output.splitlines()[-1].startswith("verdict: ")
    assert (tmp_path / "out" / "net_retrain" / "retrain_iter_5.solverstate").is_file()


def test_a_folder_in_the_place_of_the_report_is_refused_before_training(arguments, tmp_path, capsys):
    (tmp_path / "out" / "net_report.html").mkdir(parents=True)
    model, weights, solver = map(str, arguments)
    options = ["--solver", solver, "--model", model, "--weights", weights, "-o", "out/net"]
    assert main(["caffe", "retrain", *options]) not in (0, 130)
    assert 'net_report.html" is a folder' in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["net_report.html"]


def test_command_interrupted(arguments, tmp_path, capsys):
    model, weights, _ = map(str, arguments)
    solver = tmp_path / "long.prototxt"
    solver.write_text(f'net: "{model}" snapshot: 2 {SOLVER}'.replace("max_iter: 12", "max_iter: 100000"))
    options = ["--solver", str(solver), "--model", model, "--weights", weights, "-o", "out/net"]
    snapshot = tmp_path / "out" / "net_retrain" / "retrain_iter_2.solverstate"

    def interrupt():
        while not snapshot.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    code = main(["caffe", "retrain", *options])
    waiting.join()
    assert code == 130
    assert "training was stopped at iteration" in capsys.readouterr().out
    assert not (tmp_path / "out" / "net_quant.json").exists()
