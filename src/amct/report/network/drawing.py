"""Draws a network as SVG: boxes coloured by SQNR, lines coloured by the noise that they carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.printable import shortened
from amct.report.network.boxes import LARGEST_NETWORK
from amct.report.network.layout import layout
from amct.report.verdict import sqnr_class

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.report.network.boxes import Box, Network
    from amct.report.network.layout import Point

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
