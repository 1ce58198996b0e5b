"""Colours follow the thresholds, and a metric is shown with its change."""

from __future__ import annotations

import math

import pytest

from amct.numerics.similarity import LayerComparison
from amct.report.content import sqnr_class
from amct.report.filling import metric_figure, output_figures


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


def output(name, sqnr):
    return LayerComparison(layer=name, cosine=0.9, sqnr=sqnr, mean_squared_error=0.1, largest_error=1.0, values=8)


@pytest.mark.parametrize(
    ("sqnr", "own", "more"),
    [
        ([30.0], ["the output"], None),
        ([30.0, 40.0, 20.0, 10.0], ["o0", "o1", "o2", "o3"], None),
        ([30.0, 50.0, 20.0, 10.0, 25.0], ["o0", "o2", "o3", "o4"], ("1 more output", "from 50.0 dB")),
        ([41.0, 40.0, 42.0, math.nan, 20.0, 30.0, 35.0], ["o3", "o4", "o5", "o6"], ("3 more outputs", "from 40.0 dB")),
    ],
)
def test_the_worst_outputs_are_shown_and_the_others_counted(sqnr, own, more):
    figures = list(output_figures([output(f"o{i}", value) for i, value in enumerate(sqnr)]))
    shown = {each.label.removeprefix("SQNR of "): each.after for each in figures if each.label.startswith("SQNR of ")}
    counts = shown.popitem() if more is not None else None
    assert list(shown) == own
    assert counts == more
