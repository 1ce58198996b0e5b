"""Folding: what stands before or after a weighted layer and is affine per channel becomes part of its weight and bias.

BatchNorm, Scale and Bias all compute ``y = multiplier · x + addend`` per channel at inference; ``ChannelAffine`` is
that pair in float64. A chain is put together with ``then`` and folded once: weights are rounded once, to their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.errors import ArgumentError, ModelError
from amct.numerics.arq import WeightKind, channels_first, from_channels_first

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
        """A batch norm with fixed statistics; without gamma and beta 1 and 0.

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
        """A Scale layer, with or without its bias term."""
        multiplier = multiplier.detach().double()
        return ChannelAffine(multiplier, torch.zeros_like(multiplier) if addend is None else addend.detach().double())

    @staticmethod
    def bias(addend: Tensor) -> ChannelAffine:
        """A Bias layer."""
        return ChannelAffine(torch.ones_like(addend.detach(), dtype=torch.float64), addend.detach().double())

    def then(self, second: ChannelAffine) -> ChannelAffine:
        """This one followed by ``second``, as one."""
        return ChannelAffine(self.multiplier * second.multiplier, self.addend * second.multiplier + second.addend)


def fold_after(
    weight: Tensor, bias: Tensor | None, kind: WeightKind, groups: int, affine: ChannelAffine
) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer that also does what followed it: exact for every kind but recurrent ones.

    Args:
        weight: in the layout of ``kind``.
        bias: ``[Cout]`` or None for none.
        kind: CONV, CONV_TRANSPOSE or LINEAR.
        groups: groups of the convolution.
        affine: what followed, with Cout channels.

    Returns:
        The new weight and bias, both in the weight's dtype.

    Raises:
        ModelError: a result is not finite; the layer had better keep its neighbour.
        ArgumentError: channels do not match, or the kind has no single output to scale.
    """
    _check_kind(kind)
    rows = channels_first(weight.detach(), kind, groups).double()
    outputs = rows.shape[0]
    if affine.multiplier.numel() != outputs:
        raise ArgumentError(f"cannot fold {affine.multiplier.numel()} channels into a layer with {outputs} outputs")
    folded = from_channels_first(rows * affine.multiplier[:, None], weight.shape, kind, groups)
    return _rounded(folded, _bias64(bias, outputs, rows) * affine.multiplier + affine.addend, weight.dtype)


def fold_before(
    weight: Tensor,
    bias: Tensor | None,
    kind: WeightKind,
    groups: int,
    affine: ChannelAffine,
    *,
    padded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer that also does what stood before it.

    Exact for a linear layer and for a convolution without padding: there every output sees every weight. Padding puts
    zeros behind the affine, and a transposed convolution's border sees part of its kernel: with an addend other than
    zero neither can be folded (``padded`` means zeros; reflecting and circular padding repeat the data and do no harm).
    A linear layer may have a multiple of the channels as inputs (features flattened from ``[C, H, W]``).

    Returns:
        The new weight and bias, both in the weight's dtype.

    Raises:
        ModelError: it would not be exact, or a result is not finite.
        ArgumentError: channels do not match, or the kind is recurrent.
    """
    _check_kind(kind)
    if bool((affine.addend != 0).any()):
        if kind is WeightKind.CONV_TRANSPOSE:
            raise ModelError("an addend cannot be folded into a transposed convolution behind it: its border differs")
        if padded:
            raise ModelError("an addend cannot be folded into a padded convolution behind it: the padding stays zero")
    rows = channels_first(weight.detach(), kind, groups).double()
    multiplier, addend = (_per_weight(part, weight, kind, groups) for part in (affine.multiplier, affine.addend))
    new_bias = _bias64(bias, rows.shape[0], rows) + (rows * addend).sum(dim=1)
    return _rounded(from_channels_first(rows * multiplier, weight.shape, kind, groups), new_bias, weight.dtype)


def _per_weight(values: Tensor, weight: Tensor, kind: WeightKind, groups: int) -> Tensor:
    """Values of the input channels, laid out like the rows of ``channels_first``."""
    inputs = weight.shape[0] if kind is WeightKind.CONV_TRANSPOSE else weight.shape[1] * groups
    repeats = inputs // values.numel() if kind is WeightKind.LINEAR and values.numel() else 1
    if values.numel() * repeats != inputs:
        raise ArgumentError(f"cannot fold {values.numel()} channels into a layer with {inputs} inputs")
    rows = channels_first(weight, kind, groups)
    by_group = values.repeat_interleave(repeats).reshape(groups, inputs // groups)
    taps = rows.shape[1] // by_group.shape[1]
    per_group = by_group.repeat_interleave(taps, dim=1)
    return per_group.repeat_interleave(rows.shape[0] // groups, dim=0)


def fold_batch_norm(  # noqa: PLR0913  a batch norm has five parts, a layer four
    weight: Tensor,
    bias: Tensor | None,
    kind: WeightKind,
    groups: int,
    mean: Tensor,
    variance: Tensor,
    epsilon: float,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``fold_after`` with a batch norm."""
    return fold_after(weight, bias, kind, groups, ChannelAffine.batch_norm(mean, variance, epsilon, gamma, beta))


def fold_scale(
    weight: Tensor,
    bias: Tensor | None,
    kind: WeightKind,
    groups: int,
    multiplier: Tensor,
    addend: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``fold_after`` with a Scale layer."""
    return fold_after(weight, bias, kind, groups, ChannelAffine.scale(multiplier, addend))


def fold_bias(
    weight: Tensor, bias: Tensor | None, kind: WeightKind, groups: int, addend: Tensor
) -> tuple[Tensor, Tensor]:
    """``fold_after`` with a Bias layer."""
    return fold_after(weight, bias, kind, groups, ChannelAffine.bias(addend))


def _check_kind(kind: WeightKind) -> None:
    if kind is WeightKind.RNN:
        raise ArgumentError("a recurrent layer cannot take a neighbour into its weights")


def _bias64(bias: Tensor | None, outputs: int, like: Tensor) -> Tensor:
    if bias is None:
        return torch.zeros(outputs, dtype=torch.float64, device=like.device)
    if bias.shape != (outputs,):
        raise ArgumentError(f"bias: expected shape [{outputs}], got {list(bias.shape)}")
    return bias.detach().double()


def _rounded(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both in the dtype of the layer, proven finite there."""
    weight, bias = weight.to(dtype), bias.to(dtype)
    for name, value in (("weight", weight), ("bias", bias)):
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            raise ModelError(f"folding gives {bad} of {value.numel()} {name} values that are not finite in {dtype}")
    return weight, bias
