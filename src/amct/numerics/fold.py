"""Folding: a per-channel affine layer before or after a weighted layer becomes part of its weight and bias.

BatchNorm, Scale and Bias all compute ``y = multiplier · x + addend`` per channel at inference; ``ChannelAffine`` holds
both in float64. Several such layers are composed with ``then`` and folded at once, so weights are rounded only once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.errors import ArgumentError, ModelError
from amct.numerics.arq import WeightKind, channels_first, from_channels_first, map_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ChannelAffine:
    """``y = multiplier · x + addend`` along the channels, float64 ``[C]`` each."""

    multiplier: Tensor
    addend: Tensor

    def __post_init__(self) -> None:
        if self.multiplier.ndim != 1 or self.multiplier.shape != self.addend.shape:
            raise ArgumentError(
                "multiplier and addend: expected two tensors [C], got shapes "
                f"{list(self.multiplier.shape)} and {list(self.addend.shape)}"
            )

    @staticmethod
    def batch_norm(
        mean: Tensor, variance: Tensor, epsilon: float, gamma: Tensor | None = None, beta: Tensor | None = None
    ) -> ChannelAffine:
        """Return the affine function of a batch norm with fixed statistics; gamma defaults to 1, beta to 0.

        Raises:
            ModelError: a variance plus epsilon is not positive.
        """
        spread = variance.detach().double() + epsilon
        bad = ~(spread > 0)
        if bool(bad.any()):
            channel = int(bad.nonzero()[0])
            raise ModelError(
                f"batch norm: variance + epsilon must be positive, got {spread[channel].item():g} in channel {channel}"
            )
        multiplier = spread.rsqrt() if gamma is None else gamma.detach().double() / spread.sqrt()
        addend = -mean.detach().double() * multiplier
        return ChannelAffine(multiplier, addend if beta is None else addend + beta.detach().double())

    @staticmethod
    def scale(multiplier: Tensor, addend: Tensor | None = None) -> ChannelAffine:
        """Return the affine function of a Scale layer, with or without bias term."""
        multiplier = multiplier.detach().double()
        return ChannelAffine(multiplier, torch.zeros_like(multiplier) if addend is None else addend.detach().double())

    @staticmethod
    def bias(addend: Tensor) -> ChannelAffine:
        """Return the affine function of a Bias layer."""
        return ChannelAffine(torch.ones_like(addend.detach(), dtype=torch.float64), addend.detach().double())

    def then(self, second: ChannelAffine) -> ChannelAffine:
        """Return the composition: this function followed by ``second``."""
        return ChannelAffine(self.multiplier * second.multiplier, self.addend * second.multiplier + second.addend)


def fold_after(
    weight: Tensor, bias: Tensor | None, kind: WeightKind, groups: int, affine: ChannelAffine
) -> tuple[Tensor, Tensor]:
    """Fold a following affine layer into weight and bias; exact for every kind but recurrent ones.

    Args:
        weight: in the layout of ``kind``.
        bias: ``[Cout]`` or None.
        kind: CONV, CONV_TRANSPOSE or LINEAR.
        groups: groups of the convolution.
        affine: the following layer, with Cout channels.

    Returns:
        The new weight and bias, both in the weight's dtype.

    Raises:
        ModelError: a result is not finite; the layers should not be folded.
        ArgumentError: channels do not match, or the kind is recurrent.
    """
    _check_kind(kind)
    outputs = channels_first(weight, kind, groups).shape[0]
    if affine.multiplier.numel() != outputs:
        raise ArgumentError(f"cannot fold {affine.multiplier.numel()} channels into a layer with {outputs} outputs")
    return _to_finite(*scaled_outputs(weight, bias, kind, groups, affine), weight.dtype)


def scaled_outputs(
    weight: Tensor, bias: Tensor | None, kind: WeightKind, groups: int, affine: ChannelAffine
) -> tuple[Tensor, Tensor]:
    """``fold_after`` without its checks; the affine function has one channel per output, or one for all."""
    rows = channels_first(weight.detach(), kind, groups)
    multiplier = affine.multiplier.expand(rows.shape[0])
    scaled = map_rows(lambda some, part: some.double() * multiplier[part, None], rows, weight.dtype)
    shifted = _bias_or_zeros(bias, rows.shape[0], rows) * multiplier + affine.addend
    return from_channels_first(scaled, weight.shape, kind, groups), shifted.to(weight.dtype)


def fold_before(
    weight: Tensor,
    bias: Tensor | None,
    kind: WeightKind,
    groups: int,
    affine: ChannelAffine,
    *,
    padded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Fold a preceding affine layer into weight and bias.

    Exact for a linear layer and for a convolution without padding, where every output uses every weight. Zero padding
    comes after the affine layer, and the border of a transposed convolution uses only part of its kernel: neither
    allows a non-zero addend (``padded`` means zero padding; reflecting and circular padding repeat the data and are
    exact). A linear layer may have a multiple of the channels as inputs (features flattened from ``[C, H, W]``).

    Returns:
        The new weight and bias, both in the weight's dtype.

    Raises:
        ModelError: folding would not be exact, or a result is not finite.
        ArgumentError: channels do not match, or the kind is recurrent.
    """
    _check_kind(kind)
    if bool((affine.addend != 0).any()):
        if kind is WeightKind.CONV_TRANSPOSE:
            raise ModelError(
                "an addend cannot be folded into a following transposed convolution: its border uses part of the kernel"
            )
        if padded:
            raise ModelError("an addend cannot be folded into a following convolution with zero padding")
    rows = channels_first(weight.detach(), kind, groups).double()
    multiplier, addend = (_expand_to_rows(part, weight, kind, groups) for part in (affine.multiplier, affine.addend))
    new_bias = _bias_or_zeros(bias, rows.shape[0], rows) + (rows * addend).sum(dim=1)
    return _to_finite(from_channels_first(rows * multiplier, weight.shape, kind, groups), new_bias, weight.dtype)


