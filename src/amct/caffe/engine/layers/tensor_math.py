"""Tensor operators as in ONNX and NumPy: products, comparisons, reductions, sorting; Reduction, ArgMax and Axpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.caffe.engine.layer import Layer, Place, Shape, Tensors, count, register
from amct.caffe.engine.onnx_place import FLOAT, fixed, product

if TYPE_CHECKING:
    from collections.abc import Sequence


MATRIX_AXES = 2


class _Product(Layer):
    """The shape rules of matrix products."""

    allows_in_place = False
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

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(..., M, N)."""
        options = self.parameter.matmul_param
        return [
            self.product(_transposed(bottoms[0], options.transpose_a), _transposed(bottoms[1], options.transpose_b))
        ]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        options = self.parameter.matmul_param
        left = bottoms[0].mT if options.transpose_a else bottoms[0]
        right = bottoms[1].mT if options.transpose_b else bottoms[1]
        return [torch.matmul(left, right)]

    def to_onnx(self, place: Place) -> None:
        """MatMul, after a Transpose of transposed operands."""
        options = self.parameter.matmul_param
        operands = []
        for name, bottom, dims, is_transposed in (
            ("left", place.bottoms[0], place.bottom_dims[0], options.transpose_a),
            ("right", place.bottoms[1], place.bottom_dims[1], options.transpose_b),
        ):
            *lead, rows, columns = range(len(dims))
            turned = place.step(name, "Transpose", bottom, perm=[*lead, columns, rows]) if is_transposed else bottom
            operands.append(turned)
        place.top("MatMul", *operands)


@register("Mvm")
class Mvm(_Product):
    """Matrix times vector: (..., M, K) and (..., K) give (..., M)."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(..., M)."""
        return [self.product(bottoms[0], (*bottoms[1], 1))[:-1]]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """A x."""
        return [torch.matmul(bottoms[0], bottoms[1].unsqueeze(-1)).squeeze(-1)]

    def to_onnx(self, place: Place) -> None:
        """MatMul with a matrix of one column."""
        last = place.value("last", [-1])
        column = place.step("column", "Unsqueeze", place.bottoms[1], last)
        place.top("Squeeze", place.step("product", "MatMul", place.bottom, column), last)


@register("Gemm")
class Gemm(_Product):
    """alpha * A' B' + beta * C; C is optional and is broadcast.

    A' and B' are transposed if ``trans_a``, ``trans_b``.
    """

    bottom_count = (2, 3)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(rows of A', columns of B')."""
        options = self.parameter.gemm_param
        for shape in bottoms[:2]:
            if len(shape) != MATRIX_AXES:
                raise self.error(f"needs matrices (2 axes), got shape {shape}")
        result = self.product(_transposed(bottoms[0], options.trans_a), _transposed(bottoms[1], options.trans_b))
        if len(bottoms) > MATRIX_AXES and self.broadcast(result, bottoms[2]) != result:
            raise self.error(f"C of shape {bottoms[2]} cannot be broadcast to {result}")
        return [result]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Return alpha * A' B' + beta * C."""
        options = self.parameter.gemm_param
        left = bottoms[0].T if options.trans_a else bottoms[0]
        right = bottoms[1].T if options.trans_b else bottoms[1]
        result = options.alpha * (left @ right)
        return [result + options.beta * bottoms[2] if len(bottoms) > MATRIX_AXES else result]

    def to_onnx(self, place: Place) -> None:
        options = self.parameter.gemm_param
        attributes: dict[str, Any] = {
            "alpha": float(options.alpha),
            "transA": int(options.trans_a),
            "transB": int(options.trans_b),
        }
        if len(place.bottoms) > MATRIX_AXES:
            attributes["beta"] = float(options.beta)
        place.top("Gemm", *place.bottoms, **attributes)


_COMPARISONS = {"Equal": torch.eq, "Greater": torch.gt}


