"""Colours follow the thresholds, and a metric is shown with its change."""

from __future__ import annotations

import math

import pytest

from amct.report.content import sqnr_class
from amct.report.filling import metric_figure


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
