"""Low-rank factors of weights: how many a matrix needs, and which they are.

The rank of a noisy matrix is estimated by empirical variational Bayes (Nakajima et al., "Global analytic solution of
fully-observed variational Bayesian matrix factorization", 2013): the singular values above a threshold count, and the
threshold follows from the variance of the noise, which minimizes the free energy.

Two pairs of factors of a convolution are here: one along height and one along width from the weight alone, and, from
what the layer computes on data, one with fewer outputs followed by one of size 1 (Zhang et al., "Accelerating very deep
convolutional networks", 2015), which loses least of the responses' variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

_THRESHOLD = 2.5129
"""The constant of the paper: a component counts if its signal exceeds this times the square root of L / M."""


def estimated_rank(singular_values: NDArray[np.float64], columns: int) -> int:
    """The number of components of a matrix that are more than noise.

    Args:
        singular_values: All of them, the largest first: as many as the matrix has rows.
        columns: The number of its columns, at least that of its rows.
    """
    values, rows = np.asarray(singular_values, np.float64), len(singular_values)
    ratio = rows / columns
    signal = _THRESHOLD * math.sqrt(ratio)
    limit = (1 + signal) * (1 + ratio / signal)
    squares = values**2 / columns
    total = squares.sum() / rows
    if total <= 0:
        return 0
    rest = min(math.ceil(rows / (1 + ratio)) - 1, rows) - 1
    lowest = max(squares[min(rest + 1, rows - 1)] / limit, squares[rest:].mean())
    variance = _Minimum(lambda noise: _free_energy(squares / noise, ratio, limit), lowest, max(total, lowest)).best[1]
    return int((squares > variance * limit).sum())


def _free_energy(scaled: NDArray[np.float64], ratio: float, limit: float) -> float:
    """Of singular values whose squares are divided by the columns and by the variance of the noise."""
    noise, signal = scaled[scaled <= limit], scaled[scaled > limit]
    # The floor keeps the logarithm of an exact zero finite; it is the same for every variance but for a constant.
    noise = np.maximum(noise, np.finfo(np.float64).tiny)
    shifted = signal - (1 + ratio)
    strength = (shifted + np.sqrt(shifted**2 - 4 * ratio)) / 2
    return float(
        (noise - np.log(noise)).sum()
        + (signal - strength + np.log((strength + 1) / signal) + ratio * np.log(strength / ratio + 1)).sum()
    )


class _Minimum:
    """Where a function of one number is least between two bounds, by Brent's method with AMCT's tolerance.

    The tolerance is absolute, as in AMCT, so that AMCT's ranks result: of very small weights, whose noise has a
    variance near the tolerance, the rank is only roughly that of the paper.
    """

    TOLERANCE = 1e-5
    MOST = 500
    _EPSILON = math.sqrt(2.2e-16)
    _GOLDEN = (3 - math.sqrt(5)) / 2

    def __init__(self, function: Callable[[float], float], lowest: float, highest: float) -> None:
        self.low, self.high = lowest, highest
        place = lowest + self._GOLDEN * (highest - lowest)
        point = (function(place), place)
        self.best = self.second = self.third = point
        """The three best points, as (value, place)."""
        self.step = self.previous = 0.0
        for _ in range(self.MOST - 1):
            near = self._EPSILON * abs(self.best[1]) + self.TOLERANCE / 3
            if abs(self.best[1] - (self.low + self.high) / 2) <= 2 * near - (self.high - self.low) / 2:
                break
            self._choose_step(near)
            place = self.best[1] + math.copysign(max(abs(self.step), near), self.step)
            self._add((function(place), place))

    def _choose_step(self, near: float) -> None:
        """To the vertex of the parabola through the three points; where that leads too far, a golden section."""
        (value, place), (value_2, place_2), (value_3, place_3) = self.best, self.second, self.third
        middle = (self.low + self.high) / 2
        if abs(self.previous) > near:
            r = (place - place_2) * (value - value_3)
            q = (place - place_3) * (value - value_2)
            p = (place - place_3) * q - (place - place_2) * r
            q = 2 * (q - r)
            p, q = (-p, q) if q > 0 else (p, -q)
            before, self.previous = self.previous, self.step
            if abs(p) < abs(q * before / 2) and q * (self.low - place) < p < q * (self.high - place):
                self.step = p / q
                if min(place + self.step - self.low, self.high - place - self.step) < 2 * near:
                    self.step = math.copysign(near, middle - place)
                return
        self.previous = (self.low if place >= middle else self.high) - place
        self.step = self._GOLDEN * self.previous

    def _add(self, point: tuple[float, float]) -> None:
        value, place = point
        better = value <= self.best[0]
        edge = self.best[1] if better else place
        if (place < self.best[1]) == better:
            self.high = edge
        else:
            self.low = edge
        if better:
            self.best, self.second, self.third = point, self.best, self.second
        elif value <= self.second[0] or self.second[1] == self.best[1]:
            self.second, self.third = point, self.second
        elif value <= self.third[0] or self.third[1] in (self.best[1], self.second[1]):
            self.third = point


@dataclass(frozen=True)
class Factors:
    """Two weights whose convolutions, one after the other, do the work of one."""

    first: Tensor
    last: Tensor


@dataclass(frozen=True)
class Separation:
    """How the weight of a convolution, (out, in, height, width), becomes a matrix: which axes are its rows.

    Attributes:
        output_rows: Whether the rows have the output channels, else the input channels.
        height_rows: Whether they have the height of the kernel, else the width.
    """

    output_rows: bool
    height_rows: bool

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as a matrix."""
        channel, kernel = self._axes()
        moved = weight.permute(channel, kernel, 1 - channel, 5 - kernel)
        return moved.reshape(moved.shape[0] * moved.shape[1], -1)

    def factors(self, weight: Tensor, rank: int) -> Factors:
        """Two weights, the kernel of one is a column and that of the other a row; computed in float64."""
        channel, kernel = self._axes()
        left, values, right = torch.linalg.svd(self.matrix(weight.detach().to(torch.float64)), full_matrices=False)
        root = values[:rank].sqrt()
        rows = (left[:, :rank] * root).reshape(weight.shape[channel], weight.shape[kernel], rank)
        columns = (root.unsqueeze(1) * right[:rank]).reshape(rank, weight.shape[1 - channel], weight.shape[5 - kernel])
        if self.output_rows:
            return Factors(first=columns.unsqueeze(kernel), last=rows.transpose(1, 2).unsqueeze(5 - kernel))
        return Factors(
            first=rows.permute(2, 0, 1).unsqueeze(5 - kernel), last=columns.transpose(0, 1).unsqueeze(kernel)
        )

    def _axes(self) -> tuple[int, int]:
        """The axes of the weight in the rows."""
        return 0 if self.output_rows else 1, 2 if self.height_rows else 3


