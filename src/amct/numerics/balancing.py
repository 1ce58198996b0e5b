"""Balancing: one factor per channel that is moved between two places, by DMQ or between layers of a Caffe net.

DMQ: balance the ranges of a layer's activation and weight with one factor per input channel.

The activation is divided by the factor and the weight multiplied by it, which leaves the layer's output unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.errors import ArgumentError, CalibrationError
from amct.numerics.affine import LARGEST_SCALE, SMALLEST_SCALE
from amct.numerics.arq import WeightKind, check_layout, map_rows
from amct.numerics.rounding import RoundingNoise
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

_SHOWN_CHANNELS = 5


def activation_maximum(x: Tensor, channel_axis: int) -> Tensor:
    """Return ``max|x|`` per channel, float32 ``[C]``; combine batches with ``torch.maximum``.

    Raises:
        CalibrationError: the data is empty.
    """
    if x.numel() == 0:
        raise CalibrationError(f"balancing needs data, got an empty tensor of shape {list(x.shape)}")
    rows = x.detach().movedim(channel_axis, 0).reshape(x.shape[channel_axis], -1)
    low, high = torch.aminmax(rows, dim=1)
    return torch.maximum(low.abs(), high.abs()).float()


def input_channel_maximum(weight: Tensor, kind: WeightKind, groups: int = 1) -> Tensor:
    """Return ``max|w|`` of the weights that each input channel is multiplied with, float32 ``[Cin]``."""
    by_input = _inputs_first(weight.detach(), kind, groups)
    low, high = torch.aminmax(by_input.reshape(by_input.shape[0] * by_input.shape[1], -1), dim=1)
    return torch.maximum(low.abs(), high.abs()).float()


def balance_factors(activation_max: Tensor, weight_max: Tensor, migration_strength: float = 0.5) -> Tensor:
    """Return ``A^m / W^(1-m)``, float32 ``[Cin]``, from the largest magnitudes A (activation) and W (weight).

    A maximum below float epsilon counts as zero. If both are zero, the factor is 1. If only the activation is zero, the
    factor raises the weight to the largest balanced weight. If only the weight is zero, the factor lowers the
    activation to the largest balanced activation; it is 1 where such a factor would be outside of what is allowed. If
    no channel has both, all factors are 1.

    Args:
        activation_max: ``[Cin]``.
        weight_max: ``[Cin]``.
        migration_strength: m, 0..1; 1 makes the activation channels equal, 0 the weight channels.

    Raises:
        CalibrationError: a maximum is not finite, or a factor is outside FLT_EPSILON..1/FLT_EPSILON.
        ArgumentError: the shapes differ, or the strength is outside 0..1.
    """
    if activation_max.ndim != 1 or activation_max.shape != weight_max.shape:
        raise ArgumentError(
            "expected the maxima of the same channels [Cin], got activations "
            f"{list(activation_max.shape)} and weights {list(weight_max.shape)}"
        )
    if not 0 <= migration_strength <= 1:
        raise ArgumentError(f"migration_strength: expected 0..1, got {migration_strength}")
    activation, weight = activation_max.detach().double(), weight_max.detach().double()
    _check_channels(torch.isfinite(activation) & torch.isfinite(weight), activation, weight, "are not finite")
    no_activation, no_weight = activation < SMALLEST_SCALE, weight < SMALLEST_SCALE
    factors = torch.ones_like(activation)
    regular = ~(no_activation | no_weight)
    if bool(regular.any()):
        balanced = activation[regular] ** migration_strength / weight[regular] ** (1 - migration_strength)
        factors[regular] = balanced
        only_activation_zero, only_weight_zero = no_activation & ~no_weight, no_weight & ~no_activation
        factors[only_activation_zero] = (weight[regular] * balanced).max() / weight[only_activation_zero]
        factors[only_weight_zero] = activation[only_weight_zero] / (activation[regular] / balanced).max()
    legal = (factors > SMALLEST_SCALE) & (factors < LARGEST_SCALE)
    factors[~(regular | legal)] = 1
    _check_channels(
        legal | ~regular, activation, weight, f"give a factor outside {SMALLEST_SCALE:g}..{LARGEST_SCALE:g}"
    )
    return factors.float()


def dmq(
    activation_max: Tensor, weight: Tensor, kind: WeightKind, groups: int = 1, migration_strength: float = 0.5
) -> Tensor:
    """Return the balance factors ``[Cin]`` of a layer from its activation maxima ``[Cin]`` and its weight."""
    return balance_factors(activation_max, input_channel_maximum(weight, kind, groups), migration_strength)


def balance_weight(weight: Tensor, factors: Tensor, kind: WeightKind, groups: int = 1) -> Tensor:
    """Multiply the weight by the factors ``[Cin]`` along its input channels; shape and dtype stay.

    Raises:
        ArgumentError: the factors are not one per input channel.
    """
    check_layout(weight.shape, kind, groups)
    transposed = kind is WeightKind.CONV_TRANSPOSE
    inputs = weight.shape[0] if transposed else weight.shape[1] * (groups if kind is WeightKind.CONV else 1)
    if factors.shape != (inputs,):
        raise ArgumentError(f"factors: expected one per input channel [{inputs}], got {list(factors.shape)}")
    wide = factors.double()
    if transposed:
        per_row = wide[:, None]
    else:
        per_group = wide.reshape(-1, weight.shape[1])  # the rows of a group share its input channels
        rows_per_group = weight.shape[0] // per_group.shape[0]
        per_row = per_group[:, None].expand(-1, rows_per_group, -1)
        per_row = per_row.reshape(weight.shape[0], -1) if per_group.shape[0] > 1 else per_row[0]
    taps = [1] * (weight.ndim - 2)
    return map_rows(
        lambda some, part: some.double() * per_row[part].reshape(some.shape[0], -1, *taps), weight, weight.dtype
    )


def balance_activation(x: Tensor, factors: Tensor, channel_axis: int) -> Tensor:
    """Divide ``x`` by the factors along its channels, by multiplying with the reciprocal as the deployed model does.

    Raises:
        ArgumentError: the factors are not one per channel.
    """
    if not -x.ndim <= channel_axis < x.ndim or factors.shape != (x.shape[channel_axis],):
        raise ArgumentError(
            f"factors: {list(factors.shape)} do not fit axis {channel_axis} of an activation {list(x.shape)}"
        )
    shape = [1] * x.ndim
    shape[channel_axis] = -1
    return x * factors.reciprocal().reshape(shape).to(x.dtype)


def _inputs_first(weight: Tensor, kind: WeightKind, groups: int) -> Tensor:
    """Return a weight as ``[groups, Cin/groups, -1]``."""
    check_layout(weight.shape, kind, groups)
    if kind is WeightKind.CONV_TRANSPOSE:
        return weight.reshape(groups, weight.shape[0] // groups, -1)
    count = groups if kind is WeightKind.CONV else 1
    grouped = weight.reshape(count, weight.shape[0] // count, weight.shape[1], -1)
    return grouped.transpose(1, 2).reshape(count, weight.shape[1], -1)


def _check_channels(good: Tensor, activation: Tensor, weight: Tensor, what: str) -> None:
    if bool(good.all()):
        return
    channels = (~good).nonzero().reshape(-1).tolist()
    shown = "; ".join(
        f"channel {channel}: max|x| {activation[channel].item():g}, max|w| {weight[channel].item():g}"
        for channel in channels[:_SHOWN_CHANNELS]
    )
    raise CalibrationError(
        f"{counted(len(channels), 'channel')} cannot be balanced, the maxima {what}: {shown}; "
        "switch dmq_balancer off for this layer"
    )


# -- Cross-layer equalization: the factors that make the channel ranges of an activation equal, and their expected gain
#
# All channels of a tensor share one quantization step, which the largest channel determines. Dividing a channel by a
# positive factor in the layer that produces it and multiplying it again in the weights of its consumers changes nothing
# in float. The producer loses nothing, because its weights have one scale per output channel, nor does a depthwise
# consumer. Other consumers have one scale for all input channels of a row, so their weight error may grow. Both effects
# are estimated here as quantization noise in the outputs of the consumers.


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
