"""AMCT's classes for rolling layers back to float until an evaluator is content: evaluator, strategy, sensitivity.

Users derive from the three base classes. A ranking is a dict from layers to sensitivities, the lowest for the layer
that suffers most; a strategy answers each evaluation with which layers stay quantized.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct import atomic
from amct.errors import ArgumentError, CalibrationError, EvaluatorError
from amct.log import FOLDER
from amct.printable import counted
from amct.search.choices import FLOAT, plan_with
from amct.search.goal import called, checked_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from amct.pipeline.quantized_model import QuantizedModel

logger = logging.getLogger(__name__)

STOP_FLAG, ROLL_BACK_CONFIG = "stop_flag", "roll_back_config"
RANKING = "accuracy_based_auto_calibration_ranking_information.json"
FINAL_CONFIG = "accuracy_based_auto_calibration_final_config.json"
HISTORY = "accuracy_based_auto_calibration_record.json"
MOST_REPEATED = 100
"""How often a strategy may ask for what is known already."""


class AutoCalibrationEvaluatorBase(ABC):
    """What a user writes: how the model is calibrated, how it is evaluated, and when that is good enough."""

    @abstractmethod
    def calibration(self, *model: Any) -> None:  # noqa: ANN401  a module; of a Caffe model its two files
        """Run the model on ``batch_num`` batches."""

    @abstractmethod
    def evaluate(self, *model: Any) -> Any:  # noqa: ANN401  as above, and the user's kind of metric
        """The metric of a model."""

    @abstractmethod
    def metric_eval(self, original_metric: Any, new_metric: Any) -> tuple[bool, float]:  # noqa: ANN401  as above
        """Whether a metric is good enough beside that of the float model, and how much is lost."""


class AutoCalibrationStrategyBase(ABC):
    """Decides which layers are tried next as float ones."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {STOP_FLAG: False, ROLL_BACK_CONFIG: {}}

    @abstractmethod
    def initialize(self, ranking_info: dict[str, float]) -> None:
        """Called once with the sensitivity of each layer."""

    @abstractmethod
    def update_quant_config(self, metric_eval: tuple[bool, float]) -> dict[str, Any]:
        """Called after each evaluation.

        Returns:
            ``stop_flag``: whether the search has ended; ``roll_back_config``: by layer whether it is quantized, in the
            next evaluation or in the result.
        """


class SensitivityBase(ABC):
    """Compares the output of a layer with that of the quantized layer."""

    @abstractmethod
    def compare(self, original_tensor: Any, fake_quant_tensor: Any) -> float:  # noqa: ANN401  tensors or arrays
        """How near they are; the layer with the lowest number is rolled back first."""


class CosineSimilaritySensitivity(SensitivityBase):
    """1 for equal directions, 0 for opposite ones."""

    def compare(self, original_tensor: Any, fake_quant_tensor: Any) -> float:  # noqa: ANN401
        """Half of one plus the cosine; 1 if both are zero, 0 if only the quantized one is."""
        one, other = (_flat(each) for each in (original_tensor, fake_quant_tensor))
        lengths = float(np.linalg.norm(one)), float(np.linalg.norm(other))
        if lengths[0] == 0 or lengths[1] == 0:
            return float(lengths[0] == lengths[1])
        return 0.5 + 0.5 * float(one @ other) / (lengths[0] * lengths[1])


class MseSimilaritySensitivity(SensitivityBase):
    """The mean squared error, negative, so that the layer with the largest error comes first."""

    def compare(self, original_tensor: Any, fake_quant_tensor: Any) -> float:  # noqa: ANN401
        """Minus the mean of the squared differences."""
        one, other = (_flat(each) for each in (original_tensor, fake_quant_tensor))
        return -float(np.mean((one - other) ** 2))


def _flat(values: Any) -> Any:  # noqa: ANN401  an array of any library
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    return array.astype(np.float64).reshape(-1)


