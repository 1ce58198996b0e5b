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
        # Windows are views until the final copy; functional.unfold copies in another order and would need two copies.
        windows = self._padded(x).transpose(0, 1).contiguous()
        for axis in (0, 1):
            windows = self._windows(windows, axis)
        return windows.permute(0, 4, 5, 1, 2, 3).reshape(self.groups, -1, math.prod(windows.shape[1:4]))

    @property
    def moves_by_rows(self) -> bool:
        """Whether the windows of a position are those of the position above it, moved by one row of the image."""
        if self.geometry is None or self.kernel[0] == 1:
            return False
        stride = 1 if self.geometry.transposed else as_pair(self.geometry.stride)[0]
        return stride == 1 and as_pair(self.geometry.dilation)[0] == 1

    def unfold_rows(self, x: Tensor) -> Tensor:
        """Unfold horizontally only: ``[groups, Cin/groups · kernel width, padded height, positions of a row]``."""
        windows = self._windows(self._padded(x).permute(1, 2, 0, 3), 1)
        channels, height, samples, width, kernel = windows.shape
        rows = windows.permute(0, 4, 1, 2, 3).reshape(self.groups, -1, height, samples * width)
        assert rows.shape[1] == channels // self.groups * kernel, "channels of a group go together"
        return rows

    def _windows(self, x: Tensor, axis: int) -> Tensor:
        """A view of the windows along one axis of the image, of four axes that end with these two; appends an axis."""
        assert self.geometry is not None, "linear layers have no windows"
        stride = 1 if self.geometry.transposed else as_pair(self.geometry.stride)[axis]
        dilation = as_pair(self.geometry.dilation)[axis]
        return x.unfold(2 + axis, dilation * (self.kernel[axis] - 1) + 1, stride)[..., ::dilation]

    def _padded(self, x: Tensor) -> Tensor:
        """The input of a plain convolution without padding that computes the same output."""
        assert self.geometry is not None, "linear layers have no padding"
        if self.geometry.transposed:
            return self._insert_zeros(x, self.geometry)
        vertical, horizontal = as_pair(self.geometry.padding)
        return functional.pad(x, (horizontal, horizontal, vertical, vertical))

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
        if self.unfolding.moves_by_rows and y.shape[2] >= self.unfolding.kernel[0]:
            self._add_rows(self.unfolding.unfold_rows(x.float()), y.float())
            return
        columns = self.unfolding.unfold(x.float())
        # G is symmetric: each stripe is computed from the diagonal on and mirrored, which saves almost half the work.
        for begin in range(0, columns.shape[1], -(-columns.shape[1] // _STRIPES)):
            end = min(begin - (-columns.shape[1] // _STRIPES), columns.shape[1])
            stripe = torch.bmm(columns[:, begin:end], columns[:, begin:].transpose(1, 2))
            self.gram[:, begin:end, begin:] += stripe
            self.gram[:, end:, begin:end] += stripe[:, :, end - begin :].transpose(1, 2)
        self.cross += torch.bmm(self.unfolding.group_outputs(y.float()), columns.transpose(1, 2))
        self.positions += columns.shape[2]

    def _add_rows(self, rows: Tensor, y: Tensor) -> None:
        """Add the horizontally unfolded rows of the images, and the output.

        The entry of G for the kernel rows i and i + d sums the products of the image rows u and u + d, for as many u
        from i on as the output has rows. For equal d most terms of these sums are the same: they are computed once.
        """
        (kernel, width), height = self.unfolding.kernel, y.shape[2]
        groups, channels = rows.shape[0], rows.shape[1] // width
        blocks = self.gram.view(groups, channels, kernel, width, channels, kernel, width)
        for distance in range(kernel):
            others = kernel - 1 - distance  # so many rows at either end are not in every sum
            common = _row_products(rows, others, height, distance)
            above = [_row_products(rows, row, row + 1, distance) for row in range(others)]
            below = [_row_products(rows, height + row, height + row + 1, distance) for row in range(others)]
            for place in range(kernel - distance):
                total = sum((*above[place:], *below[:place]), common).view(groups, channels, width, channels, width)
                blocks[:, :, place, :, :, place + distance] += total
                if distance:
                    blocks[:, :, place + distance, :, :, place] += total.permute(0, 3, 4, 1, 2)
        outputs = y.permute(1, 2, 0, 3).reshape(groups, -1, height * rows.shape[3])
        crosses = self.cross.view(groups, -1, channels, kernel, width)
        for place in range(kernel):
            product = torch.bmm(outputs, rows[:, :, place : place + height].flatten(2).transpose(1, 2))
            crosses[:, :, :, place] += product.view(groups, -1, channels, width)
        self.positions += outputs.shape[2]

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


def _row_products(rows: Tensor, begin: int, end: int, distance: int) -> Tensor:
    """Sum the products of the rows ``begin`` to ``end`` with those that are ``distance`` below them."""
    left, right = (rows[:, :, begin + move : end + move].flatten(2) for move in (0, distance))
    return torch.bmm(left, right.transpose(1, 2))


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
