"""Measures the candidates of a search: on samples, whose float answers are computed once, or by a user's number."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from amct.errors import ArgumentError
from amct.model.certificate import Certificate, run_lengths
from amct.search.samples import CHUNK, Answers
from amct.search.sequential import Decision, Race, fewest_samples, upper_bound

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from amct.pipeline.quantized_model import QuantizedModel
    from amct.search.goal import Evaluated, Goal
    from amct.search.journal import Journal
    from amct.search.samples import Samples

logger = logging.getLogger(__name__)

WRONG_DECISIONS = 0.02
"""The probability with which a candidate may be given up, or taken as good, wrongly before all samples were seen."""
SHARES = (0.8, 0.12, 0.05, 0.03)
"""How the probability of a wrong bound is divided among the results that are certified one after the other."""
FEWEST = 128
"""Samples that every candidate is judged by at least."""
REPEATS = 3
"""Runs of an evaluator that does not always return the same number."""


_UNCERTIFIED = Certificate(
    goal="",
    limit=0.0,
    loss=0.0,
    bound=None,
    confidence=0.95,
    error=0.0,
    samples=0,
    searched=0,
    seed=0,
    remark="not certified: the search has not ended",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured of a candidate.

    Attributes:
        loss: Its mean loss.
        samples: On how many samples.
        met: Whether it meets the goal.
        milliseconds: The CPU time of a sample; None if nothing was run.
    """

    loss: float
    samples: int
    met: bool
    milliseconds: float | None = None


class Judge(Protocol):
    """Measures candidates."""

    @property
    def text(self) -> str:
        """The goal for people."""

    @property
    def limit(self) -> float:
        """The largest mean loss that meets the goal."""

    @property
    def evaluations(self) -> float:
        """How many samples were scored, divided by all there are."""

    @property
    def next_cost(self) -> float:
        """The most evaluations that judging one more candidate takes."""

    @property
    def provisional(self) -> Certificate:
        """The certificate of a result on which the search has not had its last word."""

    def prepare(self, base: QuantizedModel) -> None:
        """Measure the float model."""

    def judge(self, name: str, candidate: QuantizedModel) -> Outcome:
        """Measure a candidate on the part of the samples that the search may use."""

    def certify(self, name: str, candidate: QuantizedModel, confidence: float, error: float) -> Certificate:
        """Measure a candidate on the other part; ``error`` is the probability that its bound may be wrong."""


