"""The learned rounding of AdaRound: a value between floor and ceiling per weight, driven to one of them over time.

A weight in steps of its scale is ``floor + h · gap`` with ``h = clamp(1.2 · sigmoid(alpha) - 0.1, 0, 1)``; the gap to
the next integer is 1, or that to the next one of a table. The regularizer
``Σ 1 - |2h - 1|^beta`` is zero when all h are 0 or 1; beta falls from ``beta_range[0]`` to ``beta_range[1]`` along
half a cosine, after a warm start without any regularizer.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from amct.numerics.affine import integer_range
from amct.numerics.counts.compiled import compiled
from amct.numerics.settings import AdaRoundSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amct.numerics.gram import Unfolding

    Floats = NDArray[np.float32]

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
    """The rounding of one weight as rows ``[Cout, K]``; ``alpha`` is the learned parameter.

    Args:
        rows: The weight.
        scale: Of the integers, one per row.
        bits: Of the integers.
        table: The integers that a weight can become, ascending, a row of them for each row of the weight or one for
            all; None: all that have so many bits.
    """

    def __init__(self, rows: Tensor, scale: Tensor, bits: int, table: Tensor | None = None) -> None:
        self.scale = scale.detach().float().reshape(-1, 1)
        self.lowest, self.highest = integer_range(bits)
        steps = rows.detach().float() * self.scale.reciprocal()
        # A weight beyond the grid has a gap of 0: it is clipped for every h, so its gradient is zero.
        if table is None:
            floor = steps.floor()
            rest = steps - floor
            self.gap = ((floor >= self.lowest) & (floor < self.highest)).float()
            self.floor = floor.clamp(self.lowest, self.highest)
            self.nearest = steps.round().clamp(self.lowest, self.highest)
        else:
            self.floor, self.gap = _places_in(steps, table)
            rest = ((steps - self.floor) / self.gap.clamp(min=1)).clamp(0, 1)
            self.nearest = self.floor + self.gap * (rest > 0.5)
        self.alpha = -torch.log(STRETCH / (rest - SHIFT) - 1)
        self.step = self.scale * self.gap
        self.base = self.floor * self.scale

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
        return self.floor + self.gap * (self.h() >= 0.5)

    def other(self, hard: Tensor) -> Tensor:
        """Return for each weight of a rounding the integer that it is not."""
        return 2 * self.floor + self.gap - hard

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


def _places_in(steps: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The integer of a table below each value, and how far it is to the next one; beyond either end that and 0."""
    known = table.to(steps.device, torch.float32).expand(steps.shape[0], -1).contiguous()
    above = torch.searchsorted(known, steps.contiguous(), right=True)
    last = known.shape[1] - 1
    low = known.gather(1, (above - 1).clamp(0, last))
    return low, known.gather(1, above.clamp(0, last)) - low


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


# -- The steps of the fast mode: from the slope of the error to the next soft-rounded weights --------------------------
#
# ``TorchSteps`` runs on any device. On the CPU ``CompiledSteps`` computes the same in a few passes over the weights
# that
# stay in the cache; the layers are small, so that calling some thirty operations of torch takes longer than computing
# them. Each number depends on those at its own place only, by the same arithmetic wherever that is: rows that several
# processes learn have the same bits as when one learns all.


_F = np.float32
_ZERO, _ONE = _F(0), _F(1)
_BLOCK = 512  # numbers of one pass: all arrays of a block fit into the first cache
_SMALLEST = _F(1e-30)
_LARGEST_EXPONENT = _F(126)
_LN2, _LOG2E = _F(math.log(2)), _F(1 / math.log(2))
_ROOT_HALF_BITS = np.int32(0x3F3504F3)  # of sqrt(1/2), where the mantissas of the logarithm begin
_MANTISSA, _BIAS = np.int32(23), np.int32(127)
_C2, _C3, _C4, _C5, _C6, _C7 = (_F(1 / math.factorial(power)) for power in range(2, 8))
_L1, _L3, _L5, _L7, _L9 = (_F(2 / math.log(2) / power) for power in range(1, 10, 2))
_STRETCH, _SHIFT = _F(STRETCH), _F(SHIFT)
_KEPT, _KEPT_SQUARE = (_F(beta) for beta in BETAS)
_NEW, _NEW_SQUARE = (_F(1 - beta) for beta in BETAS)
_EPSILON = _F(EPSILON)


