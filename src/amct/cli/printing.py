"""What commands print of a comparison: JSON for programs, aligned lines for people."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]


def as_json(content: object) -> str:
    """Strict JSON; a number that is not finite (the SQNR of equal outputs) becomes null."""
    return json.dumps(_finite(content), indent=2, allow_nan=False, ensure_ascii=False)


def _finite(content: object) -> object:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def comparison_row(compared: Any, what: str = "layer") -> dict[str, Any]:  # noqa: ANN401  a LayerComparison, which needs torch
    """The comparison of a layer (or of ``what`` else) as plain data."""
    return {what: compared.layer, "sqnr": compared.sqnr, "cosine": compared.cosine}


def most_harmed(rows: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The rows with the lowest SQNR, the worst first, without layers that have no error."""
    harmed = [row for row in rows if row["sqnr"] != math.inf]
    return sorted(harmed, key=lambda row: -math.inf if math.isnan(row["sqnr"]) else row["sqnr"])[:count]


def decibel(value: float) -> str:
    """``31.4 dB``, or that nothing was lost."""
    return "no error" if value == math.inf else f"{value:.1f} dB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
