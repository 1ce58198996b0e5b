"""Places the boxes of a network in rows from top to bottom, and the lines between them.

The row of a box is one below the lowest row that feeds it. Inside a row boxes are ordered by the mean place of what
feeds them (the barycentre rule of Sugiyama's method), which avoids most crossings. A line over several rows gets a
narrow place of its own in each of them, so that it passes beside the boxes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BOX_WIDTH, BOX_HEIGHT = 168.0, 34.0
ROW_HEIGHT = 58.0
GAP = 18.0
LINE_WIDTH = 10.0
MARGIN = 14.0
SWEEPS = 3
MOST_PASSING = 30_000
"""If lines would need more places than this in the rows they pass, they are drawn straight."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """Where everything is.

    Attributes:
        boxes: The upper left corner of each box.
        lines: By (from, to): the points of the line, from the bottom of one box to the top of the other.
        width: Of the whole picture.
        height: Of the whole picture.
    """

    boxes: list[Point]
    lines: dict[tuple[int, int], list[Point]]
    width: float
    height: float


def layout(inputs: Sequence[Sequence[int]]) -> Layout:
    """Place boxes; ``inputs`` has for each box the boxes that feed it, all of them earlier."""
    row = _rows(inputs)
    chains, places_in_row, feeds = _with_passing_lines(inputs, row)
    centre = _centres(places_in_row, feeds, len(inputs))
    left = min((centre[place] - _half(place, len(inputs)) for place in centre), default=0.0)
    shift = MARGIN - left
    top = [MARGIN + ROW_HEIGHT * number for number in range(len(places_in_row))]
    boxes = [(centre[box] + shift - BOX_WIDTH / 2, top[row[box]]) for box in range(len(inputs))]
    lines = {}
    for (source, target), passing in chains.items():
        points = [(centre[source] + shift, top[row[source]] + BOX_HEIGHT)]
        for offset, place in enumerate(passing, row[source] + 1):
            points += [(centre[place] + shift, top[offset]), (centre[place] + shift, top[offset] + BOX_HEIGHT)]
        lines[source, target] = [*points, (centre[target] + shift, top[row[target]])]
    width = max((centre[place] + _half(place, len(inputs)) for place in centre), default=0.0) + shift + MARGIN
    return Layout(boxes, lines, width, MARGIN * 2 + ROW_HEIGHT * len(top))


def _rows(inputs: Sequence[Sequence[int]]) -> list[int]:
    row: list[int] = []
    for sources in inputs:
        row.append(1 + max((row[source] for source in sources), default=-1))
    return row


def _with_passing_lines(
    inputs: Sequence[Sequence[int]], row: list[int]
) -> tuple[dict[tuple[int, int], list[int]], list[list[int]], dict[int, list[int]]]:
    """Give long lines a place in each row they pass; returns those, the places of each row, and what feeds a place.

    A place is a box by its index, or a higher number for a line that passes.
    """
    places: list[list[int]] = [[] for _ in range(max(row, default=-1) + 1)]
    for box, number in enumerate(row):
        places[number].append(box)
    spans = sum(row[target] - row[source] - 1 for target, sources in enumerate(inputs) for source in sources)
    chains: dict[tuple[int, int], list[int]] = {}
    feeds: dict[int, list[int]] = defaultdict(list)
    following = len(inputs)
    for target, sources in enumerate(inputs):
        for source in sources:
            passing = []
            before = source
            for number in range(row[source] + 1, row[target]) if spans <= MOST_PASSING else ():
                places[number].append(following)
                feeds[following] = [before]
                passing.append(following)
                before, following = following, following + 1
            feeds[target].append(before)
            chains[source, target] = passing
    return chains, places, feeds


def _centres(rows: list[list[int]], feeds: dict[int, list[int]], boxes: int) -> dict[int, float]:
    """The horizontal centre of every place: near what feeds it, or on later sweeps near all its neighbours."""
    neighbours: dict[int, list[int]] = defaultdict(list)
    for place, sources in feeds.items():
        for source in sources:
            neighbours[source].append(place)
            neighbours[place].append(source)
    centre: dict[int, float] = {}
    for row in rows:
        _place_row(row, {place: _mean(feeds.get(place, []), centre) for place in row}, centre, boxes)
    for sweep in range(SWEEPS):
        for row in reversed(rows) if sweep % 2 == 0 else rows:
            _place_row(row, {place: _mean(neighbours[place], centre) for place in row}, centre, boxes)
    return centre


def _mean(places: list[int], centre: dict[int, float]) -> float:
    known = [centre[place] for place in places if place in centre]
    return sum(known) / len(known) if known else 0.0


def _place_row(row: list[int], wanted: dict[int, float], centre: dict[int, float], boxes: int) -> None:
    """Set the centres of a row: in the order of the wanted ones, without overlap, shifted by the mean of the excess."""
    row.sort(key=wanted.__getitem__)
    edge = float("-inf")
    for place in row:
        centre[place] = max(wanted[place], edge + _half(place, boxes))
        edge = centre[place] + _half(place, boxes) + GAP
    excess = sum(centre[place] - wanted[place] for place in row) / max(len(row), 1)
    for place in row:
        centre[place] -= excess


def _half(place: int, boxes: int) -> float:
    return (BOX_WIDTH if place < boxes else LINE_WIDTH) / 2