class BinarySearchStrategy(AutoCalibrationStrategyBase):
    """Finds the fewest layers, the most sensitive first, that must be float, by halving."""

    def __init__(self) -> None:
        super().__init__()
        self._order: list[str] = []
        self._low = self._high = 0
        self._count: int | None = None
        self._best = 0

    def initialize(self, ranking_info: dict[str, float]) -> None:
        """Sort the layers, the lowest sensitivity first."""
        self._order = [name for name, _ in sorted(ranking_info.items(), key=lambda item: item[1])]
        self._low, self._high, self._count = 0, len(self._order) - 1, None
        self._best = len(self._order)
        self.result = {STOP_FLAG: False, ROLL_BACK_CONFIG: self._with_float(0)}

    def update_quant_config(self, metric_eval: tuple[bool, float]) -> dict[str, Any]:
        """Halve what is left; the first call is about the model with every layer quantized."""
        is_enough = bool(metric_eval[0])
        if self._count is None and is_enough:
            return self._ended(0)
        if self._count is not None and is_enough:
            self._best, self._high = self._count, self._count - 2
        elif self._count is not None:
            self._low = self._count
        if self._low > self._high:
            return self._ended(self._best)
        self._count = (self._low + self._high) // 2 + 1
        self.result = {STOP_FLAG: False, ROLL_BACK_CONFIG: self._with_float(self._count)}
        return self.result

    def _ended(self, count: int) -> dict[str, Any]:
        self.result = {STOP_FLAG: True, ROLL_BACK_CONFIG: self._with_float(count)}
        return self.result

    def _with_float(self, count: int) -> dict[str, bool]:
        return {name: index >= count for index, name in enumerate(self._order)}


STRATEGIES = {"BinarySearch": BinarySearchStrategy}
SENSITIVITIES = {"CosineSimilarity": CosineSimilaritySensitivity, "MseSimilarity": MseSimilaritySensitivity}


# -- the evaluator's calls ---------------------------------------------------------------------------------------------


class EvaluatorCalls:
    """Calls the evaluator of a user, and says what is wrong with what it returns.

    Args:
        evaluator: The evaluator.
        model: The float model, as it is handed to the evaluator: a module, or the two files of a Caffe model.

    Attributes:
        original: The metric of the float model.
        metric: The metric of the last model.

    Raises:
        EvaluatorError: It raises, returns no metric, or does not accept that of the float model.
    """

    def __init__(self, evaluator: AutoCalibrationEvaluatorBase, *model: Any) -> None:  # noqa: ANN401  as above
        self._evaluator = evaluator
        self.original = self.metric = self._evaluated(*model)
        if not self._judged(self.original)[0]:
            raise EvaluatorError(
                f"metric_eval does not accept the metric of the float model itself, {self.original}: it must return "
                "(True, 0.0) where nothing is lost"
            )

    def calibrate(self, *model: Any) -> None:  # noqa: ANN401  as above
        """Let it run a model that observes."""
        called("calibration of the evaluator", self._evaluator.calibration, *model)

    def of(self, *model: Any) -> tuple[bool, float]:  # noqa: ANN401  as above
        """Whether a model is good enough, and what it loses."""
        self.metric = self._evaluated(*model)
        return self._judged(self.metric)

    def _evaluated(self, *model: Any) -> Any:  # noqa: ANN401  the user's kind of metric
        begin = time.monotonic()
        with torch.no_grad():
            metric = _checked_metric(called("evaluate of the evaluator", self._evaluator.evaluate, *model))
        logger.info("evaluated in %.1f s: %s", time.monotonic() - begin, metric)
        return metric

    def _judged(self, metric: Any) -> tuple[bool, float]:  # noqa: ANN401  as above
        found = called("metric_eval of the evaluator", self._evaluator.metric_eval, self.original, metric)
        return _checked_judgement(found)


