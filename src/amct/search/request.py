"""What a user asks of a search, checked before any work is done; the same for every front door."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from amct.calibration.ranks import fingerprint
from amct.errors import ArgumentError, ArgumentTypeError
from amct.search.choices import FLOAT, INT8, MEANINGS, checked, other_ranges
from amct.search.costs import COSTS, LATENCY, SIZE
from amct.search.goal import Agreement, Drop, Evaluate, Evaluated, Goal, Score, Sqnr, checked_number
from amct.search.journal import Journal
from amct.search.judge import EvaluatorJudge, SampleJudge, check_samples
from amct.search.run import Candidates, Limits, Search
from amct.search.samples import Samples, counted_samples, labelled_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from amct.config.plan import LayerPlan
    from amct.numerics.settings import ActivationSettings
    from amct.pipeline.batches import BatchInputs
    from amct.pipeline.quantized_model import QuantizedModel
    from amct.pipeline.weights import QuantizedWeights
    from amct.search.judge import Judge


class SearchOptions(TypedDict, total=False):
    """The goal of a search and what it may take; exactly one of the first four is the goal.

    Attributes:
        max_drop: the score may drop by so many points, hundredths of its mean; with ``evaluate``, by so much in the
            unit of its number.
        min_agreement: so many percent of the samples must get the answer of the float model; no labels are needed.
        min_sqnr: the noise of the first output must be so many dB below the signal; no labels are needed.
        score: ``score(outputs, labels)`` returns one number for each sample of a batch; by default 1 where the class is
            right. The outputs are in the form of ``quantized(batch)``, the labels are an array.
        score_range: the smallest and the largest number that ``score`` can return; (0, 1) unless given.
        evaluate: ``evaluate(model)`` returns the accuracy of a model on data of its own, for metrics that are no mean
            over samples; the certificate then promises nothing about other data.
        choices: what a layer may become, of "float", "int8", "hfmg8" and "minmax8" (other ranges of activations),
            "int16" and "int12" (activations; 12 bits in Caffe), "int4" (weights) and "adaround4" (PyTorch); by default
            "float", "int8" and "int4".
        minimize: "size" (bytes of weights), "bitops" (multiplications times the bits of both factors) or "latency"
            (measured milliseconds on this machine).
        max_minutes: the search ends after so many minutes with the best result so far.
        max_evaluations: and after so many evaluations: samples scored, divided by all there are.
        seed: divides the samples into those of the search and those of the certificate; the same seed gives the same
            result.
        certify: whether also the bound of the certificate must meet the goal, not only what was measured.
        confidence: of that bound, such as 0.95.
        resume: a file such as ``out/net.search.jsonl``: what is measured is kept there, and a search that was killed
            goes on from it; it is removed at the end.
        on_best: called with each result that is better than those before, before it has a certificate.
    """

    max_drop: float | None
    min_agreement: float | None
    min_sqnr: float | None
    score: Score | None
    score_range: tuple[float, float]
    evaluate: Evaluate | None
    choices: Iterable[str] | None
    minimize: str
    max_minutes: float | None
    max_evaluations: float | None
    seed: int
    certify: bool
    confidence: float
    resume: str | os.PathLike[str] | None
    on_best: Callable[[QuantizedModel], None] | None


_GOALS = ("max_drop", "min_agreement", "min_sqnr")
_OPTIONS = tuple(SearchOptions.__annotations__)


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The options of a search, checked.

    Attributes:
        goal: What is measured on samples, or by a function of the user.
        choices: What a layer may become.
        minimize: What is to be small.
        limits: What the search may take.
        seed: Divides the samples.
        resume: The file of its journal.
        on_best: Called with each better result.
        samples: Batches of (inputs, labels), or of inputs where the goal needs no labels.
    """

    goal: Goal | Evaluated
    choices: tuple[str, ...]
    samples: object = None
    minimize: str = SIZE
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    resume: Path | None = None
    on_best: Callable[[QuantizedModel], None] | None = None

    @classmethod
    def of(cls, labelled: object, options: SearchOptions, known: Iterable[str] = MEANINGS) -> SearchRequest:
        """Check the options.

        Args:
            labelled: The samples, if there are any.
            options: As the user gave them.
            known: What a layer can become in this kind of model.

        Raises:
            ArgumentError, ArgumentTypeError: An option is unknown, missing, or has an impossible value.
        """
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise ArgumentTypeError(f"quantize_to: unknown option {min(unknown)}; there are {', '.join(_OPTIONS)}")
        goal = _goal(options)
        if isinstance(goal, Evaluated) != (labelled is None):
            wanted = (
                "evaluate= brings its own data: leave labelled out"
                if labelled is not None
                else ("expected batches of (inputs, labels), or of inputs for min_agreement and min_sqnr")
            )
            raise ArgumentError(f"labelled: {wanted}")
        limits = _limits(options)
        if isinstance(goal, Goal) and goal.has_labels:
            labelled, count = labelled_pairs(labelled)
            check_samples(goal, count, limits.confidence, certify=limits.certify)
        elif isinstance(goal, Goal) and (told := counted_samples(labelled)) is not None:
            check_samples(goal, told, limits.confidence, certify=limits.certify)
        minimize = options.get("minimize", SIZE)
        if minimize not in COSTS:
            raise ArgumentError(f"minimize: expected one of {', '.join(COSTS)}, got {minimize!r}")
        choices = options.get("choices")
        if choices is None and minimize == LATENCY:
            choices = (FLOAT, INT8)  # 4-bit weights run no faster
        seed, resume = options.get("seed", 0), options.get("resume")
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ArgumentTypeError(f"seed: expected a whole number from 0, got {seed!r}")
        if resume is not None and not isinstance(resume, (str, os.PathLike)):
            raise ArgumentTypeError(f"resume: expected the path of a file, got {type(resume).__name__}")
        return cls(
            goal=goal,
            choices=checked(choices, known),
            minimize=minimize,
            samples=labelled,
            limits=limits,
            seed=seed,
            resume=None if resume is None else Path(resume),
            on_best=options.get("on_best"),
        )

    def ranges(self, layer: LayerPlan) -> tuple[ActivationSettings, ...]:
        """The further settings whose ranges the one calibration must find for a layer."""
        return other_ranges(layer, self.choices)

    def run(
        self,
        base: QuantizedModel,
        float_model: Any,  # noqa: ANN401  the door's kind of model
        inputs: BatchInputs | None = None,
        learned: Mapping[str, QuantizedWeights] | None = None,
    ) -> QuantizedModel:
        """Search.

        Args:
            base: The calibrated model with 8 bits in every layer.
            float_model: The user's model, for ``evaluate``.
            inputs: Turns the inputs of a batch into those of the model.
            learned: Weights whose rounding is learned.
        """
        goal = self.goal
        judge: Judge
        if isinstance(goal, Evaluated):
            journal = self._journal(base, "")
            judge = EvaluatorJudge(goal, float_model, journal)
        else:
            samples = Samples(base.prepared, self.samples, has_labels=goal.has_labels, inputs=inputs)
            data = fingerprint([str(len(samples)), *([] if samples.labels is None else [samples.labels])])
            journal = self._journal(base, data)
            judge = SampleJudge(goal, samples, self.seed, journal)
            if not goal.has_labels and counted_samples(self.samples) is None:
                check_samples(goal, len(samples), self.limits.confidence, certify=self.limits.certify)
        candidates = Candidates(base, self.choices, learned or {})
        cost = COSTS[self.minimize](candidates)
        result = Search(candidates, judge, self.limits, cost, self.on_best).run()
        journal.remove()
        return result

    def _journal(self, base: QuantizedModel, data: str) -> Journal:
        numbers = [part for qparams in base.qparams.values() for each in qparams.weights for part in (each.scale,)]
        ranges = [
            part for qparams in base.qparams.values() for each in qparams.inputs.values() for part in (each.scale,)
        ]
        bound = {
            "model": fingerprint([*base.layers, *numbers]),
            "calibration": fingerprint(ranges),
            "data": data,
            "goal": " by ".join(each for each in (self.goal.text, self.goal.measured_by) if each),
            "choices": ", ".join(self.choices),
            "seed": str(self.seed),
        }
        return Journal(self.resume, bound)


