"""The parts of a search: the ladder, the bounds, the journal, the goals, and what wrong arguments say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import amct.pytorch
from amct.errors import ArgumentError, ArgumentTypeError, EvaluatorError, SearchError
from amct.search.goal import Drop, checked_value, top1
from amct.search.journal import Journal
from amct.search.ladder import Ladder, Option
from amct.search.sequential import Race, fewest_samples, upper_bound

# -- the ladder --------------------------------------------------------------------------------------------------------


def test_the_ladder_has_the_best_of_all_combinations():
    generator = np.random.default_rng(3)
    options = {
        f"layer{number}": [
            Option(choice=name, cost=float(generator.integers(1, 9)), noise=float(generator.random()))
            for name in ("a", "b", "c")
        ]
        for number in range(6)
    }
    ladder = Ladder(options)
    every = [
        (sum(each.cost for each in chosen), sum(each.noise for each in chosen))
        for chosen in itertools.product(*options.values())
    ]
    for rung in range(len(ladder)):
        cost, noise = ladder.costs[rung], ladder.noises[rung]
        assert noise == pytest.approx(min(other for spent, other in every if spent <= cost))
        chosen = ladder.choices(rung)
        own = [next(each for each in options[name] if each.choice == choice) for name, choice in chosen.items()]
        assert sum(each.cost for each in own) == pytest.approx(cost)
        assert sum(each.noise for each in own) == pytest.approx(noise)
    assert list(ladder.costs) == sorted(ladder.costs)
    assert list(ladder.noises) == sorted(ladder.noises, reverse=True)
    assert ladder.quietest_within(math.inf) == 0


def test_a_ladder_of_hundreds_of_layers_is_quick():
    generator = np.random.default_rng(4)
    options = {
        str(number): [
            Option(choice="a", cost=float(generator.random()), noise=float(generator.random())) for _ in range(3)
        ]
        for number in range(300)
    }
    ladder = Ladder(options)
    assert len(ladder.choices(len(ladder) // 2)) == 300


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "won"), [(0.02, 0.01), (0.002, 0.0), (0.1, 0.08)])
def test_bounds_are_wrong_as_often_as_they_say_at_most(lost, won):
    generator = np.random.default_rng(5)
    truth, wrong = lost - won, 0
    for _ in range(400):
        values = generator.choice([1.0, -1.0, 0.0], 500, p=[lost, won, 1 - lost - won])
        wrong += upper_bound(values, -1.0, 1.0, 0.05) < truth
    assert wrong <= 0.05 * 400 + 2 * math.sqrt(0.05 * 0.95 * 400)


def test_a_race_decides_early_and_seldom_wrongly_however_often_it_is_asked():
    generator = np.random.default_rng(6)
    wrong = late = 0
    for _ in range(200):
        values = generator.choice([1.0, -1.0, 0.0], 2000, p=[0.02, 0.01, 0.97])  # exactly at the limit
        race = Race(0.01, -1.0, 1.0, 0.05)
        decisions = [race.decide(values[:count]) for count in range(64, 2000, 128)]
        wrong += any(each.above or each.below for each in decisions)
        clear = generator.choice([1.0, 0.0], 2000, p=[0.2, 0.8])
        late += not race.decide(clear[:256]).above
    assert wrong <= 0.05 * 200 + 2 * math.sqrt(0.05 * 0.95 * 200)
    assert late == 0


def test_how_many_samples_a_goal_needs():
    needed = fewest_samples(0.005, -1.0, 1.0, 0.05)
    assert upper_bound(np.zeros(needed), -1.0, 1.0, 0.05) <= 0.005
    assert upper_bound(np.zeros(needed - 1), -1.0, 1.0, 0.05) > 0.005


def test_a_bound_without_a_largest_loss_is_that_of_the_normal_distribution():
    values = np.random.default_rng(7).exponential(size=1000)
    found = upper_bound(values, 0.0, None, 0.05)
    assert found == pytest.approx(values.mean() + 1.645 * values.std(ddof=1) / math.sqrt(1000), rel=1e-3)


# -- the journal -------------------------------------------------------------------------------------------------------


def written(path):
    journal = Journal(path, {"seed": "0"})
    journal.add("a", [0.0, 1.0])
    journal.add("b", [0.5])
    journal.add("a", [-1.0])
    return path.read_bytes()


def test_a_journal_is_read_again(tmp_path):
    path = tmp_path / "net.search.jsonl"
    written(path)
    again = Journal(path, {"seed": "0"})
    assert again.losses("a").tolist() == [0.0, 1.0, -1.0]
    assert again.losses("b").tolist() == [0.5]
    assert again.repeated == 4


def test_a_kill_at_any_byte_loses_at_most_the_last_line(tmp_path):
    path = tmp_path / "net.search.jsonl"
    content = written(path)
    first = content.index(b"\n") + 1
    for length in range(first, len(content)):
        path.write_bytes(content[:length])
        journal = Journal(path, {"seed": "0"})
        assert journal.repeated in (0, 2, 3, 4)
        journal.add("c", [0.25])
        assert Journal(path, {"seed": "0"}).losses("c").tolist() == [0.25]


def test_any_other_damage_is_an_error(tmp_path):
    path = tmp_path / "net.search.jsonl"
    content = written(path)
    for place in range(content.rindex(b"\n", 0, -1)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(SearchError, match=r"damaged|another"):
            Journal(path, {"seed": "0"})
    path.write_bytes(b"")
    with pytest.raises(SearchError, match="damaged"):
        Journal(path, {"seed": "0"})


def test_the_journal_of_another_search_is_refused(tmp_path):
    path = tmp_path / "net.search.jsonl"
    written(path)
    with pytest.raises(SearchError, match="another seed"):
        Journal(path, {"seed": "1"})


# -- goals and evaluators ----------------------------------------------------------------------------------------------


def test_top1_of_classes_and_of_pixels():
    outputs = torch.tensor([[0.0, 2.0], [3.0, 1.0]])
    assert top1(outputs, np.array([1, 1])).tolist() == [1.0, 0.0]
    pixels = torch.zeros(1, 2, 2, 2)
    pixels[0, 1, 0, 0] = 1
    assert top1(pixels, np.array([[[1, 0], [0, 1]]])).tolist() == [0.75]
    with pytest.raises(EvaluatorError, match=r"score=function\(outputs, labels\)"):
        top1(torch.zeros(4), np.zeros(4))
    for labels, wrong in (([0, 2], 2), ([-1, 0], -1)):
        with pytest.raises(EvaluatorError, match=f"label {wrong}: expected the number of a class, 0 to 1"):
            top1(outputs, np.array(labels))


def test_labels_that_are_hardly_those_of_the_model_are_doubted(caplog):
    Drop(1.0, None).take_reference(np.repeat([1.0, 0.0], [5, 95]))
    assert "gets only 5.0 % of the labels right" in caplog.text
    caplog.clear()
    Drop(1.0, None).take_reference(np.repeat([1.0, 0.0], [60, 40]))
    Drop(1.0, top1).take_reference(np.zeros(100))  # a score of the user's own may be anything
    assert not caplog.text


class Metric:
    def compute(self):
        return 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None; does it lack a return"),
        (Metric().compute, r"the function Metric.compute instead of its result: call it"),
        (float("nan"), "expected a finite number"),
        (torch.zeros(3), "returned 3 numbers"),
        ("0.5", "returned a str"),
    ],
)
def test_what_is_no_accuracy_is_said(value, message):
    with pytest.raises(EvaluatorError, match=message):
        checked_value(value, "evaluate")


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda _, __: None, "score returned None"),
        (lambda _, __: Metric().compute, "call it"),
        (lambda _, labels: np.full(len(labels), np.nan), "returned nan for a sample"),
        (lambda _, __: 0.5, r"the shape \[\] for a batch of 2 samples"),
        (lambda _, labels: np.full(len(labels), 7.0), "score_range"),
        (lambda _, __: 1 / 0, "score raised ZeroDivisionError"),
    ],
)
def test_wrong_scores_are_said(score, message):
    with pytest.raises(EvaluatorError, match=message):
        Drop(1.0, score).reference(torch.zeros(2, 3), np.zeros(2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ArgumentError, "expected one goal of max_drop, min_agreement, min_sqnr, got none"),
        ({"max_drop": 1, "min_sqnr": 20}, ArgumentError, "got max_drop and min_sqnr"),
        ({"max_drop": -1}, ArgumentError, "max_drop: expected at least 0, got -1"),
        ({"max_drop": "1"}, ArgumentTypeError, "max_drop: expected a number, got str"),
        ({"max_drop": 1, "choices": ["int5"]}, ArgumentError, '"int5" is unknown. Did you mean "int'),
        ({"max_drop": 1, "choices": ["float"]}, ArgumentError, 'something besides "float"'),
        ({"max_drop": 1, "minimize": "weight"}, ArgumentError, "expected one of size, latency, bitops"),
        ({"max_drop": 1, "seed": -1}, ArgumentTypeError, "seed: expected a whole number"),
        ({"max_drop": 1, "evaluate": len}, ArgumentError, "leave labelled out"),
        ({"max_drop": 1, "max_evals": 3}, ArgumentTypeError, "unknown option max_evals"),
        ({"max_drop": 1, "confidence": 1.0}, ArgumentError, "confidence: expected 0.5 to below 1"),
        ({"max_drop": 0.1, "certify": True}, ArgumentError, "are too few to certify a drop of at most 0.1 points"),
    ],
)
def test_wrong_arguments_are_answered(options, error, message):
    data = [(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64))] * 4
    with pytest.raises(error, match=message):
        amct.pytorch.quantize_to(nn.Sequential(nn.Linear(8, 4)), [torch.randn(4, 8)], data, **options)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x, shift):
        return self.linear(x) + self.linear(shift)


@pytest.mark.parametrize(
    ("labelled", "message"),
    [
        ([], "there is no batch"),
        ([torch.zeros(4, 8)], r"expected \(inputs, labels\), got a Tensor of 4"),
        ([(torch.zeros(4, 8), torch.zeros(3))], "4 samples with 3 labels"),
        ("folder", "got str"),
        (None, "expected batches of"),
        ([((torch.zeros(4, 8), torch.zeros(1, 8)), torch.zeros(4))] * 2, "one input has 8 rows, another 2"),
    ],
)
def test_wrong_samples_are_answered(labelled, message):
    two = isinstance(labelled, list) and labelled and isinstance(labelled[0][0], tuple)
    model = TwoInputs() if two else nn.Sequential(nn.Linear(8, 4))
    calibration = [(torch.randn(4, 8), torch.randn(1, 8))] if two else [torch.randn(4, 8)]
    with pytest.raises(ArgumentError, match=message):
        amct.pytorch.quantize_to(model.eval(), calibration, labelled, max_drop=1)
