"""Channel pruning by balanced L2 norms (AMCT's BCP): scores of filters, and how many channels remain."""

from __future__ import annotations

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
