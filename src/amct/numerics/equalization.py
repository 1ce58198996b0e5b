"""Cross-layer equalization: the factors that make the channel ranges of an activation equal, and their expected gain.

All channels of a tensor share one quantization step, which the largest channel determines. Dividing a channel by a
positive factor in the layer that produces it and multiplying it again in the weights of its consumers changes nothing
in float. The producer loses nothing, because its weights have one scale per output channel, nor does a depthwise
consumer. Other consumers have one scale for all input channels of a row, so their weight error may grow. Both effects
are estimated here as quantization noise in the outputs of the consumers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.numerics.rounding import RoundingNoise

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

EXPONENTS = (0.25, 0.5, 0.75, 1.0)
FLOORS = (1 / 2, 1 / 4, 1 / 8, 1 / 32)
"""Smallest factors tried. No channel is enlarged more than 32 times: few samples may underestimate its range."""
MAX_NOISE_RATIO = 0.99
"""Factors are used only if they reduce the noise to less than this part of it."""


@dataclass(frozen=True, kw_only=True)
class ChannelRanges:
    """Statistics of each channel of a tensor, ``[C]`` each.

    Attributes:
        low: Minimum, at most 0.
        high: Maximum, at least 0; ``low`` and ``high`` determine the step of the tensor.
        typical: Largest magnitude within a sample, averaged over the samples, so that one outlier has little influence.
        variance: Variance of the values.
    """

    low: Tensor
    high: Tensor
    typical: Tensor
    variance: Tensor


class ChannelStatistics:
    """Accumulates ``ChannelRanges`` of a tensor ``[N, C, ...]`` over batches; memory does not grow with the data."""

    def __init__(self) -> None:
        self._values = 0
        self._sample_count = 0
        self._extremes: tuple[Tensor, Tensor] | None = None
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, x: Tensor) -> None:
        """Add a batch ``[N, C, ...]``."""
        values = x.detach().reshape(x.shape[0], x.shape[1], -1).double()
        low, high = torch.aminmax(values, dim=2)
        sums = (torch.maximum(high, -low).sum(0), values.sum((0, 2)), values.square().sum((0, 2)))
        extremes = low.amin(0).clamp(max=0), high.amax(0).clamp(min=0)
        if self._sums is None or self._extremes is None:
            self._sums, self._extremes = sums, extremes
        else:
            self._sums = self._sums[0] + sums[0], self._sums[1] + sums[1], self._sums[2] + sums[2]
            self._extremes = (
                torch.minimum(self._extremes[0], extremes[0]),
                torch.maximum(self._extremes[1], extremes[1]),
            )
        self._values += values.shape[0] * values.shape[2]
        self._sample_count += values.shape[0]

    def result(self) -> ChannelRanges:
        """Return the statistics of all channels."""
        assert self._sums is not None, "no batch was added"
        assert self._extremes is not None
        largest, total, squares = self._sums
        mean = total / self._values
        return ChannelRanges(
            low=self._extremes[0],
            high=self._extremes[1],
            typical=largest / self._sample_count,
            variance=(squares / self._values - mean.square()).clamp(min=0),
        )


class ConsumerNoise:
    """A layer that consumes the channels: estimates the noise that quantization adds to its outputs.

    Args:
        weight: ``[groups, Cout/groups, Cin/groups, kernel positions]``.
        ranges: Statistics of its input channels, ``[Cin]``.
        one_scale: Whether all output channels share one weight scale.
    """

    def __init__(self, weight: Tensor, ranges: ChannelRanges, *, one_scale: bool = False) -> None:
        self.ranges = ranges
        self.factors = torch.ones_like(ranges.variance)
        self._noise = RoundingNoise(weight.double(), ranges.low, ranges.high, ranges.variance, one_scale=one_scale)

    def with_factors(self, factors: Tensor, first: int) -> Tensor:
        """Return the factors of all channels ``[Cin]``, with those from ``first`` on replaced by ``factors``."""
        changed = self.factors.clone()
        changed[first : first + factors.numel()] = factors
        return changed

    def noise(self, factors: Tensor) -> float:
        """Return the power of the quantization noise in the outputs when input channels are divided by ``factors``."""
        return self._noise.power(factors)


def choose_factors(consumers: Sequence[tuple[ConsumerNoise, int]], count: int) -> Tensor | None:
    """Return the factors ``[count]`` to divide the output channels of a layer by, or None where nothing is gained.

    Args:
        consumers: The consumers of these channels, each with the index of the first one among its input channels; their
            factors are updated.
        count: Number of channels.
    """
    shares = _shares(consumers, count)
    if shares is None:
        return None
    plain = torch.ones_like(shares)
    best, least = plain, _noise(consumers, plain) * MAX_NOISE_RATIO
    for candidate in _candidates(shares):
        noise = _noise(consumers, candidate)
        if noise < least:
            best, least = candidate, noise
    if best is plain:
        return None
    for consumer, first in consumers:
        consumer.factors = consumer.with_factors(best, first)
    return best


def _shares(consumers: Sequence[tuple[ConsumerNoise, int]], count: int) -> Tensor | None:
    """Return the typical magnitude of each channel relative to the largest channel that shares its step."""
    found = []
    for consumer, first in consumers:
        typical = consumer.ranges.typical / consumer.factors
        largest = typical.max()
        if not bool(largest > 0) or not bool(torch.isfinite(largest)):
            return None
        found.append(typical[first : first + count] / largest)
    return torch.stack(found).amax(0)


def _candidates(shares: Tensor) -> Iterable[Tensor]:
    always_zero = shares == 0  # the range of such a channel is unknown, so its factor stays 1
    for exponent in EXPONENTS:
        for floor in FLOORS:
            yield shares.pow(exponent).clamp(min=floor, max=1.0).masked_fill(always_zero, 1.0)


def _noise(consumers: Sequence[tuple[ConsumerNoise, int]], factors: Tensor) -> float:
    return sum(consumer.noise(consumer.with_factors(factors, first)) for consumer, first in consumers)
