"""What changes the weights: the update rule of each solver type and the learning-rate policies, as Caffe computes them.

A rule gets the gradient (clipped, normalized, with weight decay), the history tensors of one parameter, which it
changes in place, and the learning rate of that parameter. It returns the value to subtract from the weights.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from amct.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from torch import Tensor

    from amct.caffe.engine.messages import ProtoMessage

    Update = Callable[[Tensor, Sequence[Tensor], float, ProtoMessage, int], Tensor]
    Factor: TypeAlias = np.float32 | np.float64


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One solver type."""

    name: str
    update: Update
    """``(gradient, histories, rate, solver parameter, iteration) -> value to subtract``."""
    histories: int = 1
    """The number of history tensors per parameter."""
    check: Callable[[ProtoMessage], None] = lambda _: None
    """Raises ConfigError if the solver's settings are invalid for the rule."""


def _sgd(gradient: Tensor, histories: Sequence[Tensor], rate: float, parameter: ProtoMessage, _: int) -> Tensor:
    """Return history = momentum * history + rate * gradient; unlike in torch the rate is part of the history."""
    (history,) = histories
    history.mul_(parameter.momentum).add_(gradient, alpha=rate)
    return history.clone()


def _nesterov(gradient: Tensor, histories: Sequence[Tensor], rate: float, parameter: ProtoMessage, _: int) -> Tensor:
    """(1 + momentum) * new history - momentum * old history."""
    (history,) = histories
    momentum = parameter.momentum
    before = history.clone()
    history.mul_(momentum).add_(gradient, alpha=rate)
    return before.mul_(-momentum).add_(history, alpha=float32(1 + momentum))


def _adagrad(gradient: Tensor, histories: Sequence[Tensor], rate: float, parameter: ProtoMessage, _: int) -> Tensor:
    (history,) = histories
    history.addcmul_(gradient, gradient)
    return gradient.div(history.sqrt().add_(parameter.delta)).mul_(rate)


def _rmsprop(gradient: Tensor, histories: Sequence[Tensor], rate: float, parameter: ProtoMessage, _: int) -> Tensor:
    (history,) = histories
    decay = parameter.rms_decay
    history.mul_(decay).addcmul_(gradient, gradient, value=float32(1 - decay))
    return gradient.div(history.sqrt().add_(parameter.delta)).mul_(rate)


def _adadelta(gradient: Tensor, histories: Sequence[Tensor], rate: float, parameter: ProtoMessage, _: int) -> Tensor:
    gradients, updates = histories
    momentum, delta = parameter.momentum, parameter.delta
    gradients.mul_(momentum).addcmul_(gradient, gradient, value=float32(1 - momentum))
    update = updates.add(delta).div_(gradients.add(delta)).sqrt_().mul_(gradient)
    updates.mul_(momentum).addcmul_(update, update, value=float32(1 - momentum))
    return update.mul_(rate)


def _adam(
    gradient: Tensor, histories: Sequence[Tensor], rate: float, parameter: ProtoMessage, iteration: int
) -> Tensor:
    """Adam with bias correction in the rate; ``delta`` is added to the uncorrected square root."""
    first, second = histories
    beta1, beta2 = parameter.momentum, parameter.momentum2
    first.mul_(beta1).add_(gradient, alpha=float32(1 - beta1))
    second.mul_(beta2).addcmul_(gradient, gradient, value=float32(1 - beta2))
    step = iteration + 1
    correction = float32(math.sqrt(1 - beta2**step) / (1 - beta1**step))
    return first.div(second.sqrt().add_(parameter.delta)).mul_(float32(rate * correction))


def float32(value: float) -> float:
    """Round to float32, as the constants of a C++ float solver are."""
    return float(np.float32(value))


def _check_adagrad(parameter: ProtoMessage) -> None:
    if parameter.momentum != 0:
        raise _momentum_error("AdaGrad", parameter)


def _check_rmsprop(parameter: ProtoMessage) -> None:
    if parameter.momentum != 0:
        raise _momentum_error("RMSProp", parameter)
    if not 0 <= parameter.rms_decay < 1:
        raise ConfigError(f"rms_decay should lie between 0 and 1 (1 excluded), got {parameter.rms_decay:g}")


def _check_adam(parameter: ProtoMessage) -> None:
    for name in ("momentum", "momentum2"):
        value = getattr(parameter, name)
        if not 0 <= value < 1:
            raise ConfigError(f"Adam: {name} should lie between 0 and 1 (1 excluded), got {value:g}")


def _momentum_error(name: str, parameter: ProtoMessage) -> ConfigError:
    return ConfigError(
        f"Momentum cannot be used with {name}: momentum must be 0, got {parameter.momentum:g}. Remove momentum from "
        "the solver"
    )


RULES = {
    rule.name: rule
    for rule in (
        Rule(name="SGD", update=_sgd),
        Rule(name="Nesterov", update=_nesterov),
        Rule(name="AdaGrad", update=_adagrad, check=_check_adagrad),
        Rule(name="RMSProp", update=_rmsprop, check=_check_rmsprop),
        Rule(name="AdaDelta", update=_adadelta, histories=2),
        Rule(name="Adam", update=_adam, histories=2, check=_check_adam),
    )
}


def rule_of(name: str) -> Rule:
    """The rule of a solver type.

    Raises:
        ConfigError: The type is unknown.
    """
    rule = RULES.get(name)
    if rule is None:
        raise ConfigError(
            f"Unknown solver type: {name} (known types: {', '.join(sorted(RULES))}).{did_you_mean(name, RULES)}"
        )
    return rule


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
