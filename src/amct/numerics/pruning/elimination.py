"""The order in which channels are removed so that the layers behind them lose least, on data (optimal brain surgery).

A layer computes y = W·x. If channel r of x is removed and the weights of the others make up for it by least squares,
the mean square error of y grows by ‖w_r‖² / P_rr, where P is the inverse of the covariance of x. The channel of least
growth is removed; then W and P are updated, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

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
    """A covariance that can be inverted, as float64."""
    covariance = covariance.to(torch.float64)
    size = RIDGE * covariance.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
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
