"""Matched boxes: against counts by hand, and laws that hold for any boxes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amct.numerics.similarity import BoxMatching, rows_of

FACE = [0, 1, 0.9, 10, 10, 30, 30]


def compared(reference, other):
    matching = BoxMatching()
    matching.add("out", *(np.array(rows, np.float64).reshape(-1, 7) for rows in (reference, other)))
    (result,) = matching.result()
    return result


def test_a_moved_box_is_found_again():
    moved = [0, 1, 0.8, 12, 10, 32, 30]  # 18 of 22 columns in common
    found = compared([FACE], [moved])
    assert (found.boxes, found.found, found.more) == (1, 1, 0)
    assert found.mean_iou == pytest.approx(18 / 22)
    assert found.score_difference == pytest.approx(0.1)
    assert str(found) == "1 of 1 boxes found again, mean IoU 0.82, scores differ by 0.100"


@pytest.mark.parametrize(
    "other",
    [
        [1, 1, 0.9, 10, 10, 30, 30],  # another picture
        [0, 2, 0.9, 10, 10, 30, 30],  # another class
        [0, 1, 0.2, 10, 10, 30, 30],  # hardly seen
        [0, 1, 0.9, 25, 10, 45, 30],  # beside it
    ],
)
def test_another_box_is_not_the_same(other):
    found = compared([FACE], [other])
    assert (found.boxes, found.found) == (1, 0)
    assert found.more == (other[2] > 0.5)
    assert found.share == 0


def test_one_box_is_found_once():
    found = compared([FACE, FACE], [FACE])
    assert (found.boxes, found.found, found.more) == (2, 1, 0)


def test_the_many_uncertain_boxes_do_not_count():
    found = compared([FACE, [0, 1, 0.49, 50, 50, 60, 60]], [FACE, [0, 1, 0.4, 70, 70, 80, 80]])
    assert (found.boxes, found.found, found.more) == (1, 1, 0)
    assert found.share == 1
    assert compared([], []).share == 1


boxes = st.lists(
    st.tuples(
        st.integers(0, 1), st.integers(0, 2), st.floats(0, 1), st.floats(0, 50), st.floats(0, 50), st.floats(1, 30),
        st.floats(1, 30),
    ).map(lambda row: [*row[:5], row[3] + row[5], row[4] + row[6]]),
    max_size=8,
)  # fmt: skip


@given(boxes, boxes, st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_order_of_rows_does_not_matter(reference, other, random):
    before = compared(reference, other)
    shuffled = sorted(other, key=lambda _: random.random())
    after = compared(reference, shuffled)
    assert (after.boxes, after.found, after.more) == (before.boxes, before.found, before.more)
    assert before.found <= before.boxes == sum(row[2] >= 0.5 for row in reference)
    assert before.found == 0 or 0.5 <= before.mean_iou <= 1


@given(boxes)
@settings(max_examples=60, deadline=None)
def test_every_box_is_found_in_itself(rows):
    found = compared(rows, rows)
    assert found.found == found.boxes
    assert found.more == 0
    assert found.score_difference == 0
    assert found.boxes == 0 or found.mean_iou == pytest.approx(1)


def test_the_usual_forms_are_recognized():
    row = np.array([[FACE]], np.float32)
    filler = np.array([[[[0, -1, -1, -1, -1, -1, -1]]]], np.float32)
    yolo = np.array([[[10, 10, 30, 30, 0.9, 1], [0] * 6]], np.float32)
    selected = np.array([[0, 10, 10, 30, 30, 1, 0.9]], np.float32)
    vision = {"b": yolo[0, :1, :4], "l": np.array([1]), "s": np.array([0.9], np.float32)}
    tensorflow = {"b": yolo[:, :1, :4], "s": np.array([[0.9]], np.float32), "c": np.array([[1.0]], np.float32)}
    for outputs in ({"o": row[None]}, {"o": row[0]}, {"o": yolo}, {"o": yolo[0]}, {"o": selected}, vision, tensorflow):
        (found,) = rows_of(outputs).values()
        np.testing.assert_allclose(found, [FACE], rtol=1e-6)
    assert rows_of({"o": filler})["o"].shape == (0, 7)
    features = {"scores": np.zeros((1, 10), np.float32), "map": np.zeros((1, 3, 5, 6), np.float32)}
    assert rows_of(features) == {}
    assert rows_of({"boxes": np.zeros((1, 4420, 4), np.float32), "scores": np.zeros((1, 4420, 2), np.float32)}) == {}
