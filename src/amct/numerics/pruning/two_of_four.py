"""2:4 sparsity (AMCT's l1_selective_prune): of every four consecutive weights the two largest are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

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
    groups = _groups(weight.detach().abs(), axis)
    # Equal magnitudes: the earlier weight is kept. NaN counts as large, so that it is not hidden.
    order = torch.argsort(groups, dim=-1, descending=True, stable=True)[..., :KEPT]
    mask = torch.zeros_like(groups).scatter_(-1, order, 1.0)
    return mask.flatten(-2)[..., :channels].movedim(-1, axis).contiguous()


def broken_groups(weight: Tensor, axis: int) -> int:
    """The number of groups in which more than two of four weights are not zero."""
    if weight.shape[axis] <= KEPT:
        return 0
    return int(((_groups(weight, axis) != 0).sum(dim=-1) > KEPT).sum())


def _groups(weight: Tensor, axis: int) -> Tensor:
    """The weight with the axis last, padded with zeros, in groups of four."""
    moved = weight.movedim(axis, -1)
    missing = -moved.shape[-1] % GROUP
    padded = torch.nn.functional.pad(moved, (0, missing))
    return padded.reshape(*padded.shape[:-1], -1, GROUP)
