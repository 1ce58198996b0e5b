"""How a search goes on: few evaluations, resumed after a kill, impossible goals, evaluators of the user."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import onnx
import pytest
import torch
from three_doors import torch_network

import amct.pytorch
from amct.errors import ArgumentError, EvaluatorError, SearchError
from amct.export.onnx.runtime import Runner
from amct.search.costs import bit_operations_of
from amct.search.journal import Journal
from amct.search.judge import SampleJudge
from amct.search.run import Candidates

GENERATOR = np.random.default_rng(1)
CALIBRATION = [torch.from_numpy(GENERATOR.normal(0.2, 1, (8, 3, 8, 8)).astype(np.float32)) for _ in range(3)]
PICTURES = torch.from_numpy(GENERATOR.normal(0.2, 1, (800, 3, 8, 8)).astype(np.float32))
MODEL = torch_network()
with torch.no_grad():
    LABELS = MODEL(PICTURES).argmax(1)


def searched(**options):
    options = {"max_drop": 2.0, **options}
    return amct.pytorch.quantize_to(MODEL, CALIBRATION, (PICTURES, LABELS), **options)


@pytest.fixture
def judges(monkeypatch):
    """Every judge that a search makes, to see how much it has measured."""
    made = []
    prepare = SampleJudge.prepare
    monkeypatch.setattr(SampleJudge, "prepare", lambda self, base: made.append(self) or prepare(self, base))
    return made


def test_a_goal_that_8_bits_meet_takes_two_evaluations(judges):
    found = searched(max_drop=10.0, choices=["float", "int8"])
    assert found.certificate.met
    assert judges[0].evaluations <= 2.0
    assert set(found.history[0].choices.values()) == {"int8"}


def test_the_report_shows_the_curve(tmp_path):
    found = searched()
    page = found.report(tmp_path / "report.html").read_text()
    assert "Accuracy against cost" in page
    assert "never used in the search" in page
    for point in found.history:
        assert point.summary in page
    assert page.count("<figcaption>Loss against") == 2  # size and time
    assert page.count('<g class="point') == 2 * len(found.history)
    assert page.count('chosen"><title>') == 2


def test_bit_operations_are_counted_layer_by_layer():
    base = amct.pytorch.quantize(MODEL, CALIBRATION)
    candidates = Candidates(base, ("float", "int8", "int16", "int4"))
    example = CALIBRATION[0][:1]
    expected, hooks = {}, []
    for name in base.layers:
        layer = MODEL.get_submodule(name)

        def count(layer, _, output, name=name):
            each = layer.weight[0].numel() if hasattr(layer, "weight") else 1
            expected[name] = each * output[0].numel()

        hooks.append(layer.register_forward_hook(count))
    MODEL(example)
    for hook in hooks:
        hook.remove()
    cost = bit_operations_of(candidates)
    assert {name: cost.of(name, "int8") for name in expected} == {name: 64 * each for name, each in expected.items()}
    first = base.layers[0]
    bits = {"float": 32 * 32, "int16": 8 * 16, "int4": 4 * 8}
    assert {choice: cost.of(first, choice) for choice in bits} == {c: b * expected[first] for c, b in bits.items()}


def test_the_fewest_bit_operations_are_found():
    found = searched(max_drop=100.0, minimize="bitops")
    (point,) = found.history
    assert point.unit == "bit operations"
    assert "int4" in point.choices.values()
    assert point.bytes < point.cost


def test_the_same_seed_gives_the_same_result():
    first, second = searched(seed=3), searched(seed=3)
    assert first.history == second.history
    assert first.certificate == second.certificate


def test_two_searches_at_once():
    found = {}
    threads = [threading.Thread(target=lambda seed=seed: found.update({seed: searched(seed=seed)})) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: each.certificate for seed, each in found.items()} == {
        seed: searched(seed=seed).certificate for seed in (1, 2)
    }


def test_an_impossible_goal_ends_with_the_best_that_was_found(caplog):
    wrong = (LABELS + torch.randint(1, 5, LABELS.shape, generator=torch.Generator().manual_seed(0))) % 5

    def score(outputs, labels):  # one that no quantized model can keep: equal bits
        del labels
        reference = MODEL.fc.weight.detach().sum()
        return np.asarray((outputs.double().sum(1) * 1e6 % 2 > 1) & bool(reference), np.float64)

    found = amct.pytorch.quantize_to(MODEL, CALIBRATION, (PICTURES, wrong), max_drop=0.0, score=score, seed=1)
    assert found.history
    assert found.layers  # some layer is quantized, even so
    if not found.certificate.met:
        assert "the goal was not reached; this is the best result found" in caplog.text
        assert "NOT met" in str(found.certificate)


def test_limits_of_a_search(judges):
    found = searched(max_drop=0.2, max_evaluations=2.5)
    assert judges[0].evaluations <= 2.5
    assert found.history
    assert searched(max_drop=0.2, max_minutes=0).history


class Killed(BaseException):
    """As a signal ends a process."""


def test_a_killed_search_goes_on_without_repeating_an_evaluation(tmp_path, judges, monkeypatch):
    journal = tmp_path / "net.search.jsonl"
    whole = searched(max_drop=0.7)
    total = judges[-1].evaluations
    original = amct.search.journal.Journal.add
    for killed_after in itertools.count(1, 3):
        calls = itertools.count()

        def add(self, name, losses, calls=calls, killed_after=killed_after):
            original(self, name, losses)
            if next(calls) == killed_after:
                raise Killed

        monkeypatch.setattr(amct.search.journal.Journal, "add", add)
        try:
            found = searched(max_drop=0.7, resume=journal)
        except Killed:
            continue
        break
    assert found.history == whole.history
    assert found.certificate == whole.certificate
    assert not journal.exists()
    assert len(judges) > 3
    assert sum(judge.evaluations for judge in judges[1:]) <= total


def test_each_better_result_is_shown_before_it_is_certified():
    seen = []
    found = searched(on_best=lambda each: seen.append(each))
    assert seen
    assert all(each.certificate.remark == "not certified: the search has not ended" for each in seen)
    assert any(set(each.layers) == set(found.layers) for each in seen)


# -- evaluators --------------------------------------------------------------------------------------------------------


def accuracy(model):
    with torch.no_grad():
        return float((model(PICTURES).argmax(1) == LABELS).double().mean())


def test_a_number_for_the_whole_model():
    calls = []
    found = amct.pytorch.quantize_to(
        MODEL, CALIBRATION, max_drop=0.02, evaluate=lambda model: calls.append(1) or accuracy(model)
    )
    assert found.certificate.met
    assert found.certificate.bound is None
    assert "no bound for other data" in str(found.certificate)
    assert accuracy(found.model) >= 0.98
    assert len(calls) == 2 + len(found.history)


def test_a_random_evaluator_is_averaged(caplog):
    generator = np.random.default_rng(0)
    found = amct.pytorch.quantize_to(
        MODEL, CALIBRATION, max_drop=0.05, evaluate=lambda model: accuracy(model) + generator.normal(0, 1e-4)
    )
    assert "every number is the mean of 3 calls" in caplog.text
    assert "vary by" in found.certificate.remark


def test_an_evaluator_that_raises():
    with pytest.raises(EvaluatorError, match="evaluate raised KeyError: 'dataset'"):
        amct.pytorch.quantize_to(MODEL, CALIBRATION, max_drop=0.05, evaluate=lambda _: {}["dataset"])


def test_learned_rounding_and_wide_inputs_are_choices():
    found = searched(max_drop=3.0, choices=["int8", "adaround4", "int16"])
    assert found.certificate.met
    chosen = next(point for point in found.history if point.chosen).choices
    assert set(chosen.values()) <= {"int8", "adaround4", "int16"}


@pytest.fixture
def timed(monkeypatch):
    """Sets the time of a file with 5 quantized layers, where one without takes 1 ms, and what "auto" finds."""

    class Loaded:
        def __init__(self, model):
            weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) > 1}
            self.layers = sum(
                node.op_type == "DequantizeLinear" and node.input[0] in weights for node in model.graph.node
            )

        def close(self):
            pass

    def times(milliseconds, alone):
        def seconds(timer, loaded):
            runs = {"present": timer._beside.layers, "other": loaded.layers}
            return {name: (milliseconds + 0.01 * (5 - count) if count else 1.0) / 1000 for name, count in runs.items()}

        monkeypatch.setattr("amct.search.costs.LoadedModel", Loaded)
        monkeypatch.setattr("amct.search.costs._Timer._seconds", seconds)
        monkeypatch.setattr("amct.export.qdq.auto.median_seconds", lambda _: {"present": 1.0, "other": alone})

    return times


@pytest.mark.parametrize(("alone", "tried"), [(0.5, 1), (1.5, 2)], ids=["each region", "all regions together"])
def test_latency_leaves_everything_float_where_nothing_pays(alone, tried, timed, tmp_path, caplog):
    timed(1.2, alone)
    found = searched(max_drop=5.0, minimize="latency")
    assert found.layers == ()
    assert found.certificate.loss == 0
    assert "it is left as it is" in caplog.text
    assert [point.cost for point in found.history] == pytest.approx([1.2, 1.0][-tried:])
    assert [point.chosen for point in found.history] == [False, True][-tried:]
    assert "0 layers quantized" in found.summary()
    saved = found.save(tmp_path / "net")
    assert not [node for node in onnx.load(saved[0]).graph.node if "Linear" in node.op_type]
    assert found.report(tmp_path / "report.html").is_file()


def test_a_file_in_memory_holds_its_weights():
    """Those of float layers too, when the model that it was made of is gone."""
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.ReLU(), torch.nn.Linear(200, 4)).eval()
    batch = torch.from_numpy(GENERATOR.normal(0, 1, (8, 200)).astype(np.float32))
    candidates = Candidates(amct.pytorch.quantize(model, [batch]), ("float", "int8"))
    exported = candidates.made({"0": "float", "2": "int8"}).exported()
    outputs = Runner(exported.model).run(candidates.base.prepared.onnx_inputs(((batch,), {})))
    with torch.no_grad():
        assert np.abs(next(iter(outputs.values())) - model(batch).numpy()).max() < 0.05


def test_latency_quantizes_what_pays(timed):
    timed(0.8, 1.5)
    found = searched(max_drop=5.0, minimize="latency")
    assert len(found.layers) == 5
    assert found.certificate.met
    assert [point.cost for point in found.history] == pytest.approx([0.8])


@pytest.mark.parametrize("goal", [{"max_drop": 0.1}, {"min_agreement": 99.9}])
def test_too_few_samples_are_told_before_the_work_begins(goal):
    few = (PICTURES[:40], LABELS[:40]) if "max_drop" in goal else PICTURES[:40].split(8)

    def never():
        raise AssertionError("calibration began")
        yield

    with pytest.raises(ArgumentError, match="40 samples are too few to certify"):
        amct.pytorch.quantize_to(MODEL, never(), few, certify=True, **goal)


def test_a_search_is_not_resumed_with_another_function(tmp_path, monkeypatch):
    journal = tmp_path / "net.search.jsonl"

    def first(outputs, labels):
        return np.asarray(outputs.argmax(1) == torch.from_numpy(labels), np.float64)

    def second(outputs, labels):
        return first(outputs, labels)

    monkeypatch.setattr(Journal, "remove", lambda _: None)
    searched(score=first, resume=journal, max_drop=100.0)
    searched(score=first, resume=journal, max_drop=100.0)
    with pytest.raises(SearchError, match="another goal"):
        searched(score=second, resume=journal, max_drop=100.0)
