"""Channels of unequal size made equal before quantization: what the factors are, and what they are worth.

All channels of a tensor are rounded with one step, which the largest of them dictates. Between two layers that are
linear in each channel the sizes are free: dividing a channel by a positive number in the layer that makes it and
multiplying it again in the weights of the layers that read it changes nothing in float. It is free of charge for the
first layer, whose weights have a scale for each channel, and for depthwise readers; other readers have one scale for
all channels of a row, so what the data gains the weights may lose. Both are counted here as noise in the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

DATA_STEPS, WEIGHT_STEPS = 255.0, 127.0
EXPONENTS = (0.25, 0.5, 0.75, 1.0)
FLOORS = (1 / 2, 1 / 4, 1 / 8, 1 / 32)
"""No channel is enlarged more than 32 times: a size that was seen in a few pictures may be an understatement."""
WORTHWHILE = 0.99


@dataclass(frozen=True, kw_only=True)
class ChannelSizes:
    """What was seen of each channel of a tensor.

    Attributes:
        low: The least values, at most 0.
        high: The largest values, at least 0; with ``low`` they decide the step of the tensor.
        typical: The largest size in a picture, on average over the pictures: one outlier does not make a channel large.
        variance: Of the values.
    """

    low: Tensor
    high: Tensor
    typical: Tensor
    variance: Tensor


class ChannelStatistics:
    """Gathers the sizes of the channels of a tensor, ``[N, C, ...]``, over batches; holds a few numbers for each."""

    def __init__(self) -> None:
        self._values = 0
        self._pictures = 0
        self._extremes: tuple[Tensor, Tensor] | None = None
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, x: Tensor) -> None:
        """Take in a batch."""
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
        self._pictures += values.shape[0]

    def result(self) -> ChannelSizes:
        """The sizes of all channels."""
        assert self._sums is not None, "no batch was seen"
        assert self._extremes is not None
        largest, total, squares = self._sums
        mean = total / self._values
        return ChannelSizes(
            low=self._extremes[0],
            high=self._extremes[1],
            typical=largest / self._pictures,
            variance=(squares / self._values - mean.square()).clamp(min=0),
        )


class Reader:
    """A layer that reads the channels: how noise in its data and in its weights reaches its results.

    Args:
        weight: ``[groups, rows, channels of a group, taps]``.
        sizes: Of the channels that it reads, all groups in turn.
        one_scale: Whether all rows share one weight scale.
    """

    def __init__(self, weight: Tensor, sizes: ChannelSizes, *, one_scale: bool = False) -> None:
        wide = weight.detach().double()
        self.sizes = sizes
        self.factors = torch.ones_like(sizes.variance)
        self._largest = wide.abs().amax(3)
        self._energy = wide.square().sum((1, 3)).reshape(-1)
        self._taps = weight.shape[3]
        self._one_scale = one_scale

    def with_factors(self, factors: Tensor, first: int) -> Tensor:
        """The factors of all channels, where those from ``first`` on are given ones."""
        changed = self.factors.clone()
        changed[first : first + factors.numel()] = factors
        return changed

    def noise(self, factors: Tensor) -> float:
        """The power of what rounding adds to the results, when channels are divided by factors.

        Zeros are rounded without an error; they are counted as the other values are.
        """
        sizes = self.sizes
        step = ((sizes.high / factors).max() - (sizes.low / factors).min()) / DATA_STEPS
        from_data = step.square() / 12 * (factors.square() * self._energy).sum()
        grouped = factors.reshape(self._largest.shape[0], 1, -1)
        scales = (self._largest * grouped).amax(2) / WEIGHT_STEPS
        if self._one_scale:
            scales = scales.max().expand_as(scales)
        power = (sizes.variance / factors.square()).reshape(grouped.shape).sum(2)
        from_weights = (scales.square() / 12 * self._taps * power).sum()
        return float(from_data + from_weights)


def choose_factors(readers: Sequence[tuple[Reader, int]], count: int) -> Tensor | None:
    """By what to divide the channels that one layer makes, or None where nothing is gained.

    Args:
        readers: Those that read them, each with the place of the first one among its channels; they take the factors
            over.
        count: How many channels there are.
    """
    shares = _shares(readers, count)
    if shares is None:
        return None
    plain = torch.ones_like(shares)
    best, least = plain, _noise(readers, plain) * WORTHWHILE
    for candidate in _candidates(shares):
        noise = _noise(readers, candidate)
        if noise < least:
            best, least = candidate, noise
    if best is plain:
        return None
    for reader, first in readers:
        reader.factors = reader.with_factors(best, first)
    return best


def _shares(readers: Sequence[tuple[Reader, int]], count: int) -> Tensor | None:
    """The typical size of each channel as a share of the largest one that has the same step."""
    found = []
    for reader, first in readers:
        typical = reader.sizes.typical / reader.factors
        largest = typical.max()
        if not bool(largest > 0) or not bool(torch.isfinite(largest)):
            return None
        found.append(typical[first : first + count] / largest)
    return torch.stack(found).amax(0)


def _candidates(shares: Tensor) -> Iterable[Tensor]:
    never_seen = shares == 0  # of such a channel nothing is known, so it stays
    for exponent in EXPONENTS:
        for floor in FLOORS:
            yield shares.pow(exponent).clamp(min=floor, max=1.0).masked_fill(never_seen, 1.0)


def _noise(readers: Sequence[tuple[Reader, int]], factors: Tensor) -> float:
    return sum(reader.noise(reader.with_factors(factors, first)) for reader, first in readers)
