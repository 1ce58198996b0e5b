"""What a search must reach, and how much of it a sample loses: labels, equal answers, little noise, or own numbers."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from amct.errors import AmctError, ArgumentError, ArgumentTypeError, EvaluatorError
from amct.printable import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

FEWEST_RIGHT = 0.1
"""The share of right answers of the float model below which the labels are doubted."""
Score = Callable[[Any, Any], Any]
"""``score(outputs, labels)``: a number for each sample of a batch."""
Evaluate = Callable[[Any], Any]
"""``evaluate(model)``: the accuracy of a model on data of its own."""


def first_output(outputs: Any) -> NDArray[Any]:  # noqa: ANN401  the door's outputs
    """The first output of a model as an array."""
    while isinstance(outputs, (Mapping, tuple, list)) and len(outputs):
        outputs = next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs[0]
    if isinstance(outputs, Tensor):
        return outputs.detach().cpu().float().numpy()
    return np.asarray(outputs)


def answers(outputs: Any) -> NDArray[np.int64]:  # noqa: ANN401  the door's outputs
    """The class of each sample, or of each of its pixels: the largest number along axis 1 of the first output."""
    array = first_output(outputs)
    if array.ndim < 2:
        raise EvaluatorError(
            f"the first output has the shape {list(array.shape)}, so it has no class for each sample; give "
            "score=function(outputs, labels), or evaluate=function(model)"
        )
    found: NDArray[np.int64] = array.argmax(1)
    return found


def top1(outputs: Any, labels: Any) -> NDArray[np.float64]:  # noqa: ANN401  the door's outputs, the user's labels
    """1 for each sample whose largest output is that of its label, else 0; of several pixels the mean."""
    found, wanted = answers(outputs), np.asarray(labels)
    if found.ndim > 1 and wanted.ndim == 1:
        found = found.reshape(len(found), -1)
        found = found[:, 0] if found.shape[1] == 1 else found
    classes = first_output(outputs).shape[1]
    if found.ndim == wanted.ndim == 1 and len(wanted) and not 0 <= wanted.min() <= wanted.max() < classes:
        wrong = wanted.min() if wanted.min() < 0 else wanted.max()
        raise EvaluatorError(f"label {wrong}: expected the number of a class, 0 to {classes - 1}")
    if found.shape != wanted.shape:
        raise EvaluatorError(
            f"labels of the shape {list(wanted.shape)} do not fit answers of the shape {list(found.shape)}: expected "
            "the number of a class for each sample; give score=function(outputs, labels) for other labels"
        )
    return np.asarray((found == wanted).reshape(len(found), -1).mean(1), np.float64)


class Goal(ABC):
    """What must be reached; each sample has a loss, whose mean may not be larger than ``limit``.

    Attributes:
        text: The goal for people.
        limit: The largest mean loss.
        smallest: The smallest loss of a sample.
        largest: The largest; None: there is none.
        has_labels: Whether samples need labels.
        unit: The word for losses, and by which factor they are shown.
        factor: That factor.
        remark: What a certificate cannot promise.
        measured_by: The function of the user that measures, for the journal; empty without one.
    """

    text: str
    limit: float
    smallest: float = 0.0
    largest: float | None = 1.0
    has_labels: bool = False
    unit: str = "points"
    factor: float = 100.0
    remark: str = ""
    measured_by: str = ""

    @abstractmethod
    def reference(self, outputs: Any, labels: NDArray[Any] | None) -> NDArray[Any]:  # noqa: ANN401  the door's outputs
        """What must be kept of the answers of the float model, one row for each sample."""

    @abstractmethod
    def losses(
        self,
        reference: NDArray[Any],
        outputs: Any,  # noqa: ANN401  the door's outputs
        labels: NDArray[Any] | None,
    ) -> NDArray[np.float64]:
        """What each sample loses."""

    def take_reference(self, reference: NDArray[Any]) -> None:
        """Called once with what was kept of all samples."""
        del reference


class Drop(Goal):
    """A score may drop by so many points, hundredths of its mean.

    Args:
        points: The largest drop.
        score: Gives each sample a number; None: whether its class is right.
        score_range: The smallest and the largest number that it gives.
    """

    has_labels = True

    def __init__(self, points: float, score: Score | None, score_range: tuple[float, float] = (0.0, 1.0)) -> None:
        self.limit = checked_number(points, "max_drop", 0) / 100
        if score is not None and not callable(score):
            raise ArgumentTypeError(f"score: expected a function of (outputs, labels), got {type(score).__name__}")
        low, high = score_range
        if not low < high:
            raise ArgumentError(f"score_range: expected (smallest, largest), got {score_range}")
        self._is_top1 = score is None
        self._score, self._range = score or top1, (float(low), float(high))
        self.measured_by = "" if score is None else _named(score)
        self.smallest, self.largest = low - high, high - low
        self.text = f"a drop of at most {points:g} points"

    def reference(self, outputs: Any, labels: NDArray[Any] | None) -> NDArray[Any]:  # noqa: ANN401
        """The scores of the float model."""
        return self._scores(outputs, labels)

    def take_reference(self, reference: NDArray[Any]) -> None:
        """Warn of labels that are hardly those of this model: with them nothing could ever be lost."""
        right = float(reference.mean()) if len(reference) else 1.0
        if self._is_top1 and right < FEWEST_RIGHT:
            logger.warning(
                "the float model gets only %.1f %% of the labels right, so it has little to lose: are they the labels "
                "of this model, from 0, and is the data prepared as it expects?",
                100 * right,
            )

    def losses(self, reference: NDArray[Any], outputs: Any, labels: NDArray[Any] | None) -> NDArray[np.float64]:  # noqa: ANN401
        """By how much each score is lower than that of the float model."""
        return np.asarray(reference - self._scores(outputs, labels), np.float64)

    def _scores(self, outputs: Any, labels: NDArray[Any] | None) -> NDArray[np.float64]:  # noqa: ANN401
        assert labels is not None
        scores = checked_scores(called("score", self._score, outputs, labels), len(labels))
        low, high = self._range
        if scores.size and (scores.min() < low or scores.max() > high):
            wrong = scores.min() if scores.min() < low else scores.max()
            raise EvaluatorError(
                f"score returned {wrong:g}, outside of {low:g} to {high:g}; give score_range=(smallest, largest), "
                "which the bound of the certificate rests on"
            )
        return scores


class Agreement(Goal):
    """So many percent of the samples must get the same answer as from the float model."""

    def __init__(self, percent: float) -> None:
        self.limit = 1 - checked_number(percent, "min_agreement", 0, 100) / 100
        self.text = f"the answer of the float model for at least {percent:g} % of the samples"

    def reference(self, outputs: Any, labels: NDArray[Any] | None) -> NDArray[Any]:  # noqa: ANN401, ARG002
        """The classes that the float model answers."""
        return answers(outputs)

    def losses(self, reference: NDArray[Any], outputs: Any, labels: NDArray[Any] | None) -> NDArray[np.float64]:  # noqa: ANN401, ARG002
        """The share of other answers."""
        found = answers(outputs)
        return np.asarray((found != reference).reshape(len(found), -1).mean(1), np.float64)


class Sqnr(Goal):
    """The noise of the first output must be so many decibels below the signal."""

    largest = None
    unit = "% of the signal's power"
    remark = "noise has no largest value, so the bound is only about right"

    def __init__(self, decibels: float) -> None:
        self.limit = 10 ** (-checked_number(decibels, "min_sqnr", 0) / 10)
        self.text = f"an SQNR of at least {decibels:g} dB"
        self._power = 1.0

    def reference(self, outputs: Any, labels: NDArray[Any] | None) -> NDArray[Any]:  # noqa: ANN401, ARG002
        """The output of the float model."""
        return first_output(outputs)

    def take_reference(self, reference: NDArray[Any]) -> None:
        """The mean power of the signal of a sample."""
        self._power = max(float((reference.astype(np.float64) ** 2).sum() / len(reference)), 1e-30)

    def losses(self, reference: NDArray[Any], outputs: Any, labels: NDArray[Any] | None) -> NDArray[np.float64]:  # noqa: ANN401, ARG002
        """The power of the noise of each sample in units of the mean signal."""
        error = (first_output(outputs).astype(np.float64) - reference) ** 2
        return np.asarray(error.reshape(len(error), -1).sum(1) / self._power)


class Evaluated:
    """A function of the user gives a model one number, of which at most so much may be lost.

    Args:
        evaluate: The function.
        drop: The largest loss, in the unit of that number.
    """

    def __init__(self, evaluate: Evaluate, drop: float) -> None:
        if not callable(evaluate):
            raise ArgumentTypeError(f"evaluate: expected a function of a model, got {type(evaluate).__name__}")
        self.limit = checked_number(drop, "max_drop", 0)
        self.text = f"a drop of at most {drop:g}"
        self._evaluate = evaluate
        self.measured_by = _named(evaluate)

    def value(self, model: Any) -> float:  # noqa: ANN401  the door's kind of model
        """The number of a model.

        Raises:
            EvaluatorError: The function raises, or returns no number.
        """
        return checked_value(called("evaluate", self._evaluate, model), "evaluate")


def _named(function: object) -> str:
    """Module and name of a function."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{name}"


