"""The verdict follows the rule that the page shows, and colours follow the thresholds."""

from __future__ import annotations

import math

import pytest

from amct.numerics.similarity import LayerComparison
from amct.report.filling import metric_figure
from amct.report.verdict import sqnr_class, verdict


def output(sqnr):
    return LayerComparison(layer="y", cosine=0.9, sqnr=sqnr, mean_squared_error=0.0, largest_error=0.0, values=1)


@pytest.mark.parametrize(
    ("metric", "outputs", "layers", "level"),
    [
        ((0.90, 0.892), [5.0], [30.0], "good"),  # 0.89 % of its value; the outputs do not count beside a metric
        ((0.90, 0.95), [5.0], [30.0], "good"),
        ((0.90, 0.88), [50.0], [30.0], "look"),
        ((0.90, 0.80), [50.0], [30.0], "broken"),
        ((-2.0, -2.5), [50.0], [30.0], "broken"),  # a negative metric falls too
        ((0.0, 0.0), [50.0], [30.0], "good"),
        ((0.9, math.nan), [50.0], [30.0], "broken"),
        ((0.9, 0.9), [50.0, math.nan], [30.0], "broken"),
        (None, [20.0, 45.0], [None, math.inf, 10.0], "good"),
        (None, [math.inf], [], "good"),
        (None, [19.9, 45.0], [30.0], "look"),
        (None, [9.9], [30.0], "broken"),
        (None, [30.0], [9.9, 30.0], "look"),
        (None, [30.0], [math.nan], "look"),
        (None, [], [30.0], "look"),
    ],
)
def test_the_verdict_follows_its_rule(metric, outputs, layers, level):
    named = [(f"layer{place}", sqnr) for place, sqnr in enumerate(layers)]
    found = verdict(metric, [output(sqnr) for sqnr in outputs], named)
    assert found.level == level
    assert found.reasons
    assert found.title in ("Good", "Look here", "Broken")


def test_colour_classes_change_at_the_thresholds():
    values = [None, math.nan, -3.0, 9.99, 10.0, 19.99, 20.0, 29.99, 30.0, math.inf]
    expected = ["unmeasured", "q0", "q0", "q0", "q1", "q1", "q2", "q2", "q3", "q3"]
    assert [sqnr_class(value) for value in values] == expected


@pytest.mark.parametrize(
    ("name", "before", "after", "shown"),
    [
        ("top1 accuracy", 99.16, 98.99, ("99.16 %", "98.99 %", "−0.17")),
        ("top1", 0.9916, 0.9899, ("99.16 %", "98.99 %", "−0.17")),
        ("mean iou", 0.5, 0.51, ("50.00 %", "51.00 %", "+1.00")),
        ("perplexity", 12.34, 12.5, ("12.34", "12.5", "+0.16")),
    ],
)
def test_a_metric_is_shown_before_and_after_with_its_change(name, before, after, shown):
    figure = metric_figure(name, before, after)
    assert (figure.before, figure.after, figure.change) == shown
