"""Caffe's learning-rate policies, computed in Caffe's precision."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from amct.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from amct.caffe.engine.messages import ProtoMessage

    Factor: TypeAlias = np.float32 | np.float64

logger = logging.getLogger(__name__)


def learning_rate(parameter: ProtoMessage, iteration: int, current_step: int) -> tuple[float, int]:
    """The learning rate of an iteration, and the step reached by ``step`` and ``multistep``.

    As in Caffe ``multistep`` advances by at most one step per call.

    Args:
        parameter: The SolverParameter.
        iteration: The number of updates made.
        current_step: The step reached so far.

    Raises:
        ConfigError: The policy is unknown, or one of its numbers is out of range.
    """
    policy = _POLICIES.get(parameter.lr_policy)
    if policy is None:
        raise ConfigError(
            f'Unknown learning rate policy: "{parameter.lr_policy}".{did_you_mean(parameter.lr_policy, _POLICIES)} '
            f"Set lr_policy in the solver to one of: {', '.join(sorted(_POLICIES))}"
        )
    factor, step = policy(parameter, iteration, current_step)
    # C++ multiplies in the type of the factor: double for an integer exponent, float for a fractional one.
    return float(np.float32(type(factor)(parameter.base_lr) * factor)), step


def _fixed(_: ProtoMessage, __: int, current_step: int) -> tuple[Factor, int]:
    return np.float32(1), current_step


def _step(parameter: ProtoMessage, iteration: int, _: int) -> tuple[Factor, int]:
    _check_stepsize(parameter)
    _check_gamma(parameter)
    step = iteration // parameter.stepsize
    return _power(parameter.gamma, step), step


def _exp(parameter: ProtoMessage, iteration: int, current_step: int) -> tuple[Factor, int]:
    _check_gamma(parameter)
    return _power(parameter.gamma, iteration), current_step


def _inv(parameter: ProtoMessage, iteration: int, current_step: int) -> tuple[Factor, int]:
    _check_gamma(parameter)
    grown = np.float32(1) + np.float32(parameter.gamma) * np.float32(iteration)
    return np.float32(_power(float(grown), -parameter.power)), current_step


def _multistep(parameter: ProtoMessage, iteration: int, current_step: int) -> tuple[Factor, int]:
    _check_gamma(parameter)
    values = parameter.stepvalue
    if current_step < len(values) and iteration >= values[current_step]:
        current_step += 1
        logger.info("MultiStep Status: Iteration %d, step = %d", iteration, current_step)
    return _power(parameter.gamma, current_step), current_step


def _poly(parameter: ProtoMessage, iteration: int, current_step: int) -> tuple[Factor, int]:
    if parameter.max_iter <= 0:
        raise ConfigError(f"lr_policy poly needs max_iter > 0, got {parameter.max_iter}")
    left = np.float32(1) - np.float32(iteration) / np.float32(parameter.max_iter)
    return np.float32(_power(float(left), parameter.power)), current_step


def _sigmoid(parameter: ProtoMessage, iteration: int, current_step: int) -> tuple[Factor, int]:
    _check_gamma(parameter)
    _check_stepsize(parameter)
    distance = np.float32(iteration) - np.float32(parameter.stepsize)
    exponent = float(-np.float32(parameter.gamma) * distance)
    grown = math.exp(exponent) if exponent < _LARGEST_EXPONENT else math.inf
    return np.float32(1) / (np.float32(1) + np.float32(grown)), current_step


_LARGEST_EXPONENT = 88.0  # exp(89) overflows float32
_POLICIES: dict[str, Callable[[ProtoMessage, int, int], tuple[Factor, int]]] = {
    "fixed": _fixed,
    "step": _step,
    "exp": _exp,
    "inv": _inv,
    "multistep": _multistep,
    "poly": _poly,
    "sigmoid": _sigmoid,
}


def _power(base: float, exponent: float) -> np.float64:
    """C's pow: NaN for a negative base and a fractional exponent (poly beyond max_iter), inf on overflow."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        power: np.float64 = np.float64(base) ** np.float64(exponent)
        return power


def _check_gamma(parameter: ProtoMessage) -> None:
    if parameter.gamma < 0:
        raise ConfigError(f"lr_policy {parameter.lr_policy} needs gamma >= 0, got {parameter.gamma:g}")


def _check_stepsize(parameter: ProtoMessage) -> None:
    if parameter.stepsize <= 0:
        raise ConfigError(f"lr_policy {parameter.lr_policy} needs stepsize > 0, got {parameter.stepsize}")