def _checked_metric(value: Any) -> Any:  # noqa: ANN401  what a user's function returns
    """What an evaluator returned for a model: a number, or several in a list, tuple or dict.

    Raises:
        EvaluatorError: It is none of them.
    """
    several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    if several is None:
        checked_value(value, "evaluate")
    elif not several:
        raise EvaluatorError("evaluate returned no number; expected one, or several in a list or dict")
    for each in several or ():
        checked_value(each, "evaluate")
    return value


def _checked_judgement(value: Any) -> tuple[bool, float]:  # noqa: ANN401  what a user's function returns
    """What an evaluator says of a metric.

    Raises:
        EvaluatorError: It is no pair of a bool and a number.
    """
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[0], (bool, np.bool_)):
        raise EvaluatorError(f"metric_eval returned {value!r:.80}; expected (whether it is enough, the loss)")
    return bool(value[0]), checked_value(value[1], "metric_eval")


# -- rolling back ------------------------------------------------------------------------------------------------------


def checked_objects(evaluator: object, strategy: object, sensitivity: object) -> tuple[Any, Any]:
    """The strategy and the sensitivity that a user names or hands over, after the evaluator is checked too.

    Raises:
        ArgumentError: A name is unknown.
        CalibrationError: An object is of another class.
    """
    if not isinstance(evaluator, AutoCalibrationEvaluatorBase):
        raise CalibrationError(
            "model_evaluator: expected an object of a class derived from AutoCalibrationEvaluatorBase, got "
            f"{type(evaluator).__name__}"
        )
    return (
        _object_of(strategy, STRATEGIES, AutoCalibrationStrategyBase, "strategy"),
        _object_of(sensitivity, SENSITIVITIES, SensitivityBase, "sensitivity"),
    )


def _object_of(given: object, known: Mapping[str, Callable[[], Any]], base: type, argument: str) -> Any:  # noqa: ANN401  an object of that class
    if isinstance(given, str):
        if given not in known:
            raise ArgumentError(f'{argument}: expected {" or ".join(known)}, or an object, got "{given}"')
        return known[given]()
    if not isinstance(given, base):
        raise CalibrationError(
            f"{argument}: expected a name or an object of a class derived from {base.__name__}, got "
            f"{type(given).__name__}"
        )
    return given


def compared(sensitivity: SensitivityBase, original: Any, quantized: Any) -> float:  # noqa: ANN401  tensors or arrays
    """How near two outputs of a layer are.

    Raises:
        EvaluatorError: The user's class raises, or returns no number.
    """
    return checked_value(called("compare of the sensitivity", sensitivity.compare, original, quantized), "compare")


def rolled_back(
    base: QuantizedModel,
    strategy: AutoCalibrationStrategyBase,
    ranking: Mapping[str, float],
    judge: Callable[[QuantizedModel], tuple[bool, float]],
) -> tuple[QuantizedModel | None, list[dict[str, Any]]]:
    """The model that the strategy ends with, None if every layer is float in it; and what was tried.

    Args:
        base: The calibrated model; every probe is this one with other layers left float.
        strategy: Chooses them.
        ranking: The sensitivity of each layer.
        judge: Whether a model is good enough, and what it loses.
    """
    prepared = base.prepared
    called("initialize of the strategy", strategy.initialize, dict(ranking))
    wanted = dict.fromkeys(base.layers, True)
    tried: list[dict[str, Any]] = []
    known: dict[tuple[str, ...], tuple[bool, float]] = {}
    while len(tried) < MOST_REPEATED + 2 * len(known):
        floats = tuple(name for name in base.layers if not wanted.get(name, True))
        model = None
        if len(floats) < len(base.layers):
            model = base.variant(plan_with(prepared.plan, dict.fromkeys(floats, FLOAT), prepared.freedom()))
        if tried and tried[-1][STOP_FLAG]:
            return model, tried
        if floats not in known:
            known[floats] = (True, 0.0) if model is None else judge(model)
        answer = called("update_quant_config of the strategy", strategy.update_quant_config, known[floats])
        wanted = _checked_answer(answer, base.layers)
        tried.append({"metric_eval": [*known[floats]], STOP_FLAG: bool(answer[STOP_FLAG]), ROLL_BACK_CONFIG: wanted})
    raise EvaluatorError(
        f"the strategy was asked {len(tried)} times and named only {counted(len(known), 'config')}: "
        f'update_quant_config must return "{STOP_FLAG}": True once it has chosen'
    )


