"""Models run as a user's program runs them: outputs, the time of nodes, the time of several models."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import numpy as np
import pytest
from export_nets import calibrate, residual, run
from onnx import ModelProto, TensorProto, helper, numpy_helper
from scipy.stats import t as student

from amct.errors import ModelError
from amct.export.check import running
from amct.export.check.losses import (
    LIKELY,
    SURE,
    ComparedBatch,
    _student_quantile,
    compared,
    likely_loss,
    needs_action,
    output_similarity,
    say_slow,
    sure_loss,
)
from amct.export.check.running import LoadedModel, Speed, median_seconds
from amct.export.onnx import runtime
from amct.export.qdq.exporter import qdq_model
from amct.model.quant_json import FileCheck


@pytest.fixture(scope="module")
def net():
    return residual()


def test_a_file_runs_as_in_a_users_session(net, tmp_path):
    description, model = net
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    feeds = description.data()
    np.testing.assert_allclose(LoadedModel(path).run(feeds)["y"], run(model, feeds)["y"], rtol=1e-5)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08")
    with pytest.raises(ModelError, match="onnxruntime cannot run the model"):
        LoadedModel(path)


def test_the_costliest_nodes_are_named_as_in_the_file(net):
    description, model = net
    factors, tensors = calibrate(description, model)
    quantized = qdq_model(model, description.bindings(), factors, tensors=tensors).model
    loaded = LoadedModel(quantized, profile=True)
    loaded.run(description.data())
    costs = loaded.costliest_nodes(description.data(), 100)
    assert {("stem", "QLinearConv"), ("second", "QLinearConv"), ("fc", "QGemm")} <= {
        (cost.node, cost.operator) for cost in costs
    }
    assert math.isclose(sum(cost.share for cost in costs), 1.0)
    assert [cost.seconds for cost in costs] == sorted((cost.seconds for cost in costs), reverse=True)
    assert len(loaded.costliest_nodes(description.data(), 2)) == 2


def test_models_are_timed_in_turn(monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(running.time, "thread_time", lambda: float(next(clock)))
    calls = []

    def run(name, seconds):
        def call():
            calls.append(name)
            for _ in range(seconds):
                next(clock)

        return call

    medians = median_seconds({"slow": run("slow", 4), "fast": run("fast", 1)}, budget=0.0)
    assert medians == {"slow": 5.0, "fast": 2.0}
    assert calls == ["slow", "fast"] * running.FEWEST_ROUNDS


def test_time_spent_waiting_does_not_count(net):
    """A session with one thread computes on the thread whose CPU time is measured."""
    medians = median_seconds({"waits": lambda: time.sleep(0.02), "works": lambda: sum(range(200_000))}, budget=0.0)
    assert medians["waits"] < medians["works"]
    assert LoadedModel(net[1])._session.get_session_options().intra_op_num_threads == 1


@pytest.mark.parametrize(
    ("original", "ratio", "may_be_slower"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.0, False),
        ([1.0, 1.0, 1.04, 1.2], 1.02, True),
        ([1.0, 1.0, 1.4, 3.0], 1.2, False),
        ([0.8, 1.1, 5.0, 9.0], 3.05, True),
    ],
    ids=["the same every time", "within its spread", "clearly faster", "slower when nothing else runs"],
)
def test_a_speed_has_a_margin(net, monkeypatch, original, ratio, may_be_slower):
    _, model = net
    loaded = LoadedModel(model, profile=True)
    monkeypatch.setattr(running, "_times", lambda *_: {"file": [1.0] * 4, "original": original})
    speed = running.speed_of(loaded, loaded, net[0].data())
    assert speed.ratio == pytest.approx(ratio)
    assert (speed.least < 1) == may_be_slower
    assert speed.nodes


@pytest.mark.parametrize(
    ("milliseconds", "ratio", "verdict", "level"),
    [
        (0.4, 0.3, "good", logging.INFO),
        (0.4, 0.3, "poor", logging.INFO),
        (0.9, 0.95, "good", logging.INFO),
        (0.9, 0.95, None, logging.INFO),
        (0.9, 0.95, "poor", logging.WARNING),
        (0.9, 0.8, "good", logging.WARNING),
        (20.0, 0.98, "good", logging.WARNING),
        (20.0, 1.01, "good", logging.INFO),
    ],
)
def test_a_slower_file_is_a_warning_only_where_a_user_would_notice(milliseconds, ratio, verdict, level, caplog):
    speed = Speed(ratio=ratio, least=0.3, nodes=("conv (Conv) 90%",), seconds=milliseconds / 1e3)
    with caplog.at_level(logging.INFO, "amct"):
        say_slow(Path("net_qdq_model.onnx"), FileCheck(speed=ratio, verdict=verdict, costliest=speed.nodes), speed)
    (record,) = caplog.records
    assert record.levelno == level
    assert "slower than the float model" in record.getMessage()


def test_a_large_file_is_closed_before_the_parts_of_the_original_are_loaded_one_by_one(net, monkeypatch):
    shapes, model = net
    file, feeds = LoadedModel(model, profile=True), shapes.data()
    loaded: list[LoadedModel] = []

    class Loaded(LoadedModel):
        def __init__(self, part, *, lean):
            with pytest.raises(AttributeError):
                file.run(feeds)
            if loaded:
                with pytest.raises(AttributeError):
                    loaded[-1].run(feeds)
            super().__init__(part, lean=lean)
            loaded.append(self)

    monkeypatch.setattr(running, "LoadedModel", Loaded)
    speed = running.speed_apart(file, model, feeds, budget=0.01)
    assert len(loaded) > 1
    assert speed.ratio > 0
    assert speed.least <= speed.ratio
    assert speed.nodes


def test_kept_outputs_do_not_hold_the_memory_of_the_session(net):
    shapes, model = net
    loaded = LoadedModel(model)
    outputs, kept = loaded.run(shapes.data()), loaded.kept_outputs(shapes.data())
    assert outputs.keys() == kept.keys()
    assert all(np.array_equal(outputs[name], kept[name]) for name in kept)
    assert all(array.flags.owndata for array in kept.values())


def test_outputs_of_parts_are_those_of_the_whole_model(net):
    shapes, model = net
    expected, got = LoadedModel(model).run(shapes.data()), running.outputs_in_parts(model, shapes.data())
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)


def test_a_model_with_a_constant_output_runs_as_a_whole(net):
    shapes, model = net
    model = ModelProto.FromString(model.SerializeToString())
    constant = numpy_helper.from_array(np.ones(3, np.float32), "constant")
    model.graph.initializer.append(constant)
    model.graph.output.append(helper.make_tensor_value_info("constant", TensorProto.FLOAT, [3]))
    assert running.outputs_in_parts(model, shapes.data())["constant"].tolist() == [1, 1, 1]


def reshaped(batch, rows):
    """Four numbers a sample; inside, the number of samples is ``rows``, -1 for any."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 4])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    shape = numpy_helper.from_array(np.array([rows, 2, 2]), "shape")
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    graph = helper.make_graph([node], "g", [value], [result], [shape])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize(
    ("batch", "rows", "budget", "samples"),
    [("batch", -1, 0.0, 1), ("batch", -1, math.inf, 3), (3, 3, 0.0, 3), ("batch", 3, 0.0, 3)],
    ids=["takes long", "does not", "fixed size", "fixed inside"],
)
def test_a_batch_that_takes_long_is_timed_by_one_sample(batch, rows, budget, samples):
    loaded, feeds = LoadedModel(reshaped(batch, rows), profile=True), {"x": np.ones((3, 4), np.float32)}
    loaded.run(feeds)
    loaded.last_seconds = max(loaded.last_seconds, 1e-6)
    assert len(running.timed_inputs(loaded, feeds, budget)["x"]) == samples


