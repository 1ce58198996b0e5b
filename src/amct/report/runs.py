"""Compares several quantizations of one model, from their ``quant.json`` files: what changed, which layers gained."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from markupsafe import Markup

from amct import atomic
from amct.errors import ArgumentError
from amct.model.quant_json import read_quant_json
from amct.report.content import sqnr_class
from amct.report.filling import metric_figure
from amct.report.page import environment, resource, shown_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from amct.model.quant_json import QuantJson

LARGEST_DIFFERENCE = 2000
"""The maximum number of lines of a config difference."""
NOTICED = 0.05
"""Decibels; a smaller change counts as none."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a run: as text, its CSS class, and its gain over the first run in dB, where both are known."""

    text: str
    level: str = "unmeasured"
    gain: float | None = None

    @property
    def change(self) -> str:
        """The gain as text: ``+1.5``, or nothing if it is too small to notice."""
        return "" if self.gain is None or abs(self.gain) < NOTICED else f"{self.gain:+.1f}".replace("-", "−")

    @property
    def direction(self) -> str:
        """Whether the change is for the better or the worse: the CSS class, or nothing."""
        return ("better" if self.change.startswith("+") else "worse") if self.change else ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table: a name and one cell per run."""

    name: str
    cells: tuple[Cell, ...]

    @property
    def largest_gain(self) -> float:
        """The largest change of any run, by size."""
        return max((abs(cell.gain) for cell in self.cells if cell.gain is not None), default=-1.0)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The content of the page.

    Attributes:
        names: A short name of each run.
        summary: Metric, outputs, sizes and speeds.
        layers: The SQNR of each layer, the largest change first.
        differences: For each run but the first: what changed in its config, in the form of ``diff``.
        kept_float: The layers that not all runs quantize; cells say "quantized", or the reason why not.
        not_judged: Why no number is called better or worse than another; empty: they are of the same data.
    """

    names: tuple[str, ...]
    summary: tuple[Row, ...]
    layers: tuple[Row, ...]
    differences: tuple[tuple[str, str], ...]
    kept_float: tuple[Row, ...]
    not_judged: str = ""

    @property
    def gained(self) -> int:
        """How many layers are better in the last run than in the first."""
        return sum(row.cells[-1].direction == "better" for row in self.layers)

    @property
    def lost(self) -> int:
        """How many layers are worse."""
        return sum(row.cells[-1].direction == "worse" for row in self.layers)


def write_runs_page(path: str | os.PathLike[str], documents: Sequence[str | os.PathLike[str]]) -> Runs:
    """Write the comparison of several ``quant.json`` files as one HTML file; returns its content.

    Raises:
        ArgumentError: There are fewer than two files, or they have no layer in common.
        FileError, ParseError: A file cannot be read, or the page cannot be written.
    """
    content = compare_runs([Path(document) for document in documents])
    template = environment().from_string(resource("runs.html.j2"))
    atomic.write_text(path, template.render(runs=content, style=Markup(resource("page.css"))))  # our own file
    return content


def compare_runs(paths: Sequence[Path]) -> Runs:
    """Read the files and line up their numbers; errors as ``write_runs_page``."""
    if len(paths) < 2:
        raise ArgumentError(f"expected two or more quant.json files to compare, got {len(paths)}")
    documents = [read_quant_json(path) for path in paths]
    names = _short_names(paths)
    # a model that was only pruned has all its layers among the skipped ones
    common = set.intersection(
        *({*document.layers, *(skip.layer for skip in document.skipped)} for document in documents)
    )
    if not common:
        raise ArgumentError(f"{paths[0]} and {paths[1]} have no layer in common: are they of the same model?")
    layers = list(dict.fromkeys(name for document in documents for name in document.layers))
    data = list(dict.fromkeys(document.measured.on for document in documents if document.measured is not None))
    cells_of = partial(_sqnr_cells, judged=len(data) < 2)
    rows = [Row(name=name, cells=cells_of([_layer(document, name) for document in documents])) for name in layers]
    return Runs(
        names=names,
        summary=tuple(_summary(documents, cells_of)),
        layers=tuple(sorted(rows, key=lambda row: -row.largest_gain)),
        differences=tuple(
            (name, _difference(documents[0].config, document.config))
            for name, document in zip(names[1:], documents[1:], strict=True)
        ),
        kept_float=tuple(_kept_float(documents, layers)),
        not_judged=f"measured on different data: {', '.join(data)}" if len(data) > 1 else "",
    )


