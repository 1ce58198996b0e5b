"""Judges a quantized model by one rule, wherever a judgement is shown: Good, Acceptable, Poor or Broken.

A judgement rests on a metric where there is one, otherwise on the signal-to-quantization-noise ratio of the outputs,
and of a detector on the boxes that are found again.
``RULE`` is the rule in words; the report shows it beside its verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amct.numerics.similarity import BoxComparison

Level = Literal["good", "acceptable", "poor", "broken"]
LEVELS: tuple[Level, ...] = ("good", "acceptable", "poor", "broken")
"""From the best to the worst."""

LARGEST_LOSS = (0.01, 0.025, 0.05)
"""Of the metric, as share of its value in the float model: of good, acceptable and poor."""
LEAST_SQNR = (20.0, 15.0, 10.0)
"""Of an output in dB: of good, acceptable and poor. 20 dB: the error has a tenth of the signal's amplitude."""
LEAST_SHARE = (0.95, 0.9, 0.8)
"""Of the boxes of both models together, those that both find: of good, acceptable and poor."""
NOISY_LAYER = 10.0
HANDED_IN = "the float model that was handed in"
"""What a model that was trained with quantizers is judged by, not by its trained weights without them."""
NOT_JUDGED = "not judged: no output could be compared"
_NAMES_SHOWN = 3

RULE = (
    f"Good: the metric falls by at most {LARGEST_LOSS[0]:.0%} of its value (without a metric: every output has an SQNR "
    f"of at least {LEAST_SQNR[0]:.0f} dB), and no measured layer is below {NOISY_LAYER:.0f} dB. Acceptable: by at most "
    f"{LARGEST_LOSS[1]:.1%} (at least {LEAST_SQNR[1]:.0f} dB). Poor: by at most {LARGEST_LOSS[2]:.0%} (at least "
    f"{LEAST_SQNR[2]:.0f} dB). Broken: by more, or an output is not a number. A higher metric is taken as better. Of a "
    f"detector both models together find boxes, and both have {LEAST_SHARE[0]:.0%} ({LEAST_SHARE[1]:.0%}, "
    f"{LEAST_SHARE[2]:.0%}) of them; one lost box alone is acceptable."
)


class Closed:
    """Base of what ``quant.json`` holds: values of other types and unknown fields are refused when it is read."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}  # read with pydantic, not needed before


@dataclass(frozen=True, kw_only=True)
class Verdict(Closed):
    """The judgement of a quantized model.

    Attributes:
        level: The judgement.
        reasons: What it rests on.
        of: What was judged: the name of a file, or the simulation; empty where the context says it.
    """

    level: Level
    reasons: tuple[str, ...] = ()
    of: str = ""

    @property
    def title(self) -> str:
        """The judgement in one word."""
        return self.level.capitalize()

    def __str__(self) -> str:
        """The judgement on one line: ``Good: the output's SQNR is 34.2 dB (net_qdq_model.onnx)``."""
        return f"{self.title}: {'; '.join(self.reasons)}" + (f" ({self.of})" if self.of else "")

    def is_at_best(self, level: Level) -> bool:
        """Whether the judgement is this one or a worse one."""
        return LEVELS.index(self.level) >= LEVELS.index(level)


def worst_of(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The worst of several judgements, the first of equal ones; None if there is none."""
    return max(verdicts, key=lambda verdict: LEVELS.index(verdict.level), default=None)


def judge(
    outputs: Sequence[float],
    metric: tuple[float, float] | None = None,
    layers: Iterable[tuple[str, float | None]] = (),
    boxes: Iterable[BoxComparison] = (),
) -> Verdict | None:
    """Judge a quantized model by ``RULE``; None if nothing was measured that it can be judged by.

    Args:
        outputs: The SQNR of each output in dB; infinite for one without error.
        metric: Of the float and of the quantized model.
        layers: The SQNR of each quantized layer.
        boxes: What became of the boxes of a detector.
    """
    found = [] if metric is None else [_by_metric(*metric)]
    if metric is None:
        found += [_by_boxes(each) for each in boxes if each.boxes + each.more]
    if any(math.isnan(sqnr) for sqnr in outputs):
        found.append(Verdict(level="broken", reasons=("an output is not a number",)))
    elif metric is None and outputs:
        found.append(_by_sqnr(min(outputs)))
    if not found:
        return None
    noisy = [name for name, sqnr in layers if sqnr is not None and not sqnr >= NOISY_LAYER]
    if noisy:
        more = f" and {len(noisy) - _NAMES_SHOWN} more" if len(noisy) > _NAMES_SHOWN else ""
        text = f"below {NOISY_LAYER:.0f} dB: {', '.join(noisy[:_NAMES_SHOWN])}{more}"
        found.append(Verdict(level="acceptable", reasons=(text,)))
    worst = worst_of(found)
    assert worst is not None
    return replace(worst, reasons=tuple(reason for each in found for reason in each.reasons))


def _by_metric(before: float, after: float) -> Verdict:
    loss = (before - after) / abs(before) if before else float(after < before)
    if not math.isfinite(loss):
        return Verdict(level="broken", reasons=("the metric is not a number",))
    level = LEVELS[sum(loss > limit for limit in LARGEST_LOSS)]
    return Verdict(
        level=level, reasons=(f"the metric loses {loss:.2%} of its value" if loss > 0 else "the metric loses nothing",)
    )


def _by_boxes(found: BoxComparison) -> Verdict:
    level = LEVELS[sum(found.share < limit for limit in LEAST_SHARE)]
    if found.boxes - found.found + found.more == 1 and found.found:
        level = min(level, "acceptable", key=LEVELS.index)
    return Verdict(level=level, reasons=(str(found),))


def _by_sqnr(sqnr: float) -> Verdict:
    level = LEVELS[sum(sqnr < limit for limit in LEAST_SQNR)]
    return Verdict(
        level=level,
        reasons=("the outputs are equal" if sqnr == math.inf else f"the output's SQNR is {sqnr:.1f} dB",),
    )