def test_of_several_outputs_the_worst_is_reported():
    x = np.array([3.0, 4.0], np.float32)
    expected = {"same": x, "other": x, "classes": np.array([1])}
    got = {"same": x, "other": x + np.float32(0.5), "classes": np.array([2])}
    similarity, reasons = output_similarity(expected, got)
    assert (similarity.output, round(similarity.sqnr, 3)) == ("other", round(10 * math.log10(25 / 0.5), 3))
    assert reasons == {"classes": "it holds int64, not floating-point numbers"}


def test_outputs_that_do_not_correspond_are_named():
    x = np.zeros((2, 3), np.float32)
    similarity, reasons = output_similarity({"a": x, "b": x}, {"a": x[:1]})
    assert similarity is None
    assert reasons == {
        "a": "its shape is [1, 3], expected [2, 3]",
        "b": "the file has no output of this name",
    }


def test_a_likely_loss_covers_the_spread_of_repeated_measurements():
    random = np.random.default_rng(3)
    losses, margins = [], []
    for _ in range(400):
        common = random.uniform(1, 2, size=(8, 1))  # some samples are noisier than others, in both models
        expected = [{"y": np.zeros((1, 40), np.float32)} for _ in range(8)]
        simulated = [{"y": (random.normal(size=(1, 40)) * size).astype(np.float32)} for size in common]
        got = [{"y": (random.normal(size=(1, 40)) * size * 1.2).astype(np.float32)} for size in common]
        noise = [sum(float((each["y"] ** 2).sum()) for each in outputs) for outputs in (got, simulated)]
        losses.append(10 * math.log10(noise[0] / noise[1]))
        margins.append(likely_loss(expected, simulated, got, "y") - losses[-1])
    # Student's quantile of eight samples is 2.36; of two margins the larger counts, so that it is a little more.
    assert 2.2 * np.std(losses) < np.mean(margins) < 2.9 * np.std(losses)


