"""Renders a report as one self-contained HTML file, with styles, script and data inline.

The text and the tables are readable without JavaScript; the script sorts and filters the table and draws the charts of
the selected layer. Text from the model is escaped by jinja2 in the page and by ``embedded`` in the data block. The
content security policy allows only this script, and no network requests.

The page stays below ten megabytes for any model: numbers have four digits, and long lists are truncated with a note.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from amct import atomic
from amct.model.verdict import RULE
from amct.printable import counted, shortened
from amct.report.content import sqnr_class
from amct.report.curve import plots
from amct.report.network import LARGEST_NETWORK, drawing

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    from amct.report.content import InputContent, LayerContent, LayerNote, ReportContent, TrainingContent

LARGEST_LAYERS = 3000
LARGEST_NOTES = 2000
LARGEST_CONFIG = 200_000
LARGEST_TEXT = 200
"""The maximum number of characters of a name or a reason."""
LARGEST_INPUTS = 16
"""The maximum number of inputs shown per layer."""
RANGES_PER_LAYER = 512
RANGES_IN_ALL = 150_000
WORST_SHOWN = 10
GENERATOR = '<meta name="generator" content="amct">'
CURVE_POINTS = 320
"""The maximum number of points of the loss curve."""


def write_page(path: str | os.PathLike[str], content: ReportContent) -> None:
    """Write the report as one HTML file, atomically.

    Raises:
        FileError: The file cannot be written.
    """
    atomic.write_text(path, page(content))


def is_report(path: Path) -> bool:
    """Return whether a file is a page written by this package, judged by its first lines."""
    try:
        with path.open("rb") as file:
            return GENERATOR.encode() in file.read(2000)
    except OSError:
        return False


def page(content: ReportContent) -> str:
    """Return the report as the text of one HTML file."""
    places = {layer.name: (place, layer.sqnr) for place, layer in enumerate(content.layers[:LARGEST_LAYERS])}
    graph = drawing(content.network, places)
    content = bounded(content)
    script = resource("page.js")
    template = environment().from_string(resource("page.html.j2"))
    return template.render(
        report=content,
        worst=worst_layers(content.layers, [layer.sqnr for layer in content.layers]),
        causes=worst_layers(content.layers, [layer.alone for layer in content.layers]),
        rule=RULE,
        graph=graph,
        largest_network=LARGEST_NETWORK,
        curve=loss_curve(content.training.losses) if content.training is not None else "",
        plots=plots(content.curve, content.certificate),
        style=Markup(resource("page.css")),  # our own file
        script=Markup(script),  # our own file
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(embedded(content)),  # escaped by embedded()
    )


def bounded(content: ReportContent) -> ReportContent:
    """Return the report with names, lists and the config truncated to the limits above, with notes about omissions."""
    layers = content.layers[:LARGEST_LAYERS]
    ranges = max(1, min(RANGES_PER_LAYER, RANGES_IN_ALL // max(len(layers), 1)))
    return replace(
        content,
        model=_short(content.model),
        layers=tuple(_bounded_layer(layer, ranges) for layer in layers),
        fused=_bounded_notes(content.fused),
        skipped=_bounded_notes(content.skipped),
        pruned=tuple(replace(each, layer=_short(each.layer)) for each in content.pruned[:LARGEST_LAYERS]),
        config=_short(content.config, LARGEST_CONFIG),
        measured_on=content.measured_on + _left_out(len(content.layers), LARGEST_LAYERS, "layers"),
        training=_bounded_training(content.training),
    )


def _bounded_layer(layer: LayerContent, ranges: int) -> LayerContent:
    return replace(
        layer,
        name=_short_name(layer.name),
        type=_short(layer.type),
        inputs=layer.inputs[:LARGEST_INPUTS],
        weights=layer.weights.joined(ranges) if layer.weights is not None else None,
    )


def _bounded_training(training: TrainingContent | None) -> TrainingContent | None:
    if training is None:
        return None
    clips = (replace(each, layer=_short(each.layer)) for each in training.clips[:LARGEST_LAYERS])
    return replace(training, clips=tuple(clips))


def _bounded_notes(notes: tuple[LayerNote, ...]) -> tuple[LayerNote, ...]:
    kept = tuple(replace(note, layer=_short_name(note.layer), text=_short(note.text)) for note in notes[:LARGEST_NOTES])
    rest = _left_out(len(notes), LARGEST_NOTES, "entries")
    return (*kept, replace(kept[-1], layer="…", text=rest.removeprefix("; "))) if rest else kept


def _left_out(number: int, limit: int, what: str) -> str:
    return f"; {number - limit} of {number} {what} are not shown" if number > limit else ""


def _short(text: str, limit: int = LARGEST_TEXT) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _short_name(name: str) -> str:
    return shortened(name, LARGEST_TEXT)


@dataclass(frozen=True, kw_only=True)
class WorstLayer:
    """One bar of the chart of the worst layers.

    Attributes:
        index: The layer's index in the report.
        name: Its name.
        sqnr: The SQNR of its output in dB, or of the model's outputs when only this layer is quantized.
        error: The noise-to-signal amplitude ratio, at most 1.
        length: The length of the bar in percent.
    """

    index: int
    name: str
    sqnr: float
    error: float
    length: float


def worst_layers(
    layers: Sequence[LayerContent], ratios: Sequence[float | None], count: int = WORST_SHOWN
) -> list[WorstLayer]:
    """Return the ``count`` layers with the lowest of their ratios in dB; those without error are left out."""
    measured = [
        (sqnr if math.isfinite(sqnr) else -math.inf, index, layer)
        for index, (layer, sqnr) in enumerate(zip(layers, ratios, strict=True))
        if sqnr is not None and sqnr != math.inf
    ]
    measured.sort(key=lambda entry: entry[:2])
    worst = measured[:count]
    errors = [min(1.0, 10 ** (-sqnr / 20)) for sqnr, _, _ in worst]
    longest = max(errors, default=1.0)
    return [
        WorstLayer(index=index, name=layer.name, sqnr=sqnr, error=error, length=100 * error / longest)
        for (sqnr, index, layer), error in zip(worst, errors, strict=True)
    ]


def loss_curve(losses: tuple[float, ...]) -> str:
    """Return the points of an SVG line through the losses, or through means of them; "" if there is no curve."""
    run = -(-len(losses) // CURVE_POINTS)
    parts = [losses[start : start + run] for start in range(0, len(losses), max(run, 1))]
    finite = [[loss for loss in part if math.isfinite(loss)] for part in parts]
    means = [(place, sum(part) / len(part)) for place, part in enumerate(finite) if part]
    if len(means) < 2:
        return ""
    low, high = min(mean for _, mean in means), max(mean for _, mean in means)
    wide, tall = 640 / (len(parts) - 1), 150 / (high - low or 1)
    return " ".join(f"{place * wide:.1f},{155 - (mean - low) * tall:.1f}" for place, mean in means)


# -- the data block ----------------------------------------------------------------------------------------------------


def embedded(content: ReportContent) -> str:
    """Return the data of the charts as JSON, escaped for use inside a script element."""
    data = {"layers": [_layer_data(layer) for layer in content.layers]}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _layer_data(layer: LayerContent) -> dict[str, Any]:
    data: dict[str, Any] = {"name": layer.name, "inputs": [_input_data(each) for each in layer.inputs]}
    if layer.weights is not None:
        data["weights"] = {
            "min": [_number(value) for value in layer.weights.minimum],
            "max": [_number(value) for value in layer.weights.maximum],
            "each": layer.weights.channels_each,
        }
    return data


def _input_data(given: InputContent) -> dict[str, Any]:
    seen = given.activation
    if seen is None:
        return {}
    data: dict[str, Any] = {
        "seen": [_number(seen.minimum), _number(seen.maximum)],
        "clip": [_number(seen.clip_low), _number(seen.clip_high)],
    }
    if seen.histogram is not None:
        found = seen.histogram
        data["bars"] = {
            "low": _number(found.low),
            "high": _number(found.high),
            "counts": found.counts,
            "below": found.below,
            "above": found.above,
        }
    return data


def _number(value: float) -> float | None:
    """Round to four significant digits; None for infinity and NaN, which JSON does not have."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


