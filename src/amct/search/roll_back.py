"""AMCT's classes for rolling layers back to float until an evaluator is content: evaluator, strategy, sensitivity.

Users derive from the three base classes. A ranking is a dict from layers to sensitivities, the lowest for the layer
that suffers most; a strategy answers each evaluation with which layers stay quantized.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from amct.errors import EvaluatorError
from amct.search.goal import checked_value

STOP_FLAG, ROLL_BACK_CONFIG = "stop_flag", "roll_back_config"


class AutoCalibrationEvaluatorBase(ABC):
    """What a user writes: how the model is calibrated, how it is evaluated, and when that is good enough."""

    @abstractmethod
    def calibration(self, model: Any) -> None:  # noqa: ANN401  the user's kind of model
        """Run the model on ``batch_num`` batches."""

    @abstractmethod
    def evaluate(self, model: Any) -> Any:  # noqa: ANN401  as above, and the user's kind of metric
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


def checked_metric(value: Any) -> Any:  # noqa: ANN401  what a user's function returns
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


def checked_judgement(value: Any) -> tuple[bool, float]:  # noqa: ANN401  what a user's function returns
    """What an evaluator says of a metric.

    Raises:
        EvaluatorError: It is no pair of a bool and a number.
    """
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[0], (bool, np.bool_)):
        raise EvaluatorError(f"metric_eval returned {value!r:.80}; expected (whether it is enough, the loss)")
    return bool(value[0]), checked_value(value[1], "metric_eval")