def called(name: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401  the user's own function
    """What a function of the user returns.

    Raises:
        EvaluatorError: It raises.
    """
    try:
        return function(*arguments)
    except AmctError:
        raise
    except Exception as error:
        raise EvaluatorError(f"{name} raised {type(error).__name__}: {error}") from error


def checked_value(value: Any, name: str) -> float:  # noqa: ANN401  what a user's function returns
    """The number that a function of the user returned.

    Raises:
        EvaluatorError: It is none.
    """
    if value is None:
        raise EvaluatorError(f"{name} returned None; does it lack a return? Expected one number")
    if callable(value) and not isinstance(value, Tensor):
        shown = getattr(value, "__qualname__", type(value).__name__)
        raise EvaluatorError(f"{name} returned the function {shown} instead of its result: call it, as in {shown}()")
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise EvaluatorError(f"{name} returned a {type(value).__name__}; expected one number")
    if array.size != 1:
        raise EvaluatorError(f"{name} returned {array.size} numbers of the shape {list(array.shape)}; expected one")
    number = float(array.reshape(-1)[0])
    if not math.isfinite(number):
        raise EvaluatorError(f"{name} returned {number}; expected a finite number: was there any sample?")
    return number


def checked_scores(value: Any, count: int) -> NDArray[np.float64]:  # noqa: ANN401  what a user's function returns
    """The scores that a function of the user returned for a batch.

    Raises:
        EvaluatorError: They are not one number for each sample.
    """
    if value is None:
        raise EvaluatorError("score returned None; does it lack a return? Expected one number for each sample")
    if callable(value) and not isinstance(value, Tensor):
        shown = getattr(value, "__qualname__", type(value).__name__)
        raise EvaluatorError(f"score returned the function {shown} instead of its result: call it, as in {shown}()")
    try:
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        scores = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise EvaluatorError(
            f"score returned a {type(value).__name__}; expected one number for each of {counted(count, 'sample')}"
        ) from error
    if scores.shape != (count,):
        raise EvaluatorError(
            f"score returned the shape {list(scores.shape)} for a batch of {counted(count, 'sample')}; expected "
            f"[{count}], one number for each (a mean over the batch is not enough: give evaluate= for such a metric)"
        )
    if not np.isfinite(scores).all():
        raise EvaluatorError(f"score returned {scores[~np.isfinite(scores)][0]} for a sample; expected finite numbers")
    return scores


def checked_number(value: Any, name: str, low: float, high: float = math.inf) -> float:  # noqa: ANN401  the user's argument
    """A number of the user within its range.

    Raises:
        ArgumentTypeError, ArgumentError: It is none, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise ArgumentTypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        raise ArgumentError(f"{name}: expected {limits}, got {value}")
    return float(value)