class Steps(Protocol):
    """Holds the soft-rounded weights ``[groups, Cout/groups, K]`` and moves them."""

    weight: Tensor

    def step(self, slope: Tensor, beta: float | None) -> None:
        """Take a step against d(error)/d(weight), with the regularizer's exponent, and update ``weight``."""

    def finish(self) -> None:
        """Put what was learned into the rounding."""


def steps_for(rounding: SoftRounding, unfolding: Unfolding, settings: Learning) -> Steps:
    """The steps for the device of the rounding."""
    kind = CompiledSteps if rounding.alpha.device.type == "cpu" else TorchSteps
    return kind(rounding, unfolding, settings)


class TorchSteps:
    """Steps with operations of torch."""

    def __init__(self, rounding: SoftRounding, unfolding: Unfolding, settings: Learning) -> None:
        self._rounding, self._unfolding, self._reg_param = rounding, unfolding, settings.reg_param
        self._adam = Adam(rounding.alpha, settings.learning_rate)
        self._refresh()

    def step(self, slope: Tensor, beta: float | None) -> None:
        """Take a step; see ``Steps``."""
        rows = self._unfolding.ungroup_rows(slope)
        self._adam.step(self._rounding.gradient(rows, beta, self._reg_param, self._sigmoid))
        self._refresh()

    def finish(self) -> None:
        """Nothing is left to do: the steps changed the rounding itself."""

    def _refresh(self) -> None:
        self._sigmoid = torch.sigmoid(self._rounding.alpha)
        self.weight = self._unfolding.group_rows(self._rounding.soft(self._sigmoid))


class CompiledSteps:
    """Steps with compiled loops, on the CPU."""

    def __init__(self, rounding: SoftRounding, unfolding: Unfolding, settings: Learning) -> None:
        self._rounding, self._unfolding, self._settings = rounding, unfolding, settings
        self._alpha, self._step, self._base = (
            self._flat(rows) for rows in (rounding.alpha, rounding.step, rounding.base)
        )
        self._mean, self._square, self._sigmoid = (np.zeros_like(self._alpha) for _ in range(3))
        self.weight = unfolding.group_rows(torch.empty_like(rounding.alpha)).contiguous()
        self._weight: Floats = self.weight.reshape(-1).numpy()
        self._count = 0
        _soften(self._alpha, self._base, self._step, self._sigmoid, self._weight)

    def step(self, slope: Tensor, beta: float | None) -> None:
        """Take a step; see ``Steps``."""
        self._count += 1
        first, second = (1 - kept**self._count for kept in BETAS)
        power, factor = (0.0, 0.0) if beta is None else (beta - 1, 2 * beta * self._settings.reg_param)
        _take_step(
            (self._alpha, self._mean, self._square, self._sigmoid, self._weight),
            (self._base, self._step, slope.reshape(-1).numpy()),
            _F(power),
            _F(factor),
            _F(self._settings.learning_rate / first),
            _F(1 / math.sqrt(second)),
        )

    def finish(self) -> None:
        """Put what was learned into the rounding."""
        learned = torch.from_numpy(self._alpha).reshape(self.weight.shape)
        self._rounding.alpha.copy_(self._unfolding.ungroup_rows(learned))

    def _flat(self, rows: Tensor) -> Floats:
        flat: Floats = self._unfolding.group_rows(rows).contiguous().reshape(-1).clone().numpy()
        return flat


# -- compiled. Loops of few arrays each, because a compiler vectorizes a loop only if few pairs of arrays can overlap.
# np.divide does not test for zero as ``/`` does in compiled code, which would keep a loop from being vectorized.


