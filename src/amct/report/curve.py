"""The plots of what a search has tried: the loss of each point against its size and its time, as SVG numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.model.certificate import Certificate, Point

LEFT, RIGHT, TOP, BOTTOM = 90.0, 620.0, 20.0, 240.0
MARGIN = 0.06
"""The free space beside the outermost points, as a share of the range."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point in a plot: where it is, its number, what it says, and whether it meets the goal and is the result."""

    x: float
    y: float
    number: int
    text: str
    met: bool
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot.

    Attributes:
        caption: What it shows.
        unit: Of the axis along, with the place and the text of its ticks.
        dots: The points, the result last.
        line: The points of a line through them, from left to right.
        columns: Ticks along.
        rows: Ticks upwards.
        goal: The height of the goal.
    """

    caption: str
    unit: str
    dots: tuple[Dot, ...]
    line: str
    columns: tuple[tuple[float, str], ...]
    rows: tuple[tuple[float, str], ...]
    goal: float


def plots(points: Sequence[Point], certificate: Certificate | None) -> list[Plot]:
    """The plots of a curve: against size, against the cost if that is something else, and against time if measured."""
    if certificate is None or not points:
        return []
    axes = [("size", "bytes of weights", [(point, point.bytes) for point in points])]
    if points[0].unit not in ("bytes", "ms"):
        axes.append((points[0].unit, points[0].unit, [(point, point.cost) for point in points]))
    timed = [(point, point.milliseconds) for point in points if point.milliseconds is not None]
    if timed:
        axes.append(("time", "ms of CPU for a sample when it was measured", timed))
    return [_plot(f"Loss against {name}", unit, found, certificate) for name, unit, found in axes]


def _plot(caption: str, unit: str, found: Sequence[tuple[Point, float]], certificate: Certificate) -> Plot:
    factor, limit = certificate.factor, certificate.limit * certificate.factor
    losses = [point.loss * factor for point, _ in found]
    along, up = _Axis([value for _, value in found], LEFT, RIGHT), _Axis([*losses, limit, 0.0], TOP, BOTTOM)
    dots = [
        Dot(
            x=along.place(value),
            y=up.place(loss),
            number=point.number,
            text=f"point {point.number}: {_short(value)} {unit}, {certificate.shown(point.loss)}, {point.summary}",
            met=point.met,
            chosen=point.chosen,
        )
        for (point, value), loss in zip(found, losses, strict=True)
    ]
    return Plot(
        caption=caption,
        unit=unit,
        dots=tuple(sorted(dots, key=lambda dot: dot.chosen)),
        line=" ".join(f"{dot.x:.1f},{dot.y:.1f}" for dot in sorted(dots, key=lambda dot: dot.x)),
        columns=along.ticks(),
        rows=up.ticks(),
        goal=up.place(limit),
    )


class _Axis:
    """Places numbers between two ends; both axes are as wide as their numbers need, so no loss is at the top."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        free = MARGIN * (high - low) or abs(high) * MARGIN or 1.0
        self._low, self._high, self._start, self._end = low - free, high + free, start, end

    def place(self, value: float) -> float:
        """Where a number is."""
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Round numbers, three to seven, with their places."""
        width = self._high - self._low
        power = 10.0 ** (len(f"{int(width)}") - 1) if width >= 1 else 1.0
        while power > width:
            power /= 10
        step = next(each * power for each in (*(one / 10 for one in _STEPS), *_STEPS) if width / (each * power) <= 5)
        first = int(self._low / step) - 1
        values = [step * index for index in range(first, first + 12)]
        return tuple((self.place(each), _short(each)) for each in values if self._low <= each <= self._high)


def _short(value: float) -> str:
    for power, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= power:
            return f"{value / power:.4g}{letter}"
    return f"{value:.3g}" if abs(value) > 1e-12 else "0"