def check_samples(goal: Goal, count: int, confidence: float, *, certify: bool) -> None:
    """Say before the work begins whether there are enough samples.

    Raises:
        ArgumentError: No result could ever be certified, which is asked for; or a part has no sample.
    """
    if count < 2:
        raise ArgumentError(f"labelled: expected at least 2 samples, got {count}")
    if goal.largest is None:
        return
    error = 1 - confidence
    least = upper_bound(np.zeros(count - count // 2), goal.smallest, goal.largest, SHARES[0] * error)
    if least <= goal.limit:
        return
    needed = 2 * fewest_samples(goal.limit, goal.smallest, goal.largest, SHARES[0] * error) if goal.limit else None
    text = (
        f"{count} samples are too few to certify {goal.text}: half of them can at best prove "
        f"{goal.factor * least:.2f} {goal.unit}; "
        + (f"at least {needed} are needed" if needed else "a goal of 0 cannot be proved by any number")
    )
    if certify:
        raise ArgumentError(f"labelled: {text}")
    logger.warning("%s; the result can meet the goal, but its bound will not", text)


def recomputed(certificate: Certificate) -> Certificate:
    """A certificate whose loss, bound and number of samples follow from the losses in it; without losses the same."""
    if not certificate.losses:
        return replace(certificate, samples=0)
    numbers, counts = zip(*certificate.losses, strict=True)
    losses = np.repeat(np.array(numbers, np.float64), counts)
    bound = upper_bound(losses, certificate.smallest, certificate.largest, certificate.error)
    return replace(certificate, loss=float(losses.mean()), bound=bound, samples=len(losses))


class SampleJudge:
    """Measures by samples, which a seed divides into those of the search and those of the certificate.

    Args:
        goal: What is measured.
        samples: All samples.
        seed: Divides them.
        journal: Keeps what was measured.
    """

    def __init__(self, goal: Goal, samples: Samples, seed: int, journal: Journal) -> None:
        self._goal, self._samples, self._seed, self._journal = goal, samples, seed, journal
        order = np.random.default_rng(seed).permutation(len(samples))
        half = len(samples) // 2
        self._parts = {"search": order[:half], "certificate": order[half:]}
        self._reference: NDArray[Any] = np.zeros(0)
        self._scored = 0
        self.text, self.limit = goal.text, goal.limit

    @property
    def evaluations(self) -> float:
        """How many samples were scored, divided by all there are."""
        return self._scored / len(self._samples)

    @property
    def next_cost(self) -> float:
        """The most evaluations that judging one more candidate takes."""
        return len(self._parts["search"]) / len(self._samples)

    @property
    def provisional(self) -> Certificate:
        """The certificate of a result on which the search has not had its last word."""
        goal = self._goal
        return replace(
            _UNCERTIFIED, goal=goal.text, limit=goal.limit, seed=self._seed, unit=goal.unit, factor=goal.factor
        )

    def prepare(self, base: QuantizedModel) -> None:
        """Run the float model on all samples, once; what the journal knows is not computed again."""
        every = np.arange(len(self._samples))
        known = self._journal.losses("float")[: len(every)]
        found: list[NDArray[Any]] = [known] if len(known) else []
        left = every[len(known) :]
        if len(left):
            for numbers, outputs in Answers.of_float(base).over(self._samples, left):
                found.append(self._goal.reference(outputs, self._labels(numbers)))
                if found[-1].ndim == 1:  # a number of each sample, not a whole output
                    self._journal.add("float", found[-1])
                self._scored += len(numbers)
        self._reference = np.concatenate(found)
        self._goal.take_reference(self._reference)

    def judge(self, name: str, candidate: QuantizedModel) -> Outcome:
        """Measure a candidate on the samples of the search, until it is clearly good or bad."""
        goal = self._goal
        race = Race(goal.limit, goal.smallest, goal.largest, WRONG_DECISIONS)

        def decide(values: NDArray[np.float64]) -> Decision:
            return race.decide(values) if len(values) >= FEWEST else Decision()

        losses, runs = self._losses(name, candidate, "search", decide)
        decision = decide(losses)
        loss = float(losses.mean())
        met = decision.below or (loss <= goal.limit and not decision.above)
        return Outcome(
            loss=loss, samples=len(losses), met=met, milliseconds=None if runs is None else runs.milliseconds
        )

    def certify(self, name: str, candidate: QuantizedModel, confidence: float, error: float) -> Certificate:
        """Measure a candidate on all samples of the certificate."""
        goal = self._goal
        losses, runs = self._losses(name, candidate, "certificate", lambda _: Decision())
        return Certificate(
            goal=goal.text,
            limit=goal.limit,
            loss=float(losses.mean()),
            bound=upper_bound(losses, goal.smallest, goal.largest, error),
            confidence=confidence,
            error=error,
            samples=len(losses),
            searched=len(self._parts["search"]),
            seed=self._seed,
            smallest=goal.smallest,
            largest=goal.largest,
            unit=goal.unit,
            factor=goal.factor,
            measured_on="the QDQ file" if runs is None else runs.measured_on,
            remark=goal.remark,
            losses=run_lengths(losses.tolist()),
        )

    def _losses(
        self,
        name: str,
        candidate: QuantizedModel,
        part: str,
        decide: Callable[[NDArray[np.float64]], Decision],
    ) -> tuple[NDArray[np.float64], Answers | None]:
        """The losses of a candidate on a part of the samples, and what ran: not what the journal knows."""
        entry, numbers = f"{part} {name}", self._parts[part]
        losses = self._journal.losses(entry)[: len(numbers)]
        decision = decide(losses)
        if len(losses) == len(numbers) or decision.above or decision.below:
            return losses, None
        runs = Answers(candidate, candidate.exported())
        for done, outputs in runs.over(self._samples, numbers[len(losses) :], CHUNK):
            found = self._goal.losses(self._reference[done], outputs, self._labels(done))
            self._journal.add(entry, found)
            self._scored += len(done)
            losses = np.concatenate([losses, found])
            decision = decide(losses)
            if decision.above or decision.below:
                break
        return losses, runs

    def _labels(self, numbers: NDArray[np.int64]) -> NDArray[Any] | None:
        return None if self._samples.labels is None else self._samples.labels[numbers]


class EvaluatorJudge:
    """Measures by a function of the user that gives a whole model one number.

    Args:
        goal: The function, and how much may be lost.
        float_model: The model that it is called with first.
        journal: Keeps what was measured.
    """

    next_cost = 1.0

    def __init__(self, goal: Evaluated, float_model: Any, journal: Journal) -> None:  # noqa: ANN401  the door's kind of model
        self._goal, self._float_model, self._journal = goal, float_model, journal
        self._value = self._spread = 0.0
        self._repeats = 1
        self._runs = 0
        self.text, self.limit = goal.text, goal.limit

    @property
    def evaluations(self) -> float:
        """How often the function was called."""
        return float(self._runs)

    @property
    def provisional(self) -> Certificate:
        """The certificate of a result on which the search has not had its last word."""
        return replace(_UNCERTIFIED, goal=self.text, limit=self.limit, unit="", factor=1.0)

    def prepare(self, base: QuantizedModel) -> None:
        """Call the function with the float model; a second time, to see whether it returns the same number."""
        del base
        values = self._known("float", 2, lambda: self._float_model)
        if values[0] != values[1]:
            self._repeats = REPEATS
            values = self._known("float", REPEATS, lambda: self._float_model)
            self._spread = float(values.std(ddof=1)) / REPEATS**0.5
            logger.warning(
                "evaluate returned %g and %g for the same model: every number is the mean of %d calls",
                values[0],
                values[1],
                REPEATS,
            )
        self._value = float(values.mean())

    def judge(self, name: str, candidate: QuantizedModel) -> Outcome:
        """Call the function with the simulation of a candidate."""
        values = self._known(name, self._repeats, lambda: candidate.model)
        loss = self._value - float(values.mean())
        return Outcome(loss=loss, samples=0, met=loss <= self._goal.limit)

    def certify(self, name: str, candidate: QuantizedModel, confidence: float, error: float) -> Certificate:
        """What is known of a candidate; a number of a whole model proves nothing about other data."""
        loss = self.judge(name, candidate).loss
        remark = "evaluate gives one number of all its data, which also chose the settings: no bound for other data"
        if self._spread:
            remark += f"; its numbers vary by {self._spread:.2g}, even as means of {REPEATS} calls"
        return Certificate(
            goal=self._goal.text,
            limit=self._goal.limit,
            loss=loss,
            bound=None,
            confidence=confidence,
            error=error,
            samples=0,
            searched=0,
            seed=0,
            unit="",
            factor=1.0,
            measured_on="the simulation",
            remark=remark,
        )

    def _known(self, name: str, count: int, model: Callable[[], Any]) -> NDArray[np.float64]:
        values = self._journal.losses(name)
        if len(values) < count:
            given = model()
            for _ in range(count - len(values)):
                self._journal.add(name, [self._goal.value(given)])
                self._runs += 1
            values = self._journal.losses(name)
        return values[:count]
