"""The learned rounding of AdaRound: a value between floor and ceiling per weight, driven to one of them over time.

A weight in steps of its scale is ``floor + h`` with ``h = clamp(1.2 · sigmoid(alpha) - 0.1, 0, 1)``. The regularizer
``Σ 1 - |2h - 1|^beta`` is zero when all h are 0 or 1; beta falls from ``beta_range[0]`` to ``beta_range[1]`` along
half a cosine, after a warm start without any regularizer.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amct.numerics.affine import integer_range
from amct.numerics.settings import AdaRoundSettings

STRETCH = 1.2
SHIFT = -0.1
BETAS = (0.9, 0.999)
EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class Learning(AdaRoundSettings):
    """The settings of AdaRound, and how its learning goes beyond what a config says."""

    learning_rate: float = 1e-3
    batch_size: int = 32
    fast: bool = False
    """Use the Gram matrix of the layer's input where that is cheaper than forwards; ignores the activation after it."""


class SoftRounding:
    """The rounding of one weight as rows ``[Cout, K]``; ``alpha`` is the learned parameter."""

    def __init__(self, rows: Tensor, scale: Tensor, bits: int) -> None:
        self.scale = scale.detach().float().reshape(-1, 1)
        self.lowest, self.highest = integer_range(bits)
        steps = rows.detach().float() * self.scale.reciprocal()
        self.nearest = steps.round().clamp(self.lowest, self.highest)
        self.floor = steps.floor()
        rest = steps - self.floor
        self.alpha = -torch.log(STRETCH / (rest - SHIFT) - 1)
        # A weight beyond the grid is clipped for every h, so its gradient is zero.
        self.step = self.scale * ((self.floor >= self.lowest) & (self.floor < self.highest))
        self.base = self.floor.clamp(self.lowest, self.highest) * self.scale

    def part(self, rows: slice) -> SoftRounding:
        """Return the rounding of some rows, which is learned independently of this one."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):  # all of them have a row for each output channel
                setattr(part, name, value[rows].clone())
        return part

    def h(self) -> Tensor:
        """Return the distance of each weight from its floor, 0..1."""
        return _stretched(torch.sigmoid(self.alpha)).clamp_(0, 1)

    def soft(self, sigmoid: Tensor | None = None) -> Tensor:
        """Return the soft-rounded weights, in real values, used during the learning.

        ``sigmoid`` is that of ``alpha``, if the caller has it already.
        """
        h = _stretched(torch.sigmoid(self.alpha) if sigmoid is None else sigmoid).clamp_(0, 1)
        return torch.addcmul(self.base, h, self.step)

    def hard(self) -> Tensor:
        """Return the final integers: the ceiling where ``h >= 0.5``, else the floor."""
        return (self.floor + (self.h() >= 0.5)).clamp(self.lowest, self.highest)

    def gradient(
        self, weight_gradient: Tensor, beta: float | None, reg_param: float, sigmoid: Tensor | None = None
    ) -> Tensor:
        """Return d(loss + regularizer)/d(alpha) from d(loss)/d(weight); same as autograd, in fewer passes.

        ``sigmoid`` is that of ``alpha``, if the caller has it already.
        """
        sigmoid = torch.sigmoid(self.alpha) if sigmoid is None else sigmoid
        stretched = _stretched(sigmoid)
        result = weight_gradient * self.step
        if beta is not None:
            centred = stretched.mul(2).sub_(1)  # beyond 0..1 the gradient is dropped below
            # |centred|^(beta - 1) by log and exp, which torch vectorizes, unlike pow.
            power = centred.abs().log_().mul_(beta - 1).exp_()
            result.sub_(power.copysign_(centred), alpha=2 * beta * reg_param)
        inner: Tensor = torch.ops.aten.hardtanh_backward(result, stretched, 0.0, 1.0)
        slope: Tensor = torch.ops.aten.sigmoid_backward(inner, sigmoid)
        return slope.mul_(STRETCH)


class Adam:
    """Adam with torch's defaults for one tensor: the same steps as ``torch.optim.Adam``, without its bookkeeping.

    For small weights that bookkeeping costs as much as the rest of an iteration.
    """

    def __init__(self, parameter: Tensor, learning_rate: float) -> None:
        self._parameter, self._rate = parameter, learning_rate
        self._mean, self._square = torch.zeros_like(parameter), torch.zeros_like(parameter)
        self.steps = 0

    def step(self, gradient: Tensor) -> None:
        """Change the parameter in place."""
        self.steps += 1
        self._mean.lerp_(gradient, 1 - BETAS[0])
        self._square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        first, second = (1 - beta**self.steps for beta in BETAS)
        divisor = self._square.sqrt().div_(math.sqrt(second)).add_(EPSILON)
        self._parameter.addcdiv_(self._mean, divisor, value=-self._rate / first)


def _stretched(sigmoid: Tensor) -> Tensor:
    """1.2 · sigmoid - 0.1, a new tensor."""
    return sigmoid.mul(STRETCH).add_(SHIFT)
