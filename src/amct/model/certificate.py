"""What a search for settings found: the certificate of its result, and the points of its curve, as plain data.

Both are in ``quant.json``, so that anyone can compute the bound of a certificate again.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  pydantic reads the annotations
from dataclasses import dataclass, field, replace
from typing import Any

from amct.model.verdict import Closed


@dataclass(frozen=True, kw_only=True)
class Certificate(Closed):
    """What is promised of a quantized model, measured on samples that its search has never used.

    Attributes:
        goal: What was asked for, such as "a drop of at most 0.5 points".
        limit: The largest mean loss of a sample that meets the goal.
        loss: The mean loss of the samples.
        bound: With this confidence, the mean loss of all data like these samples is not larger; None: nothing is known.
        confidence: Such as 0.95.
        error: The share of ``1 - confidence`` that this bound may use: other results were tried before this one.
        samples: How many samples.
        searched: How many other samples chose the settings.
        seed: Divides the samples among the two.
        smallest: The smallest loss that a sample can have.
        largest: The largest; None: there is no such number, and the bound is only about right.
        unit: A word for losses, such as "points", and the factor by which they are shown.
        factor: By which losses are multiplied for people.
        measured_on: What was run: the QDQ file or the simulation.
        remark: What the certificate cannot promise.
        losses: The loss of each sample in order, equal ones behind each other as one number with a count.
    """

    goal: str
    limit: float
    loss: float
    bound: float | None
    confidence: float
    error: float
    samples: int
    searched: int
    seed: int
    smallest: float = 0.0
    largest: float | None = None
    unit: str = "points"
    factor: float = 100.0
    measured_on: str = ""
    remark: str = ""
    losses: tuple[tuple[float, int], ...] = ()

    @property
    def met(self) -> bool:
        """Whether the loss of these samples meets the goal."""
        return self.loss <= self.limit + 1e-12

    @property
    def certified(self) -> bool:
        """Whether also the bound meets it."""
        return self.bound is not None and self.bound <= self.limit + 1e-12

    def __str__(self) -> str:
        text = f"{self.goal}: {self.shown(self.loss)}"
        if self.bound is not None:
            about = "" if self.largest is not None else "about "
            text += f", at most {about}{self.shown(self.bound)} with {self.confidence:.0%} confidence"
        if self.samples:
            text += f", {self.samples} samples never used in the search"
        verdict = "certified" if self.certified else "met, not certified" if self.met else "NOT met"
        return "; ".join(part for part in (f"{text}: {verdict}", self.remark) if part)

    def remarked(self, text: str) -> Certificate:
        """The same with one more thing that it cannot promise."""
        return replace(self, remark="; ".join(part for part in (self.remark, text) if part))

    def shown(self, loss: float) -> str:
        """A loss for people."""
        return f"{self.factor * loss:.2f} {self.unit}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Point(Closed):
    """A result that a search has tried: a point of the curve of accuracy against size.

    Attributes:
        number: Counts from 1, in the order in which they were tried.
        choices: By layer: what it became.
        cost: What was to be small.
        unit: Of the cost: bytes, bit operations or ms.
        bytes: The bytes of the weights of the layers that could be quantized, four bits as half a byte.
        milliseconds: The CPU time of a sample in the file when it was measured; None if it was not run then.
        noise: The noise that its layers add up to, as far as the scores of single layers tell.
        loss: Its mean loss on the samples of the search.
        samples: How many of them were enough.
        met: Whether this loss meets the goal.
        chosen: Whether it is the result.
        config: A full config that gives the same settings.
    """

    number: int
    choices: Mapping[str, str]
    cost: float
    noise: float
    loss: float
    samples: int
    met: bool
    chosen: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "bytes"
    bytes: float = 0.0
    milliseconds: float | None = field(default=None, compare=False)

    @property
    def summary(self) -> str:
        """How many layers became what: ``3 int4, 2 int8``."""
        counts: dict[str, int] = {}
        for choice in self.choices.values():
            counts[choice] = counts.get(choice, 0) + 1
        return ", ".join(f"{count} {choice}" for choice, count in sorted(counts.items()))


def run_lengths(losses: list[float]) -> tuple[tuple[float, int], ...]:
    """The losses with equal neighbours counted."""
    found: list[tuple[float, int]] = []
    for loss in losses:
        if found and found[-1][0] == loss:
            found[-1] = (loss, found[-1][1] + 1)
        else:
            found.append((loss, 1))
    return tuple(found)
