"""The network as a graph of boxes: placed in rows, drawn, and read from ONNX.

Places the boxes of a network in rows from top to bottom, and the lines between them.

The row of a box is one below the lowest row that feeds it. Inside a row boxes are ordered by the mean place of what
feeds them (the barycentre rule of Sugiyama's method), which avoids most crossings. A line over several rows gets a
narrow place of its own in each of them, so that it passes beside the boxes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from amct.model.operators import PICTURE_CHEAP, RANDOM
from amct.printable import shortened
from amct.report.content import sqnr_class

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from onnx import ModelProto, NodeProto

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


# -- Boxes and what feeds what: the framework-independent form of a network in a report --------------------------------


LARGEST_NETWORK = 4000
"""The maximum number of boxes that are drawn."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """One operation, or a layer with the cheap operations behind it.

    Attributes:
        name: Its name in the model.
        type: Its operator or layer type.
        inputs: The boxes that feed it, by their index; each is smaller than its own.
        layer: The quantized layer that it computes; None for any other operation.
        integer: Whether its result is rounded to integers in the quantized model.
        merged: The types of the operations that were merged into it.
    """

    name: str
    type: str
    inputs: tuple[int, ...] = ()
    layer: str | None = None
    integer: bool = False
    merged: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Network:
    """The boxes of a network in execution order."""

    boxes: tuple[Box, ...]


def merged_chains(boxes: list[Box], cheap: frozenset[str]) -> Network:
    """Merge operations of a ``cheap`` type with one input into the box that feeds them, if nobody else reads that.

    A network then has about as many boxes as a person would draw.
    """
    readers = [0] * len(boxes)
    for box in boxes:
        for source in box.inputs:
            readers[source] += 1
    kept: list[Box] = []
    place: list[int] = []
    for box in boxes:
        sources = tuple(dict.fromkeys(place[source] for source in box.inputs))
        if len(box.inputs) == 1 and box.layer is None and box.type in cheap and readers[box.inputs[0]] == 1:
            (target,) = sources
            kept[target] = replace(
                kept[target], merged=(*kept[target].merged, box.type), integer=kept[target].integer or box.integer
            )
            place.append(target)
            continue
        place.append(len(kept))
        kept.append(replace(box, inputs=sources))
    return Network(boxes=tuple(kept))


# -- Draws a network as SVG: boxes coloured by SQNR, lines coloured by the noise that they carry -----------------------


_LABEL, _SMALL_LABEL = 21, 26
"""The maximum number of characters in a box, in the first and the second line."""


@dataclass(frozen=True, kw_only=True)
class DrawnBox:
    """A box for the template: place, texts, CSS classes, and the index of its layer in the report or None."""

    x: float
    y: float
    label: str
    note: str
    title: str
    classes: str
    index: int | None


@dataclass(frozen=True, kw_only=True)
class DrawnLine:
    """A line for the template: its SVG path and its CSS class."""

    path: str
    classes: str


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A network for the template."""

    width: float
    height: float
    boxes: list[DrawnBox]
    lines: list[DrawnLine]


def drawing(network: Network | None, layers: Mapping[str, tuple[int, float | None]]) -> Drawing | None:
    """Place and colour the boxes of a network; None without a network, or with one too large to be of use.

    Args:
        network: The network.
        layers: By quantized layer: its index in the report and its SQNR.
    """
    if network is None or not 1 < len(network.boxes) <= LARGEST_NETWORK:
        return None
    placed = layout([box.inputs for box in network.boxes])
    noise: list[float | None] = []
    boxes = []
    for box, (x, y) in zip(network.boxes, placed.boxes, strict=True):
        index, own = layers.get(box.layer or "", (None, None))
        carried = [each for source in box.inputs if (each := noise[source]) is not None]
        noise.append(own if own is not None else min(carried, default=None))
        boxes.append(_drawn(box, x, y, index, own))
    lines = [
        DrawnLine(path=_path(points), classes=sqnr_class(noise[source])) for (source, _), points in placed.lines.items()
    ]
    return Drawing(width=placed.width, height=placed.height, boxes=boxes, lines=lines)


def _drawn(box: Box, x: float, y: float, index: int | None, sqnr: float | None) -> DrawnBox:
    region = "integer" if box.integer else "float"
    behind = " + ".join([box.type, *box.merged])
    measured = f"{sqnr:.1f} dB" if sqnr is not None else ""
    return DrawnBox(
        x=round(x, 1),
        y=round(y, 1),
        label=_fitting(box.name, _LABEL),
        note=_fitting(f"{measured} · {behind}" if measured else behind, _SMALL_LABEL, middle=False),
        title="\n".join(filter(None, [shortened(box.name), behind, region, measured and f"SQNR {measured}"])),
        classes=f"{region} {sqnr_class(sqnr)}",
        index=index,
    )


def _fitting(text: str, longest: int, *, middle: bool = True) -> str:
    if len(text) <= longest:
        return text
    kept = (longest - 1) // 2
    return f"{text[:kept]}…{text[-kept:]}" if middle else f"{text[: longest - 1]}…"


def _path(points: list[Point]) -> str:
    """A smooth path: between two rows a curve that leaves and arrives vertically, along a row a straight line."""
    (x, y), *rest = points
    parts = [f"M{x:.0f} {y:.0f}"]
    for next_x, next_y in rest:
        if next_x == x:
            parts.append(f"V{next_y:.0f}")
        else:
            middle = (y + next_y) / 2
            parts.append(f"C{x:.0f} {middle:.0f} {next_x:.0f} {middle:.0f} {next_x:.0f} {next_y:.0f}")
        x, y = next_x, next_y
    return "".join(parts)


# -- Reads the boxes of a network from its float ONNX model, whose nodes are named after their layers ------------------


_REPEATED = "@"  # the second call of a layer is the node "conv@1"


def onnx_network(model: ModelProto, layers: Collection[str], integer_tensors: Collection[str] = ()) -> Network:
    """Return the network of an ONNX model; constants are left out.

    Args:
        model: The float model.
        layers: The quantized layers: the names of their nodes.
        integer_tensors: The tensors that are rounded to integers in the quantized model.
    """
    inputs = [value.name for value in model.graph.input]
    maker = {name: index for index, name in enumerate(inputs)}
    boxes = [Box(name=name, type="input", integer=name in integer_tensors) for name in inputs]
    for node in model.graph.node:
        sources = tuple(dict.fromkeys(maker[name] for name in _read(node) if name in maker))
        if not sources and node.op_type not in RANDOM:
            continue  # computed from constants only
        maker.update({name: len(boxes) for name in node.output})
        layer = node.name.partition(_REPEATED)[0] if node.name not in layers else node.name
        boxes.append(
            Box(
                name=node.name or node.op_type,
                type=node.op_type,
                inputs=sources,
                layer=layer if layer in layers else None,
                integer=layer in layers or any(name in integer_tensors for name in node.output),
            )
        )
    return merged_chains(boxes, PICTURE_CHEAP)


def _read(node: NodeProto) -> list[str]:
    """The tensors that a node reads, also inside its branches and loop bodies."""
    names = list(node.input)
    for attribute in node.attribute:
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            names += [name for each in inner.node for name in _read(each)]
    return names