def _short_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """The prefixes of the files, with their folder if prefixes repeat."""
    prefixes = [path.name.removesuffix("quant.json").rstrip("_") for path in paths]
    if all(prefixes) and len(set(prefixes)) == len(prefixes):
        return tuple(prefixes)
    return tuple(str(path.parent / prefix) for path, prefix in zip(paths, prefixes, strict=True))


_NO_ERROR = 999.0  # an SQNR that every other one is below


def _layer(document: QuantJson, name: str) -> float | None:
    """The SQNR of a layer; None if it was not measured."""
    if document.measured is None or name not in document.measured.layers:
        return None
    sqnr = document.measured.layers[name]
    return _NO_ERROR if sqnr is None else sqnr


def _sqnr_cells(values: Sequence[float | None], *, judged: bool) -> tuple[Cell, ...]:
    first = values[0] if judged else None
    return tuple(
        Cell(
            text="–" if value is None else "no error" if value == _NO_ERROR else f"{value:.1f} dB",
            level=sqnr_class(value),
            gain=value - first if place and _is_number(value) and _is_number(first) else None,
        )
        for place, value in enumerate(values)
    )


def _is_number(sqnr: float | None) -> TypeGuard[float]:
    return sqnr is not None and sqnr != _NO_ERROR


def _summary(
    documents: Sequence[QuantJson], cells_of: Callable[[Sequence[float | None]], tuple[Cell, ...]]
) -> list[Row]:
    metrics = [document.measured.metric if document.measured else None for document in documents]
    rows = []
    if any(metrics):
        cells = []
        for metric in metrics:
            figure = metric_figure(metric.name, metric.float_model, metric.quantized) if metric else None
            cells.append(Cell(text=f"{figure.before} → {figure.after} ({figure.change})" if figure else "–"))
        rows.append(Row(name=next(metric.name for metric in metrics if metric), cells=tuple(cells)))
    outputs = list(dict.fromkeys(name for each in documents if each.measured for name in each.measured.outputs))
    for output in outputs:
        found = [_NO_ERROR if (sqnr := _output(each, output)) is None else sqnr for each in documents]
        known = [output in each.measured.outputs if each.measured else False for each in documents]
        values = [value if is_known else None for value, is_known in zip(found, known, strict=True)]
        rows.append(Row(name=f"SQNR of {output}", cells=cells_of(values)))
    detectors = list(dict.fromkeys(box.output for each in documents if each.measured for box in each.measured.boxes))
    rows += [
        Row(name=f"boxes of {output}", cells=tuple(Cell(text=_boxes(each, output)) for each in documents))
        for output in detectors
    ]
    rows.append(Row(name="measured of", cells=tuple(Cell(text=_measured(document)) for document in documents)))
    forms = dict.fromkeys(entry.format for each in documents for entry in each.files.values() if entry.check)
    rows += [
        Row(name=f"{form} file", cells=tuple(Cell(text=_file(each, form)) for each in documents)) for form in forms
    ]
    quantized = [sum(entry.quantized for entry in document.layers.values()) for document in documents]
    rows.append(Row(name="quantized layers", cells=tuple(Cell(text=str(count)) for count in quantized)))
    return rows


def _output(document: QuantJson, name: str) -> float | None:
    return document.measured.outputs.get(name) if document.measured else None


def _boxes(document: QuantJson, output: str) -> str:
    found = document.measured.boxes if document.measured else ()
    return next((str(each) for each in found if each.output == output), "–")


def _measured(document: QuantJson) -> str:
    if document.measured is None:
        return "not measured: quantize again, or write a report"
    return f"{document.measured.of}, {document.measured.on}"


def _file(document: QuantJson, form: str) -> str:
    entry = next((entry for entry in document.files.values() if entry.format == form), None)
    if entry is None:
        return "–"
    return ", ".join(filter(None, [shown_bytes(entry.size), entry.check.text() if entry.check else ""]))


def _difference(before: str, after: str) -> str:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
    shown = [line for line in lines if not line.startswith("@@")][:LARGEST_DIFFERENCE]
    return "\n".join(shown)


def _kept_float(documents: Sequence[QuantJson], layers: Sequence[str]) -> list[Row]:
    reasons = [{skip.layer: skip.reason for skip in document.skipped} for document in documents]
    rows = []
    for name in dict.fromkeys([*layers, *(name for each in reasons for name in each)]):
        texts = [
            "quantized" if name in document.layers and document.layers[name].quantized else why.get(name, "–")
            for document, why in zip(documents, reasons, strict=True)
        ]
        if len(set(texts)) > 1:
            rows.append(Row(name=name, cells=tuple(Cell(text=text) for text in texts)))
    return rows