# -- text of numbers ---------------------------------------------------------------------------------------------------


def _digits(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def _decibel(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.1f}" if math.isfinite(value) else ("∞" if value > 0 else "−∞")


def _cosine(value: float | None) -> str:
    return "–" if value is None else f"{value:.5f}"


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    percent = 100 * share
    return "0" if percent == 0 else ("< 0.001" if percent < 0.001 else f"{percent:.3g}" if percent < 100 else "100")


def _sort_key(value: float | None) -> str:
    """Format a sort key for the script: a number, "Infinity" or "-Infinity", or "" if not measured."""
    if value is None or math.isnan(value):
        return ""
    return repr(float(f"{value:.6g}")) if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def shown_bytes(size: int) -> str:
    """Format a size in bytes as MB, kB or B."""
    for unit, factor in (("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size} B"


@cache
def environment() -> Environment:
    """Return the environment of the templates, which escapes every name of the model."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        digits=_digits,
        decibel=_decibel,
        cosine=_cosine,
        percent=_percent,
        sort_key=_sort_key,
        bytes=shown_bytes,
        counted=counted,
    )
    environment.filters["sqnr_class"] = sqnr_class
    return environment


def resource(name: str) -> str:
    """Return the text of a template, style or script of this package."""
    return resources.files("amct.report").joinpath(name).read_text(encoding="utf-8")