class ResponseMoments:
    """Mean and covariance of what a layer computes, over all samples and positions."""

    def __init__(self, outputs: int) -> None:
        self._count = 0
        self._sum = torch.zeros(outputs, dtype=torch.float64)
        self._products = torch.zeros(outputs, outputs, dtype=torch.float64)

    def add(self, responses: Tensor) -> None:
        """Add responses, with the outputs on the last axis."""
        rows = responses.detach().flatten(0, -2).to(torch.float64)
        self._count += len(rows)
        self._sum = self._sum.to(rows.device) + rows.sum(dim=0)
        self._products = self._products.to(rows.device) + rows.T @ rows

    @property
    def is_finite(self) -> bool:
        """Whether there are responses, and all of them are numbers."""
        return self._count > 0 and bool(torch.isfinite(self._products).all())

    def components(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean, and the variances and directions of the principal components, the largest first."""
        mean = self._sum / self._count
        variances, directions = torch.linalg.eigh(self._products / self._count - torch.outer(mean, mean))
        return mean, variances.flip(0).clamp_min(0), directions.flip(1)


def response_factors(
    weight: Tensor, bias: Tensor | None, moments: ResponseMoments, rank: int
) -> tuple[Factors, Tensor]:
    """A layer's weight as one with ``rank`` outputs and a product that makes the layer's outputs of them, and its bias.

    Of all such pairs this one has the least mean square error on the responses that were measured.

    Args:
        weight: (out, in, …).
        bias: Of the layer.
        moments: Of its responses, bias included.
        rank: How many outputs are left between the two.
    """
    mean, _, directions = moments.components()
    kept = directions[:, :rank]
    rows = weight.detach().to(torch.float64).flatten(1)
    first = kept.T @ rows
    # Both weights get rows and columns of one size, so that one learning rate fits both.
    balance = first.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    offset = mean if bias is None else mean - bias.detach().to(torch.float64)
    shift = mean - kept @ (kept.T @ offset)
    factors = Factors(
        first=(first / balance.unsqueeze(1)).reshape(rank, *weight.shape[1:]),
        last=(kept * balance).reshape(weight.shape[0], rank, *[1] * (weight.ndim - 2)),
    )
    return factors, shift
