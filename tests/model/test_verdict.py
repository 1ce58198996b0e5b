"""The verdict follows the rule that is shown with it."""

from __future__ import annotations

import math

import pytest

from amct.model.quant_json import FileCheck, verdict_of_files
from amct.model.verdict import LEVELS, RULE, Verdict, judge
from amct.numerics.similarity import BoxComparison


@pytest.mark.parametrize(
    ("metric", "outputs", "layers", "level"),
    [
        ((0.90, 0.892), [5.0], [30.0], "good"),  # 0.89 % of its value; the outputs do not count beside a metric
        ((0.90, 0.95), [5.0], [30.0], "good"),
        ((0.90, 0.88), [50.0], [30.0], "acceptable"),  # 2.2 %
        ((0.90, 0.87), [50.0], [30.0], "poor"),  # 3.3 %
        ((0.90, 0.80), [50.0], [30.0], "broken"),
        ((-2.0, -2.5), [50.0], [30.0], "broken"),  # a negative metric falls too
        ((0.0, 0.0), [50.0], [30.0], "good"),
        ((0.9, math.nan), [50.0], [30.0], "broken"),
        ((0.9, 0.9), [50.0, math.nan], [30.0], "broken"),
        (None, [20.0, 45.0], [None, math.inf, 10.0], "good"),
        (None, [math.inf], [], "good"),
        (None, [19.9, 45.0], [30.0], "acceptable"),
        (None, [15.0], [30.0], "acceptable"),
        (None, [14.9], [30.0], "poor"),
        (None, [10.0], [30.0], "poor"),
        (None, [9.9], [30.0], "broken"),
        (None, [-5.2], [], "broken"),
        (None, [30.0, math.nan], [], "broken"),
        (None, [30.0], [9.9, 30.0], "acceptable"),
        (None, [30.0], [math.nan], "acceptable"),
        (None, [12.0], [9.9], "poor"),
    ],
)
def test_the_verdict_follows_its_rule(metric, outputs, layers, level):
    found = judge(outputs, metric, [(f"layer{place}", sqnr) for place, sqnr in enumerate(layers)])
    assert found.level == level
    assert found.reasons
    assert found.title in ("Good", "Acceptable", "Poor", "Broken")
    assert found.title in RULE


@pytest.mark.parametrize(
    ("boxes", "found", "more", "level"),
    [
        (100, 95, 0, "good"),
        (100, 94, 0, "acceptable"),
        (100, 100, 10, "acceptable"),
        (100, 89, 0, "poor"),
        (100, 79, 0, "broken"),
        (4, 3, 0, "acceptable"),
        (4, 2, 0, "broken"),
        (1, 0, 0, "broken"),
    ],
)
def test_a_detector_is_judged_by_its_boxes(boxes, found, more, level):
    compared = BoxComparison(output="out", boxes=boxes, found=found, more=more, mean_iou=0.9, score_difference=0.01)
    verdict = judge([], boxes=[compared])
    assert verdict.level == level
    assert verdict.reasons == (str(compared),)
    assert judge([30.0], (0.9, 0.9), boxes=[compared]).level == "good"  # a metric counts alone
    assert judge([], boxes=[BoxComparison(output="out", boxes=0, found=0, more=0)]) is None


def test_nothing_to_judge_by_is_no_verdict():
    assert judge([]) is None
    assert judge([], None, [("conv", 3.0)]) is None


def test_a_verdict_is_at_best_itself_and_all_better_ones():
    for place, level in enumerate(LEVELS):
        reached = [Verdict(level=level).is_at_best(other) for other in LEVELS]
        assert reached == [index <= place for index in range(len(LEVELS))]


def test_a_save_is_judged_by_its_worst_file():
    checks = {
        "record.txt": None,
        "qdq": FileCheck(cosine=0.99, sqnr=24.6, verdict="good"),
        "deploy": FileCheck(cosine=0.98, sqnr=19.1, verdict="acceptable"),
        "other": FileCheck(not_checked="it is large"),
    }
    found = verdict_of_files(checks)
    assert (found.level, found.of) == ("acceptable", "deploy")
    assert str(found) == "Acceptable: the output's SQNR is 19.1 dB (deploy)"
    assert verdict_of_files({"other": checks["other"], "record.txt": None}) is None
