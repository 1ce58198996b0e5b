"""Output of the commands: JSON, or text with aligned columns."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import typer

from amct.printable import LONGEST_LAYER_NAME, escaped, printable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def show(text: str, *, err: bool = False) -> None:
    """Print text for people, and a line end: to standard output, or to standard error."""
    typer.echo(printable(text), err=err)


def show_json(content: object) -> None:
    """Print content as JSON."""
    typer.echo(escaped(as_json(content)))


def as_json(content: object) -> str:
    """Return strict JSON; numbers that are not finite (such as the SQNR of equal outputs) become null."""
    return json.dumps(_finite(content), indent=2, allow_nan=False, ensure_ascii=False)


def _finite(content: object) -> object:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def comparison_row(compared: Any, what: str = "layer") -> dict[str, Any]:  # noqa: ANN401  a LayerComparison, which needs torch
    """Return the comparison of a layer or output as plain data; ``what`` is the key of its name."""
    return {what: compared.layer, "sqnr": compared.sqnr, "cosine": compared.cosine}


def most_harmed(rows: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the ``count`` rows with the lowest SQNR, the lowest first; rows without error are left out."""
    harmed = [row for row in rows if row["sqnr"] != math.inf]
    return sorted(harmed, key=lambda row: -math.inf if math.isnan(row["sqnr"]) else row["sqnr"])[:count]


def decibel(value: float) -> str:
    """Format an SQNR as ``31.4 dB``, or ``no error`` if it is infinite."""
    return "no error" if value == math.inf else f"{value:.1f} dB"


def short_name(name: str) -> str:
    """The name of a layer for a table or a line; JSON output has the whole name."""
    return escaped(shortened(name, LONGEST_LAYER_NAME)).replace("\n", "\\n")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns; a long name in the first one is shortened in the middle."""
    rows = [[short_name(row[0]), *(escaped(shortened(word)).replace("\n", "\\n") for word in row[1:])] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
