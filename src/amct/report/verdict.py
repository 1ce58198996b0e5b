"""Judges a quantized model by fixed thresholds: good, look here, or broken; and the colour classes of an SQNR.

The page shows ``RULE`` beside the verdict, so that nobody has to guess what it means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amct.numerics.similarity import LayerComparison

Level = Literal["good", "look", "broken"]
_ORDER: tuple[Level, ...] = ("good", "look", "broken")
_TITLES = {"good": "Good", "look": "Look here", "broken": "Broken"}

SMALL_LOSS, LARGE_LOSS = 0.01, 0.05
"""Of the metric, as share of its value in the float model."""
GOOD_OUTPUT, BROKEN_OUTPUT = 20.0, 10.0
"""SQNR of an output in dB; 20 dB: the error has a tenth of the signal's amplitude."""
NOISY_LAYER = 10.0
_NAMES_SHOWN = 3

RULE = (
    f"Good: the metric falls by at most {SMALL_LOSS:.0%} of its value (without a metric: every output has an SQNR of "
    f"at least {GOOD_OUTPUT:.0f} dB), and no layer is below {NOISY_LAYER:.0f} dB. Broken: the metric falls by more "
    f"than {LARGE_LOSS:.0%} (an output is below {BROKEN_OUTPUT:.0f} dB), or an output is not a number. Look here: all "
    "between. A higher metric is taken as better."
)

SQNR_STEPS = (10.0, 20.0, 30.0)
"""The thresholds between the colour classes 0 (worst) to 3."""


def sqnr_class(sqnr: float | None) -> str:
    """Return the CSS class of an SQNR: q0 (below 10 dB) to q3 (30 dB and more), "unmeasured" for None."""
    if sqnr is None:
        return "unmeasured"
    return f"q{sum(sqnr >= step for step in SQNR_STEPS)}"  # NaN is below every threshold


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of a report and what it rests on."""

    level: Level
    reasons: tuple[str, ...]

    @property
    def title(self) -> str:
        """The judgement in one or two words."""
        return _TITLES[self.level]


def verdict(
    metric: tuple[float, float] | None,
    outputs: Sequence[LayerComparison],
    layers: Iterable[tuple[str, float | None]],
) -> Verdict:
    """Judge a quantized model by ``RULE``.

    Args:
        metric: Of the float and of the quantized model; None if there is none.
        outputs: The comparison of the model's outputs.
        layers: The SQNR of each quantized layer.
    """
    found = [_of_metric(*metric) if metric is not None else _of_outputs(outputs)]
    if any(math.isnan(output.sqnr) for output in outputs):
        found.append(("broken", "an output is not a number"))
    noisy = [name for name, sqnr in layers if sqnr is not None and not sqnr >= NOISY_LAYER]
    if noisy:
        more = f" and {len(noisy) - _NAMES_SHOWN} more" if len(noisy) > _NAMES_SHOWN else ""
        found.append(("look", f"below {NOISY_LAYER:.0f} dB: {', '.join(noisy[:_NAMES_SHOWN])}{more}"))
    worst = max((level for level, _ in found), key=_ORDER.index)
    return Verdict(level=worst, reasons=tuple(reason for _, reason in found))


def _of_metric(before: float, after: float) -> tuple[Level, str]:
    loss = (before - after) / abs(before) if before else float(after < before)
    if not math.isfinite(loss):
        return "broken", "the metric is not a number"
    level: Level = "good" if loss <= SMALL_LOSS else "look" if loss <= LARGE_LOSS else "broken"
    return level, f"the metric loses {loss:.2%} of its value" if loss > 0 else "the metric loses nothing"


def _of_outputs(outputs: Sequence[LayerComparison]) -> tuple[Level, str]:
    if not outputs:
        return "look", "no output could be compared"
    worst = min(outputs, key=lambda output: -math.inf if math.isnan(output.sqnr) else output.sqnr)
    level: Level = "good" if worst.sqnr >= GOOD_OUTPUT else "look" if worst.sqnr >= BROKEN_OUTPUT else "broken"
    return level, "the outputs are equal" if worst.sqnr == math.inf else f"the output's SQNR is {worst.sqnr:.1f} dB"