@register(*_COMPARISONS)
class Compare(Layer):
    """1 where the bottoms are equal, or the first is greater, else 0; they are broadcast. Not differentiable."""

    allows_in_place = False
    bottom_count = (2, 2)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The broadcast shape."""
        try:
            return [np.broadcast_shapes(*bottoms)]
        except ValueError as error:
            raise self.error(f"bottoms of shapes {bottoms[0]} and {bottoms[1]} cannot be broadcast") from error

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        return [_COMPARISONS[self.type](*bottoms).to(bottoms[0].dtype)]

    def to_onnx(self, place: Place) -> None:
        """The ONNX operator of the same name, cast to float."""
        place.top("Cast", place.step("holds", self.type, *place.bottoms), to=FLOAT)


@register("Axpy")
class Axpy(Layer):
    """a * x + y with x and y (N, C, H, W) and a (N, C, 1, 1), as in SENet."""

    allows_in_place = False
    bottom_count = (3, 3)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shape of x."""
        a, x, y = bottoms
        if len(x) < 2 or a[:2] != x[:2] or count(a, 2) != 1:
            raise self.error(f"needs one factor per channel of {x}, got shape {a}")
        if x != y:
            raise self.error(f"x and y must have one shape, got {x} and {y}")
        return [x]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Return a * x + y."""
        a, x, y = bottoms
        return [a.reshape(*x.shape[:2], *(1,) * (x.dim() - 2)) * x + y]

    def to_onnx(self, place: Place) -> None:
        """Mul and Add."""
        factor, x, y = place.bottoms
        dims = place.bottom_dims[1]
        factor = place.reshaped(factor, (*dims[:2], *(1,) * (len(dims) - 2)), "factor")
        place.top("Add", place.step("product", "Mul", factor, x), y)


def _without(shape: Shape, axes: Sequence[int], *, keep: bool) -> Shape:
    kept = [1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes]
    return tuple(kept)


#: The tensor method that reduces several axes; products are computed axis by axis.
_REDUCTIONS = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "amax", "ReduceMin": "amin", "ReduceProd": ""}


@register(*_REDUCTIONS)
class Reduce(Layer):
    """Reduces ``axes`` (all if none are given); ``keepdims`` keeps them with size 1.

    Values that are equally large, or equally small, share the gradient.
    """

    allows_in_place = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the axes."""
        options = self.parameter.reduce_param
        number = len(bottoms[0])
        axes = sorted({self.canonical_axis(axis, number) for axis in options.axes})
        self.axes = axes or ([] if options.noop_with_empty_axes else list(range(number)))
        self.keep: bool = options.keepdims

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shape without the axes, or with size 1."""
        return [_without(bottoms[0], self.axes, keep=self.keep)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """The reduction, or a copy if there is no axis to reduce."""
        method, result = _REDUCTIONS[self.type], bottoms[0]
        if not self.axes:
            return [result.clone()]
        if method:
            return [getattr(result, method)(self.axes, keepdim=self.keep)]
        for axis in reversed(self.axes):
            result = result.prod(axis, keepdim=self.keep)
        return [result]

    def to_onnx(self, place: Place) -> None:
        """The ONNX reduction of the same name."""
        result = place.bottom
        if self.axes:
            result = place.reduced("reduced", self.type, result, self.axes, keep=self.keep)
        place.alias(result)


@register("ArgMin")
class ArgMin(Layer):
    """The index of the minimum along ``axis``; on a tie the first, or the last with ``select_last_index``."""

    allows_in_place = False

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shape without the axis, or with size 1."""
        options, shape = self.parameter.argmin_param, bottoms[0]
        axis = self.canonical_axis(options.axis, len(shape))
        if not shape[axis]:
            raise self.error(f"there is no smallest value along axis {axis} of {shape}")
        return [_without(shape, [axis], keep=options.keepdims)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """The index of the minimum."""
        options, bottom = self.parameter.argmin_param, bottoms[0]
        axis = self.canonical_axis(options.axis, bottom.dim())
        if options.select_last_index:
            place = bottom.shape[axis] - 1 - bottom.flip(axis).argmin(axis, keepdim=options.keepdims)
        else:
            place = bottom.argmin(axis, keepdim=options.keepdims)
        return [place.to(bottom.dtype)]

    def to_onnx(self, place: Place) -> None:
        """ArgMin, cast to float."""
        options = self.parameter.argmin_param
        attributes = {
            "axis": int(options.axis),
            "keepdims": int(options.keepdims),
            "select_last_index": int(options.select_last_index),
        }
        place.top("Cast", place.step("place", "ArgMin", place.bottom, **attributes), to=FLOAT)


SUM, ASUM, SUMSQ, MEAN = 1, 2, 3, 4
_REDUCTION_OPERATORS = {ASUM: "ReduceL1", SUMSQ: "ReduceSumSquare", MEAN: "ReduceMean"}


@register("Reduction")
class Reduction(Layer):
    """coeff * (sum, sum of |x|, sum of x^2 or mean) over all axes from ``axis`` on."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The axes before ``axis``."""
        self.axis = self.canonical_axis(self.parameter.reduction_param.axis, len(bottoms[0]))
        return [bottoms[0][: self.axis]]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Reduce by the operation."""
        options, bottom = self.parameter.reduction_param, bottoms[0]
        axes = list(range(self.axis, bottom.dim()))
        values = {ASUM: torch.abs, SUMSQ: torch.square}.get(options.operation, lambda tensor: tensor)(bottom)
        total = values.sum(axes) if axes else values.clone()
        factor = options.coeff
        if options.operation == MEAN:
            factor /= count(bottom.shape, self.axis)
        return [total if factor == 1.0 else total * factor]

    def to_onnx(self, place: Place) -> None:
        """The reduction over all axes from ``axis`` on, times coeff."""
        options, axes = self.parameter.reduction_param, range(self.axis, len(place.bottom_dims[0]))
        operator = _REDUCTION_OPERATORS.get(options.operation, "ReduceSum")
        result = place.reduced("reduced", operator, place.bottom, list(axes), keep=False)
        if options.coeff == 1:
            place.alias(result)
        else:
            place.top("Mul", result, place.value("coeff", float(options.coeff)))


@register("ArgMax")
class ArgMax(Layer):
    """The indices (and with ``out_max_val`` the values) of the ``top_k`` largest values; ties: later index first."""

    no_gradient = (0,)

    def setup(self, bottoms: list[Shape]) -> None:
        options = self.options = self.parameter.argmax_param
        shape = bottoms[0]
        self.axis = self.canonical_axis(options.axis, len(shape)) if options.HasField("axis") else None
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

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
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

    def to_onnx(self, place: Place) -> None:
        """TopK of the reversed values, because on a tie TopK returns the first index and Caffe the last."""
        options = self.options
        values, axis = place.bottom, self.axis
        if axis is None:
            values, axis = place.step("rows", "Flatten", values, axis=1), 1
            length = product(place.bottom_dims[0][1:])
        else:
            length = place.bottom_dims[0][axis]
        (length,) = fixed([length])
        edges = [
            place.value(name, [edge])
            for name, edge in (("from", -1), ("to", np.iinfo(np.int64).min), ("axis", axis), ("step", -1))
        ]
        turned = place.step("turned", "Slice", values, *edges)
        found, order = (place.writer.tensor(f"{self.name}.{part}") for part in ("values", "order"))
        place.node("TopK", "top_k", [turned, place.value("count", [int(options.top_k)])], [found, order], axis=axis)
        if self.axis is not None and options.out_max_val:
            place.alias(found)
            return
        places = place.step("places", "Sub", place.value("last", np.int64(length - 1)), order)
        if self.axis is not None:
            place.top("Cast", places, to=FLOAT)
            return
        result = place.step("numbers", "Cast", places, to=FLOAT)
        if options.out_max_val:
            result = place.step("both", "Concat", result, found, axis=1)
        place.top_reshaped(result)


@register("Sort")
class Sort(Layer):
    """Sorts along ``axis``, ascending unless ``descending``; stable. Top 0: the values.

    Top 1 (optional): their indices.
    """

    allows_in_place = False
    top_count = (1, 2)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape, twice."""
        self.canonical_axis(self.parameter.sort_param.axis, len(bottoms[0]))
        return [bottoms[0], bottoms[0]][: len(self.top_blobs)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """A stable sort."""
        options, bottom = self.parameter.sort_param, bottoms[0]
        axis = self.canonical_axis(options.axis, bottom.dim())
        values, places = bottom.sort(dim=axis, descending=options.descending, stable=True)
        return [values, places.to(bottom.dtype)][: len(self.top_blobs)]

    def to_onnx(self, place: Place) -> None:
        """TopK of all values."""
        options, dims = self.parameter.sort_param, place.bottom_dims[0]
        axis = self.canonical_axis(options.axis, len(dims))
        (length,) = fixed(dims[axis : axis + 1])
        _write_top_k(place, length, axis, largest=bool(options.descending))


@register("TopK")
class TopK(Layer):
    """The ``k`` largest (or smallest) values along ``axis``, best first, then their indices; ties: first index wins."""

    allows_in_place = False
    top_count = (1, 2)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape with size k along the axis, twice."""
        options, shape = self.parameter.topk_param, bottoms[0]
        axis = self.canonical_axis(options.axis, len(shape))
        if not 1 <= options.k <= shape[axis]:
            raise self.error(f"k must lie between 1 and the {shape[axis]} values of axis {axis}, got {options.k}")
        return [(*shape[:axis], options.k, *shape[axis + 1 :])] * len(self.top_blobs)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """A stable sort, cut to k."""
        options, bottom = self.parameter.topk_param, bottoms[0]
        axis = self.canonical_axis(options.axis, bottom.dim())
        values, places = bottom.sort(dim=axis, descending=options.largest, stable=True)
        best = values.narrow(axis, 0, options.k).contiguous()
        return [best, places.narrow(axis, 0, options.k).to(bottom.dtype)][: len(self.top_blobs)]

    def to_onnx(self, place: Place) -> None:
        options = self.parameter.topk_param
        axis = self.canonical_axis(options.axis, len(place.bottom_dims[0]))
        _write_top_k(place, int(options.k), axis, largest=bool(options.largest))


def _write_top_k(place: Place, count: int, axis: int, *, largest: bool) -> None:
    """TopK, and its places as float if there is a second top."""
    places = place.writer.tensor(f"{place.layer.name}.places")
    inputs = [place.bottom, place.value("count", [count])]
    place.node("TopK", "", inputs, [place.tops[0], places], axis=axis, largest=int(largest))
    if len(place.tops) > 1:
        place.top("Cast", places, index=1, to=FLOAT)
