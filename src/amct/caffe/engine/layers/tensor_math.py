"""Tensor operators as in ONNX and NumPy: products, comparisons, reductions, sorting; Reduction, ArgMax and Axpy."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.caffe.engine.layer import Layer, canonical_axis, count, register
from amct.caffe.engine.layers.detection import suppress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape


class TensorOperator(Layer):
    """Subclasses define ``shapes`` and ``compute`` for all possible tops; those the net does not have are dropped."""

    allows_in_place = False

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes of the tops that the net has."""
        return self.shapes(bottoms)[: len(self.top_blobs)]

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The tops' shapes; by default that of the first bottom."""
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results of ``compute`` for the tops that the net has."""
        return self.compute(bottoms)[: len(self.top_blobs)]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Compute all tops as new float32 tensors."""
        raise NotImplementedError


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


SUM, ASUM, SUMSQ, MEAN = 1, 2, 3, 4


@register("Reduction")
class Reduction(Layer):
    """coeff * (sum, sum of |x|, sum of x^2 or mean) over all axes from ``axis`` on."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The axes before ``axis``."""
        self.axis = canonical_axis(self.parameter.reduction_param.axis, len(bottoms[0]), self.name)
        return [bottoms[0][: self.axis]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Reduce by the operation."""
        options, bottom = self.parameter.reduction_param, bottoms[0]
        axes = list(range(self.axis, bottom.dim()))
        values = {ASUM: torch.abs, SUMSQ: torch.square}.get(options.operation, lambda tensor: tensor)(bottom)
        total = values.sum(axes) if axes else values.clone()
        factor = options.coeff
        if options.operation == MEAN:
            factor /= count(bottom.shape, self.axis)
        return [total if factor == 1.0 else total * factor]


@register("ArgMax")
class ArgMax(Layer):
    """The indices (and with ``out_max_val`` the values) of the ``top_k`` largest values; ties: later index first."""

    no_gradient = (0,)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
        options = self.options = self.parameter.argmax_param
        shape = bottoms[0]
        self.axis = canonical_axis(options.axis, len(shape), self.name) if options.HasField("axis") else None
        available = shape[self.axis] if self.axis is not None else count(shape, 1)
        if options.top_k < 1:
            raise self.error("top k must not be less than 1")
        if options.top_k > available:
            raise self.error(
                f"top_k must be less than or equal to the number of classes: {options.top_k} and {available}"
            )

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """With an axis: that axis becomes top_k; without: (N, 1 or 2, top_k)."""
        shape, options = bottoms[0], self.options
        if self.axis is not None:
            return [(*shape[: self.axis], options.top_k, *shape[self.axis + 1 :])]
        axes = max(len(shape), 3)
        rows = (2, options.top_k) if options.out_max_val else (1, options.top_k)
        return [(shape[0], *rows, *(1,) * (axes - 3))]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Sort and take the first top_k."""
        bottom, options = bottoms[0], self.options
        values = bottom.movedim(self.axis, -1) if self.axis is not None else bottom.reshape(bottom.shape[0], -1)
        # The flip makes a stable sort return the later index of a tie first.
        order = values.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., : options.top_k]
        places = values.shape[-1] - 1 - order
        found = values.gather(-1, places)
        if self.axis is not None:
            result = found if options.out_max_val else places.to(bottom.dtype)
            return [result.movedim(-1, self.axis).contiguous()]
        pieces = [places.to(bottom.dtype), found] if options.out_max_val else [places.to(bottom.dtype)]
        return [torch.stack(pieces, 1).reshape(self.reshape([tuple(bottom.shape)])[0])]


BATCH_AXES = 3
CORNERS = 4


