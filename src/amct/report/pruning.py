"""Makes the content of a report on a pruned model."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from amct.report.content import Figure, LayerNote, PrunedLayer, ReportContent
from amct.report.filling import file_sizes, program_versions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from amct.model import Skip

Pair = tuple[float, float]
"""A number before and after pruning."""


def count_text(number: float) -> str:
    """A count for people: ``1.23 M``.

    >>> count_text(40_900_000), count_text(512), count_text(2_100_000_000)
    ('40.9 M', '512', '2.1 G')
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f}"


@dataclass(frozen=True, kw_only=True)
class PruningNumbers:
    """What was measured before and after pruning.

    Attributes:
        parameters: The numbers of parameters.
        macs: The multiply-accumulate operations.
        seconds: The times of one run in onnxruntime; None: not measured.
        metric: The name of a metric and its values; None: not measured.
    """

    parameters: Pair
    macs: Pair
    seconds: Pair | None = None
    metric: tuple[str, float, float] | None = None


def pruning_content(
    model: str,
    channels: Mapping[str, tuple[int, int]],
    skipped: Iterable[Skip],
    numbers: PruningNumbers,
    *,
    files: Sequence[Path] = (),
    config: str = "",
    counted: str = "channels",
) -> ReportContent:
    """Return the content of a report on a pruned model.

    Args:
        model: The model's name.
        channels: The numbers of channels of every layer that makes some, before and after.
        skipped: The layers that were not pruned, with reasons.
        numbers: What was measured.
        files: Files whose sizes are listed.
        config: The settings, as text.
        counted: What ``channels`` counts.

    Raises:
        FileError: One of the files cannot be read.
    """
    metric = numbers.metric
    figures = [] if metric is None else [_figure(metric[0], f"{metric[1]:.4g}", f"{metric[2]:.4g}")]
    figures.append(_figure("parameters", *map(count_text, numbers.parameters)))
    figures.append(_figure("multiply-accumulate operations", *map(count_text, numbers.macs)))
    if numbers.seconds is not None:
        figures.append(_figure("onnxruntime", *(f"{1000 * each:.3g} ms" for each in numbers.seconds)))
    return ReportContent(
        model=model,
        kind="Pruning report" if counted == "channels" else "Decomposition report",
        counted=counted,
        measured_on="the example input",
        figures=tuple(figures),
        files=file_sizes(files),
        pruned=tuple(PrunedLayer(layer=name, before=a, after=b) for name, (a, b) in channels.items()),
        skipped=tuple(LayerNote(layer=skip.layer, text=skip.reason) for skip in skipped),
        config=config,
        versions=program_versions(),
        created=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def _figure(label: str, before: str, after: str) -> Figure:
    return Figure(label=label, before=before, after=after)
