"""Pruning: which channels of a layer to remove, and which two of every four weights to keep.

Channels are scored by the balanced L2 norms of their filters (AMCT's BCP). On data they are removed in the order in
which the layers behind them lose least (optimal brain surgery). Such a layer computes y = W·x. If channel r of x is
removed and the weights of the others make up for it by least squares, the mean square error of y grows by
‖w_r‖² / P_rr, where P is the inverse of the covariance of x. The channel of least growth is removed; then W and P are
updated, and so on. 2:4 sparsity is AMCT's l1_selective_prune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


ASCEND_CHANNELS = 16
"""The chip computes this many channels at once."""


def balanced_l2_scores(filters: Sequence[Tensor]) -> Tensor:
    """The score of each channel; the channels with the lowest scores are removed first.

    For each weight: the L2 norm of every filter divided by its number of elements, scaled so that the smallest is 0 and
    the largest 1. The score of a channel that several layers produce together is the mean over these layers.

    Args:
        filters: The weight of each layer, with its output channels on axis 0; all have the same number of channels.

    Returns:
        One float64 per channel. A weight whose filters all have the same norm scores 0.

    Raises:
        ArgumentError: There is no weight, or the numbers of channels differ.
    """
    counts = {len(weight) for weight in filters}
    if len(counts) != 1:
        raise ArgumentError(f"filters: expected weights with the same number of channels, got {sorted(counts)}")
    return torch.stack([_normalized(filter_norms(weight)) for weight in filters]).mean(dim=0)


def filter_norms(weight: Tensor) -> Tensor:
    """The L2 norm of each filter divided by its number of elements, as float64."""
    rows = weight.detach().flatten(1).to("cpu", torch.float64)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1) / max(rows.shape[1], 1)
    return norms


def _normalized(norms: Tensor) -> Tensor:
    lowest, highest = torch.aminmax(norms)
    if lowest == highest:
        return torch.zeros_like(norms)
    return (norms - lowest) / (highest - lowest)


def remaining_channels(count: int, ratio: float, *, ascend: bool = False, groups: int = 1) -> int:
    """How many of ``count`` channels remain when a fraction is pruned.

    Args:
        count: The number of channels.
        ratio: The fraction to remove, in (0, 1). Half channels are rounded to even.
        ascend: Whether the result is rounded up to a multiple of 16.
        groups: The result is rounded down to a multiple of this, but not to 0.

    >>> remaining_channels(160, 0.3, ascend=True), remaining_channels(20, 0.25)
    (112, 15)
    """
    remain = count - round(count * ratio)
    if ascend:
        remain = max(-(-remain // ASCEND_CHANNELS) * ASCEND_CHANNELS, ASCEND_CHANNELS)
    if groups > 1:
        remain = remain // groups * groups or groups
    return min(max(remain, 1), count)


def lowest_channels(scores: Tensor, remain: int, groups: int = 1) -> list[int]:
    """The channels to remove so that ``remain`` are left: the lowest scores in each of ``groups`` equal runs.

    Equal scores are removed from the front.
    """
    each = len(scores) // groups
    removed = max(len(scores) - remain, 0) // groups
    order = torch.argsort(scores.reshape(groups, each), dim=1, stable=True)[:, :removed]
    return sorted((order + torch.arange(groups).unsqueeze(1) * each).flatten().tolist())


RIDGE = 1e-4
"""Added to the diagonal of a covariance, as a fraction of its mean, so that it can be inverted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """A layer that reads the channels.

    Attributes:
        covariance: Of its input channels.
        products: WᵀW of its weight, a row and a column for each input channel.
        places: Where each of the channels in question is in its input.
    """

    covariance: Tensor
    products: Tensor
    places: Tensor


def with_ridge(covariance: Tensor) -> Tensor:
    """A covariance that can be inverted, as float64; that of channels which do not vary at all is 0, and gets ones."""
    covariance = covariance.to(torch.float64)
    variance = covariance.diagonal().mean()
    size = torch.where(variance > 0, RIDGE * variance, 1.0)
    return covariance + size * torch.eye(len(covariance), dtype=torch.float64, device=covariance.device)


def elimination_order(readers: Sequence[Reader]) -> tuple[list[int], list[float]]:
    """All channels in question, from the first to remove to the last, and by how much the error grows with each.

    The errors of several readers are added, each as a share of the power of its output.
    """
    count = len(readers[0].places)
    states = [_State(reader) for reader in readers]
    left, order, errors = list(range(count)), [], []
    while left:
        growth = torch.stack([state.growth() for state in states]).sum(dim=0)[left]
        place = int(torch.argmin(growth))
        errors.append(float(growth[place]))
        chosen = left.pop(place)
        order.append(chosen)
        for state in states:
            state.remove(chosen)
    return order, errors


class _State:
    def __init__(self, reader: Reader) -> None:
        covariance = with_ridge(reader.covariance)
        self.inverse = torch.linalg.inv(covariance)
        self.products = reader.products.to(torch.float64)
        self.places = reader.places
        self.power = (covariance * self.products).sum().clamp_min(torch.finfo(torch.float64).tiny)

    def growth(self) -> Tensor:
        """The growth of the relative error for each channel in question."""
        own = self.products.diagonal()[self.places] / self.inverse.diagonal()[self.places].clamp_min(1e-300)
        relative: Tensor = own / self.power
        return relative

    def remove(self, channel: int) -> None:
        """Remove a channel: its weights go to the others."""
        place = int(self.places[channel])
        row = self.inverse[place].clone()
        pivot = row[place]
        column = self.products[:, place].clone()
        shared = torch.outer(column, row) / pivot
        self.products += column[place] * torch.outer(row, row) / pivot**2 - shared - shared.T
        self.inverse -= torch.outer(row, row) / pivot
        self.inverse[place, place] = 1.0  # never asked again


GROUP = 4
KEPT = 2


def two_of_four_mask(weight: Tensor, axis: int) -> Tensor:
    """The mask of a weight: 1 where it is kept, 0 where it is removed, in the weight's own type.

    Args:
        weight: A weight of any shape.
        axis: The axis of its input channels, along which every four consecutive entries form a group. The last group
            may have fewer; with one or two input channels everything is kept.
    """
    channels = weight.shape[axis]
    if channels <= KEPT:
        return torch.ones_like(weight)
    moved = weight.detach().abs().movedim(axis, -1)
    padded = torch.nn.functional.pad(moved, (0, -channels % GROUP))
    groups = padded.reshape(*moved.shape[:-1], -1, GROUP)
    # Equal magnitudes: the earlier weight is kept. NaN counts as large, so that it is not hidden.
    order = torch.argsort(groups, dim=-1, descending=True, stable=True)[..., :KEPT]
    mask = torch.zeros_like(groups).scatter_(-1, order, 1.0)
    return mask.flatten(-2)[..., :channels].movedim(-1, axis).contiguous()