@register("Sort")
class Sort(TensorOperator):
    """Sorts along ``axis``, ascending unless ``descending``; stable. Top 0: the values.

    Top 1 (optional): their indices.
    """

    top_count = (1, 2)

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape, twice."""
        canonical_axis(self.parameter.sort_param.axis, len(bottoms[0]), self.name)
        return [bottoms[0], bottoms[0]]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """A stable sort."""
        options, bottom = self.parameter.sort_param, bottoms[0]
        axis = canonical_axis(options.axis, bottom.dim(), self.name)
        values, places = bottom.sort(dim=axis, descending=options.descending, stable=True)
        return [values, places.to(bottom.dtype)]


@register("TopK")
class TopK(TensorOperator):
    """The ``k`` largest (or smallest) values along ``axis``, best first, then their indices; ties: first index wins."""

    top_count = (1, 2)

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape with size k along the axis, twice."""
        options, shape = self.parameter.topk_param, bottoms[0]
        axis = canonical_axis(options.axis, len(shape), self.name)
        if not 1 <= options.k <= shape[axis]:
            raise self.error(f"k must lie between 1 and the {shape[axis]} values of axis {axis}, got {options.k}")
        return [(*shape[:axis], options.k, *shape[axis + 1 :])] * 2

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """A stable sort, cut to k."""
        options, bottom = self.parameter.topk_param, bottoms[0]
        axis = canonical_axis(options.axis, bottom.dim(), self.name)
        values, places = bottom.sort(dim=axis, descending=options.largest, stable=True)
        best = values.narrow(axis, 0, options.k).contiguous()
        return [best, places.narrow(axis, 0, options.k).to(bottom.dtype)]


@register("Nms")
class Nms(Layer):
    """Boxes (N, B, 4) and scores (N, classes, B) to rows (image, class, box index) of the boxes kept.

    ONNX's NonMaxSuppression: boxes are (y1, x1, y2, x2), corners in any order, or with ``center_point_box`` (x centre,
    y centre, width, height). Without ``max_output_boxes_per_class`` there is no limit.
    """

    bottom_count = (2, 2)
    allows_in_place = False
    no_gradient = (0, 1)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
        options = self.options = self.parameter.nms_param
        self.most = options.max_output_boxes_per_class if options.HasField("max_output_boxes_per_class") else None
        self.threshold = options.score_threshold if options.HasField("score_threshold") else -float("inf")
        if not 0 <= options.iou_threshold <= 1:
            raise self.error(f"iou_threshold must lie between 0 and 1, got {options.iou_threshold}")
        if self.most is not None and self.most < 0:
            raise self.error(f"max_output_boxes_per_class must not be negative, got {self.most}")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(largest possible number of boxes, 3); forward sets the real number."""
        boxes, scores = bottoms
        fits = len(boxes) == len(scores) == BATCH_AXES and boxes[2] == CORNERS
        if not fits or (boxes[0], boxes[1]) != (scores[0], scores[2]):
            raise self.error(f"needs boxes (N, B, 4) and scores (N, classes, B), got {boxes} and {scores}")
        each = scores[2] if self.most is None else min(self.most, scores[2])
        return [(scores[0] * scores[1] * each, BATCH_AXES)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Suppress class by class."""
        boxes, scores = self._corners(bottoms[0].detach()), bottoms[1].detach()
        rows = [
            [picture, label, int(index)]
            for picture in range(scores.shape[0])
            for label in range(scores.shape[1])
            for index in self._keep(boxes[picture], scores[picture, label])
        ]
        return [torch.tensor(rows, dtype=torch.float32).reshape(-1, BATCH_AXES)]

    def _corners(self, boxes: torch.Tensor) -> torch.Tensor:
        first, second = boxes[..., :2], boxes[..., 2:]
        if self.options.center_point_box:
            return torch.cat([first - second / 2, first + second / 2], -1)
        return torch.cat([torch.minimum(first, second), torch.maximum(first, second)], -1)

    def _keep(self, boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        likely = (scores > self.threshold).nonzero().reshape(-1)
        order = likely[scores[likely].argsort(descending=True, stable=True)]
        kept = list(islice(suppress(boxes[order], self.options.iou_threshold), self.most))
        return order[kept]
