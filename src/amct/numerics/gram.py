"""Gram matrices: the squared output error of a linear layer as a function of its weight, without the data.

A convolution is a matrix product with its unfolded input U, so ``|U w - y|² = w·G w - 2 w·C + |y|²`` with the Gram
matrix ``G = UᵀU`` and ``C = Uᵀy``. Both are sums over mini-batches, and their size depends on the weight only.

A transposed convolution is computed as a plain one: zeros inserted into its input by the stride, its kernel flipped.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from amct.numerics.counts.compiled import compiled

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from amct.numerics.integer import ConvolutionGeometry

_STRIPES = 8


def as_pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    """Return (height, width) from one number for both or from a tuple of two."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


@dataclass(frozen=True)
class Unfolding:
    """Converts the input of a layer to the matrix U that its weight rows ``[Cout, K]`` are multiplied with."""

    geometry: ConvolutionGeometry | None
    """None for a linear layer."""
    kernel: tuple[int, int] = (1, 1)

    @property
    def groups(self) -> int:
        """Groups of the convolution; each has its own matrix."""
        return self.geometry.groups if self.geometry else 1

    def unfold(self, x: Tensor) -> Tensor:
        """Convert an input ``[N, Cin, H, W]`` (linear: ``[..., Cin]``) to ``[groups, K, positions]``."""
        if self.geometry is None:
            return x.reshape(1, -1, x.shape[-1]).transpose(1, 2)
        stride, dilation = as_pair(self.geometry.stride), as_pair(self.geometry.dilation)
        if self.geometry.transposed:
            x, stride = self._insert_zeros(x, self.geometry), (1, 1)
        else:
            vertical, horizontal = as_pair(self.geometry.padding)
            x = functional.pad(x, (horizontal, horizontal, vertical, vertical))
        # Windows are views until the final copy; functional.unfold copies in another order and would need two copies.
        windows = x.transpose(0, 1).contiguous()
        for axis in (0, 1):
            reach = dilation[axis] * (self.kernel[axis] - 1) + 1
            windows = windows.unfold(2 + axis, reach, stride[axis])[..., :: dilation[axis]]
        return windows.permute(0, 4, 5, 1, 2, 3).reshape(self.groups, -1, math.prod(windows.shape[1:4]))

    def group_outputs(self, y: Tensor) -> Tensor:
        """Convert an output of the layer to ``[groups, Cout/groups, positions]``, positions as in ``unfold``."""
        if self.geometry is None:
            return y.reshape(1, -1, y.shape[-1]).transpose(1, 2)
        batch, channels = y.shape[:2]
        grouped = y.reshape(batch, self.groups, channels // self.groups, -1)
        return grouped.permute(1, 2, 0, 3).reshape(self.groups, channels // self.groups, -1)

    def group_rows(self, rows: Tensor) -> Tensor:
        """Convert weight rows ``[Cout, K]`` to ``[groups, Cout/groups, K]``, to be multiplied with ``unfold``."""
        return self._flip_kernel(rows).reshape(self.groups, rows.shape[0] // self.groups, -1)

    def ungroup_rows(self, grouped: Tensor) -> Tensor:
        """Convert ``[groups, Cout/groups, K]`` ungroup_rows to ``[Cout, K]``: the inverse of ``group_rows``."""
        return self._flip_kernel(grouped.reshape(-1, grouped.shape[-1]))

    def _flip_kernel(self, rows: Tensor) -> Tensor:
        if self.geometry is None or not self.geometry.transposed:
            return rows
        return rows.reshape(rows.shape[0], -1, *self.kernel).flip(2, 3).reshape(rows.shape)

    def _insert_zeros(self, x: Tensor, geometry: ConvolutionGeometry) -> Tensor:
        """Return the input with which a plain convolution (stride 1, no padding) computes the same output."""
        stride, dilation, padding = as_pair(geometry.stride), as_pair(geometry.dilation), as_pair(geometry.padding)
        extra = as_pair(geometry.output_padding)
        height, width = x.shape[2:]
        widened = x.new_zeros(*x.shape[:2], (height - 1) * stride[0] + 1, (width - 1) * stride[1] + 1)
        widened[:, :, :: stride[0], :: stride[1]] = x
        border = [dilation[axis] * (self.kernel[axis] - 1) - padding[axis] for axis in (0, 1)]
        return functional.pad(widened, (border[1], border[1] + extra[1], border[0], border[0] + extra[0]))


class GramStatistics:
    """G ``[groups, K, K]``, C ``[groups, Cout/groups, K]`` and the number of positions, summed in float64."""

    def __init__(self, unfolding: Unfolding, outputs: int, inputs: int, device: torch.device) -> None:
        groups = unfolding.groups
        self.unfolding = unfolding
        self.positions = 0
        self.gram = torch.zeros(groups, inputs, inputs, dtype=torch.float64, device=device)
        self.cross = torch.zeros(groups, outputs // groups, inputs, dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the input of a mini-batch and its target output (without bias)."""
        columns = self.unfolding.unfold(x.float())
        # G is symmetric: each stripe is computed from the diagonal on and mirrored, which saves almost half the work.
        for begin in range(0, columns.shape[1], -(-columns.shape[1] // _STRIPES)):
            end = min(begin - (-columns.shape[1] // _STRIPES), columns.shape[1])
            stripe = torch.bmm(columns[:, begin:end], columns[:, begin:].transpose(1, 2))
            self.gram[:, begin:end, begin:] += stripe
            self.gram[:, end:, begin:end] += stripe[:, :, end - begin :].transpose(1, 2)
        self.cross += torch.bmm(self.unfolding.group_outputs(y.float()), columns.transpose(1, 2))
        self.positions += columns.shape[2]

    def part(self, rows: slice) -> GramStatistics:
        """Return the statistics of some output channels: of one group, or whole groups."""
        part = copy.copy(self)
        if self.unfolding.groups == 1:
            part.cross = self.cross[:, rows]
            return part
        geometry, size = self.unfolding.geometry, self.cross.shape[1]
        assert geometry is not None, "linear layers have one group"
        groups = slice(rows.start // size, rows.stop // size)
        part.unfolding = replace(self.unfolding, geometry=replace(geometry, groups=groups.stop - groups.start))
        part.gram, part.cross = self.gram[groups], self.cross[groups]
        return part

    def half_gradient(self, weight: Tensor) -> Tensor:
        """Return half the gradient of the squared error, ``w G - C``, in float64."""
        return torch.bmm(weight.double(), self.gram) - self.cross


@compiled
def improve_rounding(
    gram: NDArray[np.float64],
    slope: NDArray[np.float64],
    steps: NDArray[np.float64],
    other: NDArray[np.float64],
    sweeps: int,
) -> int:
    """Switch single weights from one of their two values to the other while that lowers the squared error.

    Args:
        gram: G of one group, ``[K, K]``.
        slope: ``w G - C`` of its rows, ``[rows, K]``; updated in place.
        steps: the current weights, ``[rows, K]``; changed in place.
        other: the alternative value of each weight, ``[rows, K]``; changed in place.
        sweeps: maximum number of passes over all weights.

    Returns:
        The number of changes.
    """
    changes = 0
    for row in range(steps.shape[0]):
        for _ in range(sweeps):
            before = changes
            for place in range(steps.shape[1]):
                move = other[row, place] - steps[row, place]
                if move * (2 * slope[row, place] + move * gram[place, place]) < 0:
                    other[row, place] = steps[row, place]
                    steps[row, place] += move
                    slope[row] += move * gram[place]
                    changes += 1
            if changes == before:
                break
    return changes
