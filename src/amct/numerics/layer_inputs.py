"""What layers read, channel by channel: exact sums, and the observer of means and ranges that is made of them.

Exact sums of float32 numbers: the same bits in whatever order and in whatever parts they are added.

A sum is an integer in units of the smallest float32 number, 2^-149, held in digits of 32 bits: an int64 per digit, so
that 2^31 numbers can be added before a digit overflows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from amct.errors import ArgumentError
from amct.numerics.affine import SymmetricScale
from amct.numerics.balancing import balance_factors
from amct.numerics.counts.compiled import compiled
from amct.numerics.observer import State, checked_array, finite_range
from amct.numerics.qparams import Observed
from amct.numerics.rounding import RoundingNoise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_UNIT = 149  # every float32 number is a multiple of 2^-149
_FRACTION = 23
_DIGIT = 32
_DIGITS = 10  # of float32 numbers up to 2^128, with room for the sign and the sum of 2^31 of them
_LOW = (1 << _DIGIT) - 1


class ExactSum:
    """The sums of many float32 vectors of one length, element by element."""

    def __init__(self, size: int) -> None:
        self.digits: NDArray[np.int64] = np.zeros((size, _DIGITS), np.int64)

    def add(self, values: NDArray[Any]) -> None:
        """Add a vector of finite float32 numbers."""
        add_exactly(np.ascontiguousarray(values, np.float32), self.digits)

    def merge(self, other: ExactSum) -> None:
        """Add the sums of ``other``."""
        self.digits = self.digits + other.digits

    def value(self) -> NDArray[np.float64]:
        """Return the sums in float64; their relative error is below 2^-51."""
        return _total(self.digits)


@compiled
def add_exactly(values: NDArray[Any], digits: NDArray[np.int64]) -> None:
    """Add a vector of finite float32 numbers to the digits of an ``ExactSum``."""
    bits = values.view(np.uint32)
    for row in range(bits.size):
        exponent = np.int64(bits[row] >> np.uint32(_FRACTION)) & 255
        fraction = np.int64(bits[row]) & ((1 << _FRACTION) - 1)
        whole, shift = (fraction | (1 << _FRACTION), exponent - 1) if exponent else (fraction, np.int64(0))
        moved = whole << (shift % _DIGIT)  # at most 24 + 31 bits
        moved = -moved if values[row] < 0 else moved
        digits[row, shift // _DIGIT] += moved & _LOW
        digits[row, shift // _DIGIT + 1] += moved >> _DIGIT


@compiled
def _total(digits: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums that rows of digits stand for."""
    totals = np.empty(digits.shape[0])
    for row in range(digits.shape[0]):
        own = digits[row].copy()
        _carry(own)
        negative = own[-1] < 0
        if negative:
            own = -own
            _carry(own)
        total = 0.0
        for place in range(_DIGITS):  # all digits are positive now, so nothing cancels
            total += np.float64(own[place]) * 2.0 ** (_DIGIT * place - _UNIT)
        totals[row] = -total if negative else total
    return totals


@compiled
def _carry(digits: NDArray[np.int64]) -> None:
    """Bring all digits of a number but the last into 0..2^32 - 1."""
    for place in range(_DIGITS - 1):
        digits[place + 1] += digits[place] >> _DIGIT
        digits[place] &= _LOW


# -- Per-channel statistics of a layer's input: means for bias correction, and balance factors -------------------------
#
# Means: rounding the weights shifts a layer's output by (rounded - exact) · mean, which bias correction subtracts.
#
# Balance factors: in transformers a few channels are far larger than the rest and determine the step of all. Dividing
# every channel by a factor and multiplying its column of the weight by it leaves the output unchanged. DMQ does so
# where
# the config enables it; here it is done for linear layers by default, where it reduces the expected noise considerably.


Values = TypeVar("Values", Tensor, "NDArray[np.float32]")

SAMPLES_PER_BATCH, POSITIONS_PER_SAMPLE = 16, 64
"""Subsampling of convolution inputs: enough for a mean, and cheap, because most of the input is not read again."""
STRENGTHS = tuple(np.arange(0.5, 0.95, 0.05).round(2).tolist())
"""Migration strengths tried; the one with the least expected noise is used."""
MIN_NOISE_REDUCTION = 2.0
"""Balancing is used only if it divides the noise by at least this: it costs one multiplication per value."""
WEIGHT_BITS = 7
"""Weight bits assumed for the expected noise: those that the file for every CPU has at worst."""