@pytest.mark.parametrize("samples", [2, 3, 5, 8, 16])
def test_a_likely_loss_is_exceeded_by_few_losses_on_other_data_however_few_samples_there_are(samples):
    """The losses of samples are drawn from a normal distribution, of which the mean is the loss on all other data."""
    random = np.random.default_rng(samples)
    zero = [{"y": np.zeros((1, 1), np.float32)}] * samples
    one = [{"y": np.ones((1, 1), np.float32)}] * samples
    exceeded = 0
    for _ in range(600):
        files = [{"y": np.full((1, 1), 10 ** (loss / 20), np.float32)} for loss in random.normal(1.0, 0.4, samples)]
        exceeded += likely_loss(zero, one, files, "y") < 1.0
    # 2.5 % of 600 are 15; of a binomial count, 30 is four deviations away. Of two bounds the larger counts.
    assert exceeded <= 30


@pytest.mark.parametrize(("samples", "is_bounded"), [(2, False), (4, False), (5, True), (8, True)])
def test_of_fewer_samples_than_a_bound_needs_nothing_is_said_of_other_data(samples, is_bounded, tmp_path):
    """Two samples with losses of 0 and 2 dB have a bound of 13 dB, whatever the file is."""
    ones = {"y": np.ones((1, 4), np.float32)}
    off = [{"y": 1 + np.full((1, 4), 10 ** (loss / 20 - 2), np.float32)} for loss in (0, 2) * (samples // 2 + 1)]
    batches = [ComparedBatch(inputs={}, expected=ones, simulated={"y": np.full((1, 4), 1.01, np.float32)})] * samples
    check = compared(tmp_path / "net_qdq_model.onnx", "some batches", batches, off[:samples])
    assert (check.likely_loss is not None) == is_bounded
    assert check.verdict == "good"
    assert not needs_action(check)


def test_quantiles_of_few_samples_are_those_of_students_distribution():
    for freedom in (*range(1, 20), 50, 199, 200, 1000):
        for share in (0.6, LIKELY, SURE):
            expected = student.ppf(share, freedom)
            assert _student_quantile(share, freedom) == pytest.approx(expected, rel=1e-9 if freedom <= 200 else 2e-3)


def test_a_loss_of_most_samples_is_likely_although_one_sample_hides_it():
    """The noise of one sample is most of all noise, and there the file is better; on the others it is worse."""
    sizes = np.array([10.0, *np.full(7, 0.01)])
    expected = [{"y": np.zeros((1, 4), np.float32)} for _ in sizes]
    simulated = [{"y": np.full((1, 4), size, np.float32)} for size in sizes]
    got = [{"y": np.full((1, 4), size, np.float32)} for size in (5.0, *sizes[1:] * 2)]
    assert likely_loss(expected, simulated, got, "y") > 1
    assert likely_loss(expected[:1], simulated[:1], got[:1], "y") == pytest.approx(-20 * math.log10(2), abs=1e-5)


def test_a_loss_is_sure_as_far_as_the_samples_agree_on_it():
    expected = [{"y": np.zeros((1, 4), np.float32)}] * 4
    simulated = [{"y": np.ones((1, 4), np.float32)}] * 4

    def of(*sizes):
        return sure_loss(expected, simulated, [{"y": np.full((1, 4), size, np.float32)} for size in sizes], "y")

    assert of(2, 2, 2, 2) == pytest.approx(20 * math.log10(2), abs=1e-5)
    assert 0 < of(1, 2, 2, 3) < 20 * math.log10(2)
    assert of(1, 1, 1, 20) > 10  # one sample of four that is wrong altogether is no spread
    assert sure_loss(expected, simulated, [{}] * 4, "y") == 0.0


@pytest.mark.parametrize(("nodes", "shares"), [(3, True), (8, False)])
def test_onnxruntime_looks_for_equal_constants_only_in_models_of_few_nodes(nodes, shares, monkeypatch):
    """The time that it takes for that grows with the square of the number of constants."""
    monkeypatch.setattr(runtime, "_DEEP", 5)
    chain = [helper.make_node("Add", [f"v{n}", "one"], [f"v{n + 1}"]) for n in range(nodes)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("v0", f"v{nodes}")]
    one, opset = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0]), helper.make_opsetid("", 18)
    model = helper.make_model(
        helper.make_graph(chain, "chain", ends[:1], ends[1:], [one]), ir_version=8, opset_imports=[opset]
    )
    session = runtime.open_session(model)
    try:
        found = session.get_session_options().get_session_config_entry("optimization.disable_specified_optimizers")
    except RuntimeError:  # it has no such entry
        found = ""
    assert found == ("" if shares else "ConstantSharing")
    assert session.run(None, {"v0": np.zeros(2, np.float32)})[0].tolist() == [nodes, nodes]
