"""Per-channel statistics of a layer's input: means for bias correction, and balance factors.

Means: rounding the weights shifts a layer's output by (rounded - exact) · mean, which bias correction subtracts.

Balance factors: in transformers a few channels are far larger than the rest and determine the step of all. Dividing
every channel by a factor and multiplying its column of the weight by it leaves the output unchanged. DMQ does so where
the config enables it; here it is done for linear layers by default, where it reduces the expected noise considerably.
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
from amct.numerics.rounding_noise import RoundingNoise

SAMPLES_PER_BATCH, POSITIONS_PER_SAMPLE = 16, 64
"""Subsampling of convolution inputs: enough for a mean, and cheap, because most of the input is not read again."""
STRENGTHS = tuple(np.arange(0.5, 0.95, 0.05).round(2).tolist())
"""Migration strengths tried; the one with the least expected noise is used."""
MIN_NOISE_REDUCTION = 2.0
"""Balancing is used only if it divides the noise by at least this: it costs one multiplication per value."""
WEIGHT_BITS = 7
"""Weight bits assumed for the expected noise; 7-bit weights are computed correctly on every CPU."""


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
    _count: int = field(init=False, default=0, repr=False)
    _minimum: Tensor = field(init=False, repr=False)
    _maximum: Tensor = field(init=False, repr=False)
    _sum: Tensor = field(init=False, repr=False)
    _squares: Tensor = field(init=False, repr=False)

    def observe(self, x: Tensor) -> None:
        """Add one batch; the observed range always includes zero.

        Raises:
            ArgumentError: the number of channels changed.
            CalibrationError: the batch holds NaN or infinity.
        """
        x = x.detach()
        channels = x.shape[self.channel_axis]
        if self.batches == 0:
            self._minimum = self._maximum = torch.zeros(channels)
            self._sum = self._squares = torch.zeros(channels, dtype=torch.float64)
        if channels != self._sum.numel():
            raise ArgumentError(f"expected {self._sum.numel()} channels, got an activation {list(x.shape)}")
        x = x.float() if self.channel_axis == -1 else _subsample(x).float()
        if x.numel():
            others = [axis for axis in range(x.ndim) if axis != self.channel_axis % x.ndim]
            total = x.sum(others)
            if not math.isfinite(float(total.sum())):
                finite_range(x.reshape(1, -1))  # raises with the counts of NaN and infinity
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
        """Return the means and, where useful, the balance factors and the balanced range; None without data."""
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
        columns = torch.maximum(weight.amax(0), -weight.amin(0))  # |w| of all rows would be a copy of a large weight
        choices = [balance_factors(largest, columns, strength) for strength in STRENGTHS]
        noise = RoundingNoise(
            weight[None, :, :, None],
            self._minimum,
            self._maximum,
            self._squares / self._count,
            data_steps=2**self.bits - 1,
            weight_steps=2 ** (WEIGHT_BITS - 1) - 1,
        )
        noises = [noise.power(factors) for factors in choices]
        best = int(np.argmin(noises))
        unbalanced = noise.power(torch.ones_like(largest))
        helps = 0 < noises[best] * MIN_NOISE_REDUCTION <= unbalanced  # weights that are all zero make no noise
        return choices[best] if helps else None


def _subsample(x: Tensor) -> Tensor:
    """Return evenly spaced samples of a convolution input ``[N, C, ...]`` and evenly spaced positions of each."""
    places = x.ndim - 2
    x = x[:: max(1, math.ceil(x.shape[0] / SAMPLES_PER_BATCH))]
    step = max(1, math.ceil((math.prod(x.shape[2:]) / POSITIONS_PER_SAMPLE) ** (1 / max(places, 1))))
    return x[(slice(None), slice(None)) + (slice(step // 2, None, step),) * places]
