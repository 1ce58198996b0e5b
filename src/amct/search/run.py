"""The search: scores of single layers, the ladder of combinations, probes along it, and the certificate.

One calibration is enough for all of it. Every (layer, choice) is scored without labels: only this layer is quantized,
and the noise of the output is measured on some calibration samples. The ladder has the best combination for every
cost. Its cheapest rung is measured first; from then on the next rung is where the loss is expected to meet the goal,
between the cheapest one that does not meet it and the one of least cost that does.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from amct import log
from amct.calibration.ranks import fingerprint
from amct.interrupts import raise_if_interrupted
from amct.model.certificate import Point
from amct.pipeline.sensitivity import layer_sensitivity
from amct.printable import counted
from amct.search.choices import FLOAT, plan_with, planned
from amct.search.costs import Cost, bytes_of
from amct.search.judge import SHARES
from amct.search.ladder import Ladder, Option

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from amct.model.certificate import Certificate
    from amct.pipeline.quantized_model import QuantizedModel
    from amct.pipeline.weights import QuantizedWeights
    from amct.search.judge import Judge, Outcome

logger = logging.getLogger(__name__)

MOST_PROBES = 10
"""Candidates that are measured at most."""
NEAR = 0.003
"""The search ends when no rung between the best and the next cheaper one saves more than this share of the cost."""
AIM = 0.9
"""The share of the allowed loss that the next rung aims at: an estimate on samples may be too low."""
FASTER = 0.97
"""A file is faster than the float one if it takes at most this share of its time; smaller differences are noise."""
SAFER = 0.6
"""The noise of the next result to be certified, as a share of the one that failed, where no better one is known."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a search may take, and what it must prove.

    Attributes:
        minutes: It ends after so many minutes.
        evaluations: And after so many evaluations: samples scored, divided by all there are.
        certify: Whether the bound of the certificate must meet the goal, not only the measured loss.
        confidence: Of that bound.
    """

    minutes: float | None = None
    evaluations: float | None = None
    certify: bool = False
    confidence: float = 0.95


@dataclass
class Candidates:
    """The models that a search can make of a calibrated one.

    Attributes:
        base: The calibrated model, every layer with 8 bits.
        choices: What a layer may become.
        learned: Weights whose rounding is learned.
    """

    base: QuantizedModel
    choices: tuple[str, ...]
    learned: Mapping[str, QuantizedWeights] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.freedom = self.base.prepared.freedom()

    def possible(self, layer: str) -> list[str]:
        """What a layer may become; at least one of the choices."""
        plan = self.base.prepared.plan.find(layer)
        assert plan is not None
        found = [each for each in self.choices if planned(plan, each, self.freedom[layer]) is not None]
        found = [each for each in found if each != "adaround4" or layer in self.learned]
        return found or ["int8"]

    def made(self, choices: Mapping[str, str]) -> QuantizedModel:
        """The model with a choice for each layer."""
        return self.base.variant(plan_with(self.base.prepared.plan, choices, self.freedom), self.learned)

    def config(self, choices: Mapping[str, str]) -> dict[str, Any]:
        """A full config that gives the same settings."""
        prepared = self.base.prepared
        return prepared.config_of(plan_with(prepared.plan, choices, self.freedom))

    def noises(self) -> dict[str, dict[str, float]]:
        """By layer and choice: the noise of the output if only this layer is quantized, in units of the signal."""
        layers = self.base.layers
        found: dict[str, dict[str, float]] = {name: {FLOAT: 0.0} for name in layers}
        examples = [self.base.prepared.onnx_inputs(example) for example in self.base.examples]
        for choice in self.choices:
            own = [name for name in layers if choice in self.possible(name)]
            if choice == FLOAT or not own:
                continue
            model = self.made(dict.fromkeys(own, choice))
            prepared, qparams = model.prepared, model.qparams
            for each in layer_sensitivity(own, lambda names: prepared.with_only(qparams, names), examples):  # noqa: B023  called at once
                found[each.layer][choice] = 10 ** (-each.sqnr / 10)
        return found

    def ladder(self, costs: Callable[[str, str], float]) -> Ladder:
        """The best combinations; a choice that could not be scored counts as the worst one."""
        noises = self.noises()
        known = [value for own in noises.values() for value in own.values() if math.isfinite(value)]
        worst = max(known, default=0.0)
        options = {}
        for name in self.base.layers:
            options[name] = [
                Option(choice=choice, cost=costs(name, choice), noise=_finite(noises[name].get(choice, worst), worst))
                for choice in self.possible(name)
            ]
        return Ladder(options)


def _finite(noise: float, worst: float) -> float:
    return noise if math.isfinite(noise) else max(1.0, 10 * worst)


@dataclass
class _Tried:
    """A rung that was measured."""

    rung: int
    noise: float
    cost: float
    outcome: Outcome
    point: Point


class Search:
    """One search.

    Args:
        candidates: What can be made.
        judge: Measures it.
        limits: What it may take.
        cost: What is to be small; None: bytes.
        on_best: Called with each result that is better than those before, with its history and no certificate.
    """

    def __init__(
        self,
        candidates: Candidates,
        judge: Judge,
        limits: Limits,
        cost: Cost | None = None,
        on_best: Callable[[QuantizedModel], None] | None = None,
    ) -> None:
        self._candidates, self._judge, self._limits, self._on_best = candidates, judge, limits, on_best
        self._bytes = bytes_of(candidates)
        self._cost = cost or self._bytes
        self._begin = time.monotonic()
        self._tried: list[_Tried] = []
        self._ladder = Ladder({})

    def run(self) -> QuantizedModel:
        """The best model that was found, with its history and its certificate."""
        self._judge.prepare(self._candidates.base)
        self._ladder = self._candidates.ladder(self._cost.of)
        with log.bar("Searching", MOST_PROBES) as advance:
            rung: int | None = 0
            while rung is not None:
                raise_if_interrupted()
                self._probe(rung)
                advance(1, f"Searching: {self._progress()}")
                rung = self._next()
            self._probe_float()
        return self._finished()

    def _probe_float(self) -> None:
        """Measure the model without any quantized layer where its cost is known to be less than that of the best."""
        measured, candidates = self._cost.measured, self._candidates
        if measured is None or FLOAT not in candidates.choices:
            return
        best, floats = self._best(), dict.fromkeys(candidates.base.layers, FLOAT)
        if best is not None and best.point.choices != floats and best.cost <= FASTER * measured(self._made(floats)):
            return
        logger.warning("no other settings are faster than the float model on this machine: it is left as it is")
        if best is None or best.point.choices != floats:
            self._probe(len(self._ladder) - 1, floats)

    def _progress(self) -> str:
        best = self._best()
        text = f"{self._judge.evaluations:.1f} evaluations"
        if best is not None:
            text += f", best so far {best.cost:.4g} {self._cost.unit} at a loss of {best.outcome.loss:.4g}"
        if self._limits.minutes is not None:
            text += f", {max(0.0, self._limits.minutes - self._minutes):.1f} minutes left"
        return text

    @property
    def _minutes(self) -> float:
        return (time.monotonic() - self._begin) / 60

    def _best(self) -> _Tried | None:
        met = [each for each in self._tried if each.outcome.met]
        return min(met, key=lambda each: each.cost, default=None)

    def _probe(self, rung: int, choices: Mapping[str, str] | None = None) -> None:
        """Measure one rung, or a candidate beside it."""
        before = self._best()
        choices = choices or self._ladder.choices(rung)
        model = self._made(choices)
        measured = self._cost.measured
        outcome = self._judge.judge(_name_of(choices), model)
        point = Point(
            number=len(self._tried) + 1,
            choices=choices,
            cost=float(self._ladder.costs[rung]) if measured is None else measured(model),
            unit=self._cost.unit,
            bytes=self._bytes_of(choices),
            milliseconds=outcome.milliseconds,
            noise=float(self._ladder.noises[rung]),
            loss=outcome.loss,
            samples=outcome.samples,
            met=outcome.met,
            config=self._candidates.config(choices),
        )
        tried = _Tried(rung, point.noise, point.cost, outcome, point)
        self._tried.append(tried)
        logger.info(
            "candidate %d: %.4g %s, loss %.4g on %s: %s",
            point.number,
            point.cost,
            point.unit,
            outcome.loss,
            counted(outcome.samples, "sample"),
            "meets the goal" if outcome.met else "does not meet it",
        )
        if self._on_best is not None and self._best() is not before:
            model.history, model.certificate = self._history(tried), self._uncertified(outcome)
            self._on_best(model)

    def _uncertified(self, outcome: Outcome) -> Certificate:
        """What is known of the best result so far, should the search not end."""
        goal = self._judge.provisional
        return replace(goal, loss=outcome.loss, searched=outcome.samples, confidence=self._limits.confidence)

    def _bytes_of(self, choices: Mapping[str, str]) -> float:
        return sum(self._bytes.of(layer, choice) for layer, choice in choices.items())

    def _made(self, choices: Mapping[str, str]) -> QuantizedModel:
        return self._candidates.made(choices)

    def _next(self) -> int | None:
        """The next rung to be measured; None: the search is over."""
        limits, judge = self._limits, self._judge
        if len(self._tried) >= MOST_PROBES:
            return None
        if limits.minutes is not None and self._minutes >= limits.minutes:
            return None
        reserved = 2 * judge.next_cost  # this candidate, and the certificate
        if limits.evaluations is not None and judge.evaluations + reserved > limits.evaluations + 1e-9:
            return None
        failed = [each for each in self._tried if not each.outcome.met]
        best = self._best()
        if not failed:
            return None
        high = min((each for each in failed if best is None or each.rung < best.rung), key=lambda each: -each.rung)
        low_rung = self._last_rung() + 1 if best is None else best.rung
        if low_rung - high.rung <= 1:
            return None
        saving = (self._ladder.costs[low_rung - 1] if best is None else best.cost) - high.cost
        if best is not None and saving < NEAR * float(self._ladder.costs[-1]):
            return None
        noise = _expected_noise(judge.limit * AIM, best, high)
        return min(max(self._ladder.quietest_within(noise), high.rung + 1), low_rung - 1)

    def _last_rung(self) -> int:
        """The rung of least noise on which a layer is quantized."""
        last = len(self._ladder) - 1
        while last > 0 and set(self._ladder.choices(last).values()) == {FLOAT}:
            last -= 1
        return last

    # -- the last word -------------------------------------------------------------------------------------------------

    def _finished(self) -> QuantizedModel:
        """The best result, after samples that the search has not used; safer ones if it fails there."""
        error = 1 - self._limits.confidence
        found: list[tuple[_Tried, Certificate]] = []
        for share, tried in zip(SHARES, self._to_certify(), strict=False):
            model = self._made(tried.point.choices)
            certificate = self._judge.certify(
                _name_of(tried.point.choices), model, self._limits.confidence, error * share
            )
            if tried not in self._tried:  # only these samples have measured it
                tried.point = replace(
                    tried.point, loss=certificate.loss, samples=certificate.samples, met=certificate.met
                )
            found.append((tried, certificate))
            logger.info("%s", certificate)
            if certificate.certified if self._limits.certify else certificate.met:
                break
            if self._limits.evaluations is not None and self._judge.evaluations + self._judge.next_cost > (
                self._limits.evaluations + 1e-9
            ):
                break
        chosen, certificate = min(
            found, key=lambda each: (not each[1].certified, not each[1].met, each[1].loss if not each[1].met else 0.0)
        )
        model = self._made(chosen.point.choices)
        model.history, model.certificate = self._history(chosen), certificate
        if not certificate.met or (self._limits.certify and not certificate.certified):
            logger.warning("the goal was not reached; this is the best result found: %s", certificate)
        return model

    def _to_certify(self) -> list[_Tried]:
        """What is certified, one after the other until one succeeds; fixed before one of these samples is seen."""
        met = sorted((each for each in self._tried if each.outcome.met), key=lambda each: each.cost)
        if not met:
            return [min(self._tried, key=lambda each: each.outcome.loss)]
        found = [met[0]]
        while len(found) < len(SHARES):
            quieter = [each for each in met if each.noise <= SAFER * found[-1].noise]
            rung = self._ladder.quietest_within(SAFER * found[-1].noise)
            if quieter:
                found.append(quieter[0])
            elif found[-1].rung < rung <= self._last_rung():
                found.append(self._untested(rung, found[-1]))
            else:
                break
        return found

    def _untested(self, rung: int, like: _Tried) -> _Tried:
        """A rung that only the certificate measures."""
        choices = self._ladder.choices(rung)
        point = replace(
            like.point,
            number=max(each.point.number for each in self._tried) + 1,
            choices=choices,
            cost=float(self._ladder.costs[rung]),
            bytes=self._bytes_of(choices),
            milliseconds=None,
            noise=float(self._ladder.noises[rung]),
            config=self._candidates.config(choices),
        )
        return _Tried(rung, point.noise, point.cost, like.outcome, point)

    def _history(self, chosen: _Tried) -> tuple[Point, ...]:
        points = [each.point for each in self._tried]
        if chosen not in self._tried:
            points.append(chosen.point)
        return tuple(replace(point, chosen=point is chosen.point) for point in points)


def _name_of(choices: Mapping[str, str]) -> str:
    """A short name of a candidate for the journal."""
    return fingerprint([f"{layer} {choice}" for layer, choice in choices.items()])[:24]


def _expected_noise(loss: float, best: _Tried | None, high: _Tried) -> float:
    """The noise at which the loss is expected, between a rung that meets the goal (or none) and one that does not."""
    above = max(high.outcome.loss, loss * 1.05, 1e-12)
    if best is None:
        return high.noise * min(0.8, max(0.02, loss / above))
    below = min(best.outcome.loss, loss)
    share = (loss - below) / (above - below) if above > below else 0.5
    share = min(0.85, max(0.15, share))
    low = max(best.noise, high.noise * 1e-6)
    return math.exp(math.log(low) + share * (math.log(high.noise) - math.log(low))) if high.noise > 0 else 0.0
