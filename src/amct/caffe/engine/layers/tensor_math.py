"""Tensor operators as defined by ONNX (and NumPy): matrix products, comparisons, reductions, Axpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.caffe.engine.layers.tensor_operator import TensorOperator
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

MATRIX_AXES = 2


class _Product(TensorOperator):
    """The shape rules of matrix products."""

    bottom_count = (2, 2)

    def product(self, left: Shape, right: Shape) -> Shape:
        """(..., M, K) times (..., K, N): (..., M, N), leading axes broadcast."""
        if min(len(left), len(right)) < MATRIX_AXES or left[-1] != right[-2]:
            raise self.error(f"cannot multiply {left} by {right}: the inner sizes must agree")
        return (*self.broadcast(left[:-2], right[:-2]), left[-2], right[-1])

    def broadcast(self, first: Shape, second: Shape) -> Shape:
        """The broadcast shape of the leading axes."""
        try:
            return np.broadcast_shapes(first, second)
        except ValueError as error:
            raise self.error(f"the leading axes {first} and {second} cannot be broadcast") from error


def _transposed(shape: Shape, is_transposed: bool) -> Shape:
    """The shape with the last two axes exchanged, if ``is_transposed``."""
    return (*shape[:-2], shape[-1], shape[-2]) if is_transposed and len(shape) >= MATRIX_AXES else shape


@register("MatMul")
class MatMul(_Product):
    """The matrix product of the last two axes; leading axes are batch axes and are broadcast."""

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """(..., M, N)."""
        options = self.parameter.matmul_param
        return [
            self.product(_transposed(bottoms[0], options.transpose_a), _transposed(bottoms[1], options.transpose_b))
        ]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """A B."""
        options = self.parameter.matmul_param
        left = bottoms[0].mT if options.transpose_a else bottoms[0]
        right = bottoms[1].mT if options.transpose_b else bottoms[1]
        return [torch.matmul(left, right)]


@register("Mvm")
class Mvm(_Product):
    """Matrix times vector: (..., M, K) and (..., K) give (..., M)."""

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """(..., M)."""
        return [self.product(bottoms[0], (*bottoms[1], 1))[:-1]]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """A x."""
        return [torch.matmul(bottoms[0], bottoms[1].unsqueeze(-1)).squeeze(-1)]


@register("Gemm")
class Gemm(_Product):
    """alpha * A' B' + beta * C; C is optional and is broadcast.

    A' and B' are transposed if ``trans_a``, ``trans_b``.
    """

    bottom_count = (2, 3)

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """(rows of A', columns of B')."""
        options = self.parameter.gemm_param
        for shape in bottoms[:2]:
            if len(shape) != MATRIX_AXES:
                raise self.error(f"needs matrices (2 axes), got shape {shape}")
        result = self.product(_transposed(bottoms[0], options.trans_a), _transposed(bottoms[1], options.trans_b))
        if len(bottoms) > MATRIX_AXES and self.broadcast(result, bottoms[2]) != result:
            raise self.error(f"C of shape {bottoms[2]} cannot be broadcast to {result}")
        return [result]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return alpha * A' B' + beta * C."""
        options = self.parameter.gemm_param
        left = bottoms[0].T if options.trans_a else bottoms[0]
        right = bottoms[1].T if options.trans_b else bottoms[1]
        result = options.alpha * (left @ right)
        return [result + options.beta * bottoms[2] if len(bottoms) > MATRIX_AXES else result]


class _Comparison(TensorOperator):
    """A comparison, 1 or 0 for each pair of values; the bottoms are broadcast."""

    bottom_count = (2, 2)

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The broadcast shape."""
        try:
            return [np.broadcast_shapes(*bottoms)]
        except ValueError as error:
            raise self.error(f"bottoms of shapes {bottoms[0]} and {bottoms[1]} cannot be broadcast") from error


@register("Equal")
class Equal(_Comparison):
    """1 where the bottoms are equal, else 0; not differentiable."""

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return a == b."""
        return [torch.eq(*bottoms).to(bottoms[0].dtype)]