def _expand_to_rows(values: Tensor, weight: Tensor, kind: WeightKind, groups: int) -> Tensor:
    """Repeat values per input channel ``[Cin]`` to the shape of ``channels_first``, ``[Cout, K]``."""
    inputs = weight.shape[0] if kind is WeightKind.CONV_TRANSPOSE else weight.shape[1] * groups
    repeats = inputs // values.numel() if kind is WeightKind.LINEAR and values.numel() else 1
    if values.numel() * repeats != inputs:
        raise ArgumentError(f"cannot fold {values.numel()} channels into a layer with {inputs} inputs")
    rows = channels_first(weight, kind, groups)
    by_group = values.repeat_interleave(repeats).reshape(groups, inputs // groups)
    taps = rows.shape[1] // by_group.shape[1]
    per_group = by_group.repeat_interleave(taps, dim=1)
    return per_group.repeat_interleave(rows.shape[0] // groups, dim=0)


def _check_kind(kind: WeightKind) -> None:
    if kind is WeightKind.RNN:
        raise ArgumentError("no layer can be folded into the weights of a recurrent layer")


def _bias_or_zeros(bias: Tensor | None, outputs: int, like: Tensor) -> Tensor:
    if bias is None:
        return torch.zeros(outputs, dtype=torch.float64, device=like.device)
    if bias.shape != (outputs,):
        raise ArgumentError(f"bias: expected shape [{outputs}], got {list(bias.shape)}")
    return bias.detach().double()


def _to_finite(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert both to the dtype of the layer and check that they are finite there."""
    weight, bias = weight.to(dtype), bias.to(dtype)
    for name, value in (("weight", weight), ("bias", bias)):
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            raise ModelError(f"folding gives {bad} of {value.numel()} {name} values that are not finite in {dtype}")
    return weight, bias
