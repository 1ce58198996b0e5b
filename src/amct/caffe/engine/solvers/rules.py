"""The update rule of each solver type: Caffe's formulas, in Caffe's order, in float32.

A rule gets the gradient (clipped, normalized, with weight decay), the history tensors of one parameter, which it
changes in place, and the learning rate of that parameter. It returns the value to subtract from the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from amct.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from amct.caffe.engine.messages import ProtoMessage

    Update = Callable[[Tensor, Sequence[Tensor], float, ProtoMessage, int], Tensor]


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