@register("Greater")
class Greater(_Comparison):
    """1 where the first bottom is greater, else 0; not differentiable."""

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return a > b."""
        return [torch.gt(*bottoms).to(bottoms[0].dtype)]


@register("Axpy")
class Axpy(TensorOperator):
    """a * x + y with x and y (N, C, H, W) and a (N, C, 1, 1), as in SENet."""

    bottom_count = (3, 3)

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The shape of x."""
        a, x, y = bottoms
        if len(x) < 2 or a[:2] != x[:2] or count(a, 2) != 1:
            raise self.error(f"needs one factor per channel of {x}, got shape {a}")
        if x != y:
            raise self.error(f"x and y must have one shape, got {x} and {y}")
        return [x]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return a * x + y."""
        a, x, y = bottoms
        return [a.reshape(*x.shape[:2], *(1,) * (x.dim() - 2)) * x + y]


def _without(shape: Shape, axes: Sequence[int], *, keep: bool) -> Shape:
    kept = [1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes]
    return tuple(kept)


class _Reduce(TensorOperator):
    """Reduces ``axes`` (all if none are given); ``keepdims`` keeps them with size 1."""

    operator = ""
    """The tensor method that reduces several axes."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the axes."""
        options = self.parameter.reduce_param
        number = len(bottoms[0])
        axes = sorted({canonical_axis(axis, number, self.name) for axis in options.axes})
        self.axes = axes or ([] if options.noop_with_empty_axes else list(range(number)))
        self.keep: bool = options.keepdims

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The shape without the axes, or with size 1."""
        return [_without(bottoms[0], self.axes, keep=self.keep)]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """The reduction, or a copy if there is no axis to reduce."""
        return [self.reduce(bottoms[0]) if self.axes else bottoms[0].clone()]

    def reduce(self, bottom: torch.Tensor) -> torch.Tensor:
        """Reduce ``self.axes``, which is not empty."""
        reduced: torch.Tensor = getattr(bottom, self.operator)(self.axes, keepdim=self.keep)
        return reduced


@register("ReduceSum")
class ReduceSum(_Reduce):
    """The sum over ``axes``."""

    operator = "sum"


@register("ReduceMean")
class ReduceMean(_Reduce):
    """The mean over ``axes``."""

    operator = "mean"


@register("ReduceMax")
class ReduceMax(_Reduce):
    """The maximum over ``axes``; equal values share the gradient."""

    operator = "amax"


@register("ReduceMin")
class ReduceMin(_Reduce):
    """The minimum over ``axes``; equal values share the gradient."""

    operator = "amin"


@register("ReduceProd")
class ReduceProd(_Reduce):
    """The product over ``axes``."""

    def reduce(self, bottom: torch.Tensor) -> torch.Tensor:
        """The product, axis by axis from the last."""
        for axis in reversed(self.axes):
            bottom = bottom.prod(axis, keepdim=self.keep)
        return bottom


@register("ArgMin")
class ArgMin(TensorOperator):
    """The index of the minimum along ``axis``; on a tie the first, or the last with ``select_last_index``."""

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The shape without the axis, or with size 1."""
        options, shape = self.parameter.argmin_param, bottoms[0]
        axis = canonical_axis(options.axis, len(shape), self.name)
        if not shape[axis]:
            raise self.error(f"there is no smallest value along axis {axis} of {shape}")
        return [_without(shape, [axis], keep=options.keepdims)]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """The index of the minimum."""
        options, bottom = self.parameter.argmin_param, bottoms[0]
        axis = canonical_axis(options.axis, bottom.dim(), self.name)
        if options.select_last_index:
            place = bottom.shape[axis] - 1 - bottom.flip(axis).argmin(axis, keepdim=options.keepdims)
        else:
            place = bottom.argmin(axis, keepdim=options.keepdims)
        return [place.to(bottom.dtype)]