def _checked_answer(answer: Any, layers: Sequence[str]) -> dict[str, bool]:  # noqa: ANN401  what a user's class returns
    if not isinstance(answer, dict) or STOP_FLAG not in answer or not isinstance(answer.get(ROLL_BACK_CONFIG), dict):
        raise EvaluatorError(
            f'update_quant_config of the strategy returned {answer!r:.80}; expected {{"{STOP_FLAG}": True or False, '
            f'"{ROLL_BACK_CONFIG}": {{layer: whether it is quantized}}}}'
        )
    wanted = answer[ROLL_BACK_CONFIG]
    return {name: bool(wanted.get(name, True)) for name in layers}


class AccuracyBasedAutoCalibrationBase(ABC):
    """The calibration as every framework has it: calibrate, rank the layers, roll back, write what was found.

    Args:
        model_evaluator: An object of a class derived from ``AutoCalibrationEvaluatorBase``.
        strategy: A name, or an object of a class derived from ``AutoCalibrationStrategyBase``.
        sensitivity: A name, or an object of a class derived from ``SensitivityBase``.

    Raises:
        ArgumentError, CalibrationError: An object is of another class, or a name is unknown.
    """

    def __init__(self, model_evaluator: object, strategy: object, sensitivity: object) -> None:
        self.strategy, self.sensitivity = checked_objects(model_evaluator, strategy, sensitivity)
        self._evaluator: Any = model_evaluator

    @abstractmethod
    def calibrated(self, evaluator: EvaluatorCalls) -> QuantizedModel:
        """The model, calibrated by the evaluator's own loop."""

    @abstractmethod
    def ranking(self, base: QuantizedModel) -> dict[str, float]:
        """How near each quantized layer is to the float one, on the inputs that it gets in the float model."""

    @abstractmethod
    def evaluated(self, evaluator: EvaluatorCalls, quantized: QuantizedModel) -> tuple[bool, float]:
        """Whether a model is good enough, and what it loses."""

    def run(self, model: Sequence[Any], config: bytes, folder: Path) -> QuantizedModel | None:
        """The model with which the strategy ends; None: every layer is float in it, so there is no quantized model.

        Args:
            model: The float model, as it is handed to the evaluator.
            config: The user's JSON config.
            folder: Of the ranking and the final config.
        """
        evaluator = EvaluatorCalls(self._evaluator, *model)
        base = self.calibrated(evaluator)
        ranking = self.ranking(base)
        ordered = [[*each] for each in sorted(ranking.items(), key=lambda item: item[1])]
        atomic.write_text(folder / RANKING, _json(ordered))
        found, tried = rolled_back(base, self.strategy, ranking, partial(self.evaluated, evaluator))
        _write_outcome(folder, config, base, found, tried)
        if found is not None:
            logger.info("metric of the float model %s, of the result %s", evaluator.original, evaluator.metric)
        return found


def _write_outcome(
    folder: Path, config: bytes, base: QuantizedModel, found: QuantizedModel | None, tried: Sequence[Mapping[str, Any]]
) -> None:
    """Write what was tried, and the user's JSON config with the layers of the result."""
    atomic.write_text(Path(FOLDER) / HISTORY, "".join(map(_json, tried)))
    final = json.loads(config)
    for name in base.layers:
        final[name]["quant_enable"] = found is not None and name in found.layers
    atomic.write_text(folder / FINAL_CONFIG, _json(final))
    if found is None:
        logger.warning("every layer had to be rolled back to float, so no quantized model is written")


def _json(content: object) -> str:
    return json.dumps(content, indent=4, separators=(",", ":"), ensure_ascii=False)