@compiled
def _take_step(
    learned: tuple[Floats, Floats, Floats, Floats, Floats],
    given: tuple[Floats, Floats, Floats],
    power: np.float32,
    factor: np.float32,
    rate: np.float32,
    correction: np.float32,
) -> None:
    alpha, mean, square, sigmoid, weight = learned
    base, step, slope = given
    gradient = np.empty(_BLOCK, np.float32)
    for begin in range(0, alpha.size, _BLOCK):
        end = min(alpha.size, begin + _BLOCK)
        here = gradient[: end - begin]
        if factor == _ZERO:
            _gradient(sigmoid[begin:end], slope[begin:end], step[begin:end], here)
        else:
            _regularized(sigmoid[begin:end], slope[begin:end], step[begin:end], power, factor, here)
        _average(here, mean[begin:end], square[begin:end])
        _move(alpha[begin:end], mean[begin:end], square[begin:end], rate, correction)
        _soften(alpha[begin:end], base[begin:end], step[begin:end], sigmoid[begin:end], weight[begin:end])


@compiled
def _gradient(sigmoid: Floats, slope: Floats, step: Floats, gradient: Floats) -> None:
    for i in range(sigmoid.size):
        s = sigmoid[i]
        stretched = s * _STRETCH + _SHIFT
        inner = slope[i] * step[i] * (s * (_ONE - s)) * _STRETCH
        gradient[i] = inner if (stretched > _ZERO) & (stretched < _ONE) else _ZERO


@compiled
def _regularized(
    sigmoid: Floats, slope: Floats, step: Floats, power: np.float32, factor: np.float32, gradient: Floats
) -> None:
    for i in range(sigmoid.size):
        s = sigmoid[i]
        stretched = s * _STRETCH + _SHIFT
        centred = stretched + stretched - _ONE
        pull = factor * _exp2(power * _log2(max(abs(centred), _SMALLEST)))
        inner = (slope[i] * step[i] - (pull if centred > _ZERO else -pull)) * (s * (_ONE - s)) * _STRETCH
        gradient[i] = inner if (stretched > _ZERO) & (stretched < _ONE) else _ZERO


@compiled
def _average(gradient: Floats, mean: Floats, square: Floats) -> None:
    for i in range(gradient.size):
        mean[i] = mean[i] * _KEPT + gradient[i] * _NEW
        square[i] = square[i] * _KEPT_SQUARE + gradient[i] * gradient[i] * _NEW_SQUARE


@compiled
def _move(alpha: Floats, mean: Floats, square: Floats, rate: np.float32, correction: np.float32) -> None:
    for i in range(alpha.size):
        alpha[i] -= np.divide(rate * mean[i], np.sqrt(square[i]) * correction + _EPSILON)


@compiled
def _soften(alpha: Floats, base: Floats, step: Floats, sigmoid: Floats, weight: Floats) -> None:
    for i in range(alpha.size):
        s = np.divide(_ONE, _ONE + _exp2(-alpha[i] * _LOG2E))
        sigmoid[i] = s
        weight[i] = base[i] + min(max(s * _STRETCH + _SHIFT, _ZERO), _ONE) * step[i]


@compiled
def _exp2(x: np.float32) -> np.float32:
    """2^x to 1e-7: the exponent's bits times a series for the rest. NumPy's own is called number by number here."""
    x = min(max(x, -_LARGEST_EXPONENT), _LARGEST_EXPONENT)
    whole = np.rint(x)
    rest = (x - whole) * _LN2
    series = _C7 * rest + _C6
    series = series * rest + _C5
    series = series * rest + _C4
    series = series * rest + _C3
    series = series * rest + _C2
    series = (series * rest + _ONE) * rest + _ONE
    power = np.int32(np.int32(np.int32(whole) + _BIAS) << _MANTISSA)
    result: np.float32 = series * np.int32(power).view(np.float32)
    return result


@compiled
def _log2(x: np.float32) -> np.float32:
    """The logarithm of a positive number to 5e-7: its exponent, and a series for a mantissa in sqrt(1/2)..sqrt(2)."""
    bits = np.float32(x).view(np.int32)
    exponent = np.int32(np.int32(bits - _ROOT_HALF_BITS) >> _MANTISSA)
    mantissa = np.int32(bits - np.int32(exponent << _MANTISSA)).view(np.float32)
    ratio = np.divide(mantissa - _ONE, mantissa + _ONE)
    square = ratio * ratio
    series = _L9 * square + _L7
    series = series * square + _L5
    series = series * square + _L3
    series = series * square + _L1
    result: np.float32 = series * ratio + np.float32(exponent)
    return result