def _goal(options: SearchOptions) -> Goal | Evaluated:
    given = [name for name in _GOALS if options.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ArgumentError(f"expected one goal of {', '.join(_GOALS)}, got {found}")
    drop, agreement, sqnr = (options.get(name) for name in _GOALS)
    score, evaluate = options.get("score"), options.get("evaluate")
    if evaluate is not None:
        if drop is None or score is not None:
            raise ArgumentError("evaluate: goes with max_drop, and without score; leave the others out")
        return Evaluated(evaluate, drop)  # type: ignore[arg-type]  # checked there
    if drop is not None:
        return Drop(drop, score, options.get("score_range", (0.0, 1.0)))  # type: ignore[arg-type]
    if score is not None:
        raise ArgumentError("score: goes with max_drop only; leave it out")
    return Agreement(agreement) if agreement is not None else Sqnr(sqnr)  # type: ignore[arg-type]


def _limits(options: SearchOptions) -> Limits:
    minutes, evaluations = options.get("max_minutes"), options.get("max_evaluations")
    confidence = options.get("confidence", 0.95)
    if not isinstance(confidence, float) or not 0.5 <= confidence < 1:
        raise ArgumentError(f"confidence: expected 0.5 to below 1, such as 0.95, got {confidence!r}")
    return Limits(
        minutes=None if minutes is None else checked_number(minutes, "max_minutes", 0),
        evaluations=None if evaluations is None else checked_number(evaluations, "max_evaluations", 2),
        certify=bool(options.get("certify", False)),
        confidence=confidence,
    )
