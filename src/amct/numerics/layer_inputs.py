"""What is known of the channels of a layer's input, for files of ours that may use it beside the record.

The mean of every channel: weights rounded to few bits shift a layer's output by (rounded - exact) · mean, which its
bias can take back.

Balance factors, where a few channels far larger than the rest cost all the others, as in transformers: dividing every
channel by a factor and multiplying its column of the weight by it changes nothing, but moves the difficulty to the
weights, which have a scale per output channel. DMQ does the same when the user asks for it; this is done unasked, for
linear layers, when it makes the expected noise much smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from amct.errors import ArgumentError
from amct.numerics.affine import SymmetricScale
from amct.numerics.dmq import balance_factors
from amct.numerics.observer import ActivationFactors, finite_range

PICTURES, POSITIONS = 16, 64
"""So many of a batch, and of a picture (or series), are looked at: enough for a mean, and cheap beside the convolution
that reads them, because most of the input need not be fetched from memory again."""
STRENGTHS = tuple(np.arange(0.5, 0.95, 0.05).round(2).tolist())
"""How much of the difficulty the weights take: the best of these is found from the expected noise."""
WORTH_IT = 2.0
"""How many times smaller the noise must become: a balanced input costs a multiplication per value."""
WEIGHT_BITS = 7
"""Of the weights that the noise is expected with: those of files that are right on every CPU."""


@dataclass(kw_only=True, eq=False)
class LayerInputObserver:
    """Watches an input channel by channel.

    Attributes:
        channel_axis: 1 for convolutions, -1 for linear layers.
        weight: Of all linear layers that read the input, ``[Cout, Cin]``, one under the other; None: never balanced.
        bits: Of the input.
    """

    channel_axis: int
    weight: Tensor | None = None
    bits: int = 8
    batches: int = field(init=False, default=0)
    _count: int = field(init=False, default=0, repr=False)
    _minimum: Tensor = field(init=False, repr=False)
    _maximum: Tensor = field(init=False, repr=False)
    _sum: Tensor = field(init=False, repr=False)
    _squares: Tensor = field(init=False, repr=False)

    def observe(self, x: Tensor) -> None:
        """Take in one batch; zero counts as seen.

        Raises:
            ArgumentError: other channels than before.
            CalibrationError: NaN or infinity.
        """
        x = x.detach()
        channels = x.shape[self.channel_axis]
        if self.batches == 0:
            self._minimum = self._maximum = torch.zeros(channels)
            self._sum = self._squares = torch.zeros(channels, dtype=torch.float64)
        if channels != self._sum.numel():
            raise ArgumentError(f"expected {self._sum.numel()} channels, got an activation {list(x.shape)}")
        x = x.float() if self.channel_axis == -1 else _thinned(x).float()
        if x.numel():
            others = [axis for axis in range(x.ndim) if axis != self.channel_axis % x.ndim]
            total = x.sum(others)
            if not math.isfinite(float(total.sum())):
                finite_range(x.reshape(1, -1))  # says what is wrong
            self._sum = self._sum + total.double().cpu()
            self._count += x.numel() // channels
            if self.weight is not None:
                self._observe_spread(x.reshape(-1, channels))
        self.batches += 1

    def _observe_spread(self, rows: Tensor) -> None:
        low, high = torch.aminmax(rows, dim=0)
        self._minimum = torch.minimum(self._minimum, low.cpu())
        self._maximum = torch.maximum(self._maximum, high.cpu())
        self._squares = self._squares + rows.square().sum(0).double().cpu()

    def result(self) -> ActivationFactors | None:
        """Means and, where it is worth it, balance with the range of the balanced input; None when nothing was seen."""
        if self._count == 0:
            return None
        balance = self._balance()
        divisor = torch.ones_like(self._minimum) if balance is None else balance
        found = ActivationFactors.from_range(
            (self._minimum / divisor).min(),
            (self._maximum / divisor).max(),
            self.bits,
            asymmetric=True,
            symmetric_scale=SymmetricScale.NEGATIVE_SIDE,
        )
        return replace(found, balance=balance, mean=(self._sum / self._count).float())

    def _balance(self) -> Tensor | None:
        if self.weight is None or not bool((self._maximum > self._minimum).any()):
            return None
        weight = self.weight.detach().float().cpu()
        largest = torch.maximum(-self._minimum, self._maximum)
        columns = weight.abs().amax(0)
        choices = [balance_factors(largest, columns, strength) for strength in STRENGTHS]
        noises = [self._noise(weight, factors) for factors in choices]
        best = int(np.argmin(noises))
        plain = self._noise(weight, torch.ones_like(largest))
        return choices[best] if noises[best] * WORTH_IT <= plain else None

    def _noise(self, weight: Tensor, factors: Tensor) -> float:
        """The expected squared error of the outputs: rounding spreads evenly over a step, independent of the rest."""
        balanced = weight * factors
        width = float((self._maximum / factors).max() - (self._minimum / factors).min())
        of_input = (width / (2**self.bits - 1)) ** 2 * balanced.square().sum()
        steps = balanced.abs().amax(1) / (2 ** (WEIGHT_BITS - 1) - 1)
        power = self._squares / self._count / factors.double() ** 2
        return float(of_input + steps.square().sum() * power.sum()) / 12


def _thinned(x: Tensor) -> Tensor:
    """Some pictures of the input of a convolution and some positions of each, evenly spread."""
    places = x.ndim - 2
    x = x[:: max(1, math.ceil(x.shape[0] / PICTURES))]
    step = max(1, math.ceil((math.prod(x.shape[2:]) / POSITIONS) ** (1 / max(places, 1))))
    return x[(slice(None), slice(None)) + (slice(step // 2, None, step),) * places]