@dataclass(kw_only=True, eq=False)
class LayerInputObserver:
    """Observes the channels of a layer's input.

    Attributes:
        channel_axis: 1 for convolutions, -1 for linear layers.
        weight: Weights ``[Cout, Cin]`` of all linear layers with this input, concatenated; None: never balanced.
        bits: Bits of the input.
    """

    channel_axis: int
    weight: Tensor | None = None
    bits: int = 8
    batches: int = field(init=False, default=0)
    count: int = field(init=False, default=0, repr=False)
    _minimum: Tensor = field(init=False, repr=False)
    _maximum: Tensor = field(init=False, repr=False)
    _sum: ExactSum = field(init=False, repr=False)
    _squares: ExactSum = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._begin(0)

    def _begin(self, channels: int) -> None:
        self._minimum = self._maximum = torch.zeros(channels)
        self._sum, self._squares = ExactSum(channels), ExactSum(channels)

    def observe(self, x: Tensor) -> None:
        """Add one batch; the observed range always includes zero.

        Raises:
            ArgumentError: the number of channels changed.
            CalibrationError: the batch holds NaN or infinity.
        """
        if x.ndim <= max(self.channel_axis, 0):
            raise ArgumentError(
                f"expected an activation with channels on axis {self.channel_axis}, got {list(x.shape)}"
            )
        values = _numbers(x, sampled=self.channel_axis != -1)
        channels = values.shape[self.channel_axis]
        if self.batches == 0:
            self._begin(channels)
        if channels != self._minimum.numel():
            raise ArgumentError(f"expected {self._minimum.numel()} channels, got an activation {list(x.shape)}")
        if values.size:
            axis = self.channel_axis % values.ndim
            if not (values.ndim == 4 and axis == 1 and _add_image_sums(values, self._sum.digits)):
                self._add_sums(values, axis)
            self.count += values.size // channels
            if self.weight is not None:
                self._observe_spread(torch.from_numpy(values).reshape(-1, channels))
        self.batches += 1

    def _add_sums(self, values: NDArray[np.float32], axis: int) -> None:
        total = _channel_sums(values, axis).astype(np.float32)
        if not math.isfinite(total.sum()):
            finite_range(torch.from_numpy(values.reshape(1, -1)))  # raises with the counts of NaN and infinity
        self._sum.add(total)

    def _observe_spread(self, rows: Tensor) -> None:
        low, high = torch.aminmax(rows, dim=0)
        self._minimum = torch.minimum(self._minimum, low.cpu())
        self._maximum = torch.maximum(self._maximum, high.cpu())
        squares = rows.square().sum(0).clamp_(max=torch.finfo(torch.float32).max)  # of huge values they are infinite
        self._squares.add(squares.cpu().numpy())

    def begin_batch(self, number: int) -> None:
        """Tell the number of the next batch; the result does not depend on it."""

    def expect(self, values: int) -> None:
        """Tell the number of values of all processes; the result does not depend on it."""

    def merge(self, other: LayerInputObserver) -> None:
        """Add all data observed by ``other``, an observer of the same layers.

        Raises:
            ArgumentError: it has another number of channels.
        """
        if other.batches == 0:
            return
        if self.batches == 0:
            self._begin(other._minimum.numel())
        if self._minimum.numel() != other._minimum.numel():
            raise ArgumentError(f"expected {self._minimum.numel()} channels, got {other._minimum.numel()}")
        self.batches += other.batches
        self.count += other.count
        self._minimum = torch.minimum(self._minimum, other._minimum)
        self._maximum = torch.maximum(self._maximum, other._maximum)
        self._sum.merge(other._sum)
        self._squares.merge(other._squares)

    def state(self) -> State:
        """Return everything observed so far."""
        return {
            "seen": np.array([self.batches, self.count], np.int64),
            "minimum": self._minimum.numpy(),
            "maximum": self._maximum.numpy(),
            "sums": self._sum.digits,
            "squares": self._squares.digits,
        }

    def restore(self, state: State) -> None:
        """Replace everything observed so far by a state."""
        minimum = checked_array(state, "minimum", np.float32, (None,))
        maximum = checked_array(state, "maximum", np.float32, minimum.shape)
        self._begin(minimum.size)
        shape = self._sum.digits.shape
        sums, squares = (checked_array(state, name, np.int64, shape) for name in ("sums", "squares"))
        self.batches, self.count = checked_array(state, "seen", np.int64, (2,)).tolist()
        self._minimum, self._maximum = torch.from_numpy(minimum.copy()), torch.from_numpy(maximum.copy())
        self._sum.digits, self._squares.digits = sums.copy(), squares.copy()

    def result(self) -> Observed | None:
        """Return the means and, where useful, the balance factors and the balanced range; None without data."""
        if self.count == 0:
            return None
        balance = self._balance()
        divisor = torch.ones_like(self._minimum) if balance is None else balance
        found = Observed.from_range(
            (self._minimum / divisor).min(),
            (self._maximum / divisor).max(),
            self.bits,
            asymmetric=True,
            symmetric_scale=SymmetricScale.NEGATIVE_SIDE,
        )
        mean = torch.from_numpy(self._sum.value() / self.count).float()
        return replace(found, balance=None if balance is None else _six_digits(balance), mean=_six_digits(mean))

    def _balance(self) -> Tensor | None:
        if self.weight is None or not bool((self._maximum > self._minimum).any()):
            return None
        weight = self.weight.detach().float().cpu()
        largest = torch.maximum(-self._minimum, self._maximum)
        columns = torch.maximum(weight.amax(0), -weight.amin(0))  # |w| of all rows would be a copy of a large weight
        choices = [balance_factors(largest, columns, strength) for strength in STRENGTHS]
        noise = RoundingNoise(
            weight[None, :, :, None],
            self._minimum,
            self._maximum,
            torch.from_numpy(self._squares.value() / self.count),
            data_steps=2**self.bits - 1,
            weight_steps=2 ** (WEIGHT_BITS - 1) - 1,
        )
        noises = [noise.power(factors) for factors in choices]
        best = int(np.argmin(noises))
        unbalanced = noise.power(torch.ones_like(largest))
        helps = 0 < noises[best] * MIN_NOISE_REDUCTION <= unbalanced  # weights that are all zero make no noise
        return choices[best] if helps else None


