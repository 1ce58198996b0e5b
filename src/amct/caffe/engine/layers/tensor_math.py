"""Operators on whole tensors, as ONNX (and NumPy) define them: products, comparisons, reductions, Axpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layers.tensor_operator import TensorOperator
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis

if TYPE_CHECKING:
    from amct.caffe.engine.blob import Shape

MATRIX_AXES = 2


@register("MatMul")
class MatMul(TensorOperator):
    """The matrix product of the last two axes; leading axes are a batch and broadcast."""

    bottom_count = (2, 2)

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it says."""
        options = self.parameter.matmul_param
        left = bottoms[0].mT if options.transpose_a else bottoms[0]
        right = bottoms[1].mT if options.transpose_b else bottoms[1]
        return [torch.matmul(left, right)]


@register("Mvm")
class Mvm(TensorOperator):
    """Matrix times vector: (..., M, K) and (..., K) give (..., M)."""

    bottom_count = (2, 2)

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it says."""
        return [torch.matmul(bottoms[0], bottoms[1].unsqueeze(-1)).squeeze(-1)]


@register("Gemm")
class Gemm(TensorOperator):
    """alpha * A' B' + beta * C for matrices; C, which may be missing, is broadcast."""

    bottom_count = (2, 3)

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it says."""
        options = self.parameter.gemm_param
        for bottom in bottoms[:2]:
            if bottom.dim() != MATRIX_AXES:
                raise self.error(f"takes matrices, got shape {tuple(bottom.shape)}")
        left = bottoms[0].T if options.trans_a else bottoms[0]
        right = bottoms[1].T if options.trans_b else bottoms[1]
        result = options.alpha * (left @ right)
        if len(bottoms) > MATRIX_AXES:
            shape = tuple(result.shape)
            result = result + options.beta * bottoms[2]
            if tuple(result.shape) != shape:
                raise self.error(f"C of shape {tuple(bottoms[2].shape)} cannot be spread over {shape}")
        return [result]


@register("Equal")
class Equal(TensorOperator):
    """1 where two bottoms agree, else 0; they broadcast. No gradient."""

    bottom_count = (2, 2)

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it says."""
        return [torch.eq(*bottoms).to(bottoms[0].dtype)]


@register("Greater")
class Greater(TensorOperator):
    """1 where the first bottom is greater, else 0; they broadcast. No gradient."""

    bottom_count = (2, 2)

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it says."""
        return [torch.gt(*bottoms).to(bottoms[0].dtype)]


@register("Axpy")
class Axpy(TensorOperator):
    """a * x + y with one a per channel of each sample, as in SENet."""

    bottom_count = (3, 3)

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it says."""
        a, x, y = bottoms
        if x.dim() < MATRIX_AXES or a.numel() != x.shape[0] * x.shape[1] or a.shape[:2] != x.shape[:2]:
            raise self.error(f"needs one factor per channel of {tuple(x.shape)}, got shape {tuple(a.shape)}")
        if x.shape != y.shape:
            raise self.error(f"x and y must have one shape, got {tuple(x.shape)} and {tuple(y.shape)}")
        return [a.reshape(*x.shape[:2], *(1,) * (x.dim() - 2)) * x + y]


class _Reduce(TensorOperator):
    """Reduces ``axes`` (all if none are given); ``keepdims`` leaves axes of size 1 behind."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the axes."""
        options = self.parameter.reduce_param
        count = len(bottoms[0])
        axes = sorted({canonical_axis(axis, count, self.name) for axis in options.axes})
        self.axes = axes or ([] if options.noop_with_empty_axes else list(range(count)))
        self.keep: bool = options.keepdims

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it says."""
        return [self.reduce(bottoms[0]) if self.axes else bottoms[0].clone()]

    def reduce(self, bottom: torch.Tensor) -> torch.Tensor:
        """The function over ``self.axes``, of which there is at least one."""
        raise NotImplementedError


@register("ReduceSum")
class ReduceSum(_Reduce):
    """The sum over ``axes``."""

    def reduce(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.sum(self.axes, keepdim=self.keep)


@register("ReduceMean")
class ReduceMean(_Reduce):
    """The mean over ``axes``."""

    def reduce(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.mean(self.axes, keepdim=self.keep)


@register("ReduceMax")
class ReduceMax(_Reduce):
    """The largest value over ``axes``; equal ones share the gradient."""

    def reduce(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.amax(self.axes, keepdim=self.keep)


@register("ReduceMin")
class ReduceMin(_Reduce):
    """The smallest value over ``axes``; equal ones share the gradient."""

    def reduce(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.amin(self.axes, keepdim=self.keep)


@register("ReduceProd")
class ReduceProd(_Reduce):
    """The product over ``axes``."""

    def reduce(self, bottom: torch.Tensor) -> torch.Tensor:
        """One axis after the other, the last first."""
        for axis in reversed(self.axes):
            bottom = bottom.prod(axis, keepdim=self.keep)
        return bottom


@register("ArgMin")
class ArgMin(TensorOperator):
    """The place of the smallest value along ``axis``; of equal ones the first, or the last if asked for."""

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it says."""
        options, bottom = self.parameter.argmin_param, bottoms[0]
        axis = canonical_axis(options.axis, bottom.dim(), self.name)
        if options.select_last_index:
            place = bottom.shape[axis] - 1 - bottom.flip(axis).argmin(axis, keepdim=options.keepdims)
        else:
            place = bottom.argmin(axis, keepdim=options.keepdims)
        return [place.to(bottom.dtype)]