def _six_digits(numbers: Tensor) -> Tensor:
    """The numbers as files show them, so that a model read from files is the one that was calibrated."""
    return torch.tensor([float(f"{number:.6g}") for number in numbers.tolist()], dtype=torch.float32)


def _channel_sums(values: NDArray[np.float32], axis: int) -> NDArray[np.float64]:
    if values.ndim == 4 and axis == 1:
        return _image_sums(values)
    others = tuple(other for other in range(values.ndim) if other != axis)
    sums: NDArray[np.float64] = values.sum(axis=others, dtype=np.float64)
    return sums


@compiled
def _image_sums(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sum of each channel of images ``[N, C, H, W]``; NumPy is slower, because no two axes lie together."""
    samples, channels, height, width = values.shape
    sums = np.zeros(channels)
    for sample in range(samples):
        for channel in range(channels):
            total = 0.0
            for row in range(height):
                for column in range(width):
                    total += np.float64(values[sample, channel, row, column])
            sums[channel] += total
    return sums


@compiled
def _add_image_sums(values: NDArray[np.float32], digits: NDArray[np.int64]) -> bool:
    """Add the sum of each channel of images to exact sums; False, with nothing added, if one is not finite."""
    sums = _image_sums(values).astype(np.float32)
    if not np.isfinite(sums).all():
        return False
    add_exactly(sums, digits)
    return True


def _numbers(x: Tensor, *, sampled: bool) -> NDArray[np.float32]:
    """Return the values, or a sample of them, as an array."""
    if x.dtype == torch.float32 and x.device.type == "cpu":
        values = (x.detach() if x.requires_grad else x).numpy()
        return _subsample(values) if sampled else values  # NumPy cuts faster
    return (_subsample(x) if sampled else x).detach().float().cpu().numpy()


def _subsample(x: Values) -> Values:
    """Return evenly spaced samples of a convolution input ``[N, C, ...]`` and evenly spaced positions of each."""
    samples, step = _steps(x.shape)
    return x[(slice(None, None, samples), slice(None)) + (slice(step // 2, None, step),) * (x.ndim - 2)]


def _steps(shape: Sequence[int]) -> tuple[int, int]:
    """Return the distance of the samples of a convolution input ``[N, C, ...]``, and that of the positions of each."""
    positions = math.prod(shape[2:]) / POSITIONS_PER_SAMPLE
    step = max(1, math.ceil(positions ** (1 / max(len(shape) - 2, 1))))
    return max(1, math.ceil(shape[0] / SAMPLES_PER_BATCH)), step
