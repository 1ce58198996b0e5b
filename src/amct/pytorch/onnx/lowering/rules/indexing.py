"""Rules of operations that make tensors, read or write positions given by tensors, and sort."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from amct.pytorch.onnx.lowering.rules.elementwise import Operand, as_value
from amct.pytorch.onnx.lowering.rules.shaping import expanded_to
from amct.pytorch.onnx.lowering.writer import NotLoweredError, Value, Writer, broadcast, is_static, rule, static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.onnx.lowering.writer import Number, Size


def _as_index(to: Writer, index: Value) -> Value:
    if index.dtype in (torch.bool, torch.uint8):
        raise NotLoweredError("a mask as an index: the number of results depends on values")
    return to.cast(index, torch.int64)


@rule("embedding", implied=("padding_idx",))
def embedded(to: Writer, weight: Value, indices: Value) -> Value:
    """Rows of a table; the padding index matters to gradients only."""
    return to.add("Gather", weight, indices, axis=0)


@rule("index_select")
def selected(to: Writer, x: Value, dim: int, index: Value) -> Value:
    """Positions of one axis."""
    index = _as_index(to, index if index.rank else to.unsqueeze(index, [0]))
    return to.add("Gather", x, index, axis=x.axis(dim))


@rule("gather")
def gathered(to: Writer, x: Value, dim: int, index: Value) -> Value:
    """A position of one axis for every position of the result."""
    if not x.rank:
        raise NotLoweredError("gather from a number")
    return to.add("GatherElements", x, _as_index(to, index), axis=x.axis(dim))


@rule("index")
def indexed(to: Writer, x: Value, indices: Sequence[Value | None]) -> Value:
    """Positions of one axis, or of several axes together."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [_as_index(to, index) for index in indices if index is not None]
    if len(axes) == 1:
        return to.add("Gather", x, given[0], axis=axes[0])
    shape, together = _places(to, given)
    rest = [axis for axis in range(x.rank) if axis not in axes]
    found = to.add(
        "GatherND", to.transpose(x, [*axes, *rest]), together, shape=[*shape, *(x.shape[axis] for axis in rest)]
    )
    before = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    order = [*range(len(shape), len(shape) + before), *range(len(shape)), *range(len(shape) + before, found.rank)]
    return to.transpose(found, order)


def _places(to: Writer, indices: Sequence[Value]) -> tuple[tuple[Size, ...], Value]:
    """Indices of several axes, broadcast to one shape, and as the last axis of one tensor."""
    shape = functools.reduce(broadcast, [index.shape for index in indices])
    places = [to.unsqueeze(expanded_to(to, index, shape), [len(shape)]) for index in indices]
    if len(places) == 1:
        return shape, places[0]
    return shape, to.add("Concat", *places, axis=len(shape), dtype=torch.int64, shape=[*shape, len(indices)])


@rule("scatter")
def scattered(to: Writer, x: Value, dim: int, index: Value, src: Value | None = None, value: float = 0) -> Value:
    """Values written to a position of one axis for every position of the index."""
    source = src
    if source is None:
        source = expanded_to(to, to.constant(value), index.shape)
    elif source.shape != index.shape:
        raise NotLoweredError("scatter of a part of a tensor")
    return to.add("ScatterElements", x, _as_index(to, index), to.cast(source, to.dtype), axis=x.axis(dim))


@rule("index_put")
def written(to: Writer, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    """Values written to positions of the first axes."""
    given = [_as_index(to, index) for index in indices if index is not None]
    if len(given) != len(indices):
        raise NotLoweredError("index_put that skips an axis")
    shape, together = _places(to, given)
    source = expanded_to(to, to.cast(values, to.dtype), [*shape, *x.shape[len(given) :]])
    return to.add("ScatterND", x, together, source, reduction="add" if accumulate else None)


@rule("one_hot")
def one_hot(to: Writer, x: Value, num_classes: int = -1) -> Value:
    """A 1 at the place that each value names."""
    if num_classes < 0:
        raise NotLoweredError("one_hot whose size depends on values")
    return to.add("OneHot", x, to.ints([num_classes]), to.ints([0, 1]), axis=-1)


@rule("tril", "triu")
def triangle(to: Writer, x: Value, operator: str, diagonal: int = 0) -> Value:
    """The lower or upper triangle, zeros elsewhere."""
    return to.add("Trilu", x, to.constant(diagonal, torch.int64), upper=int(operator == "triu"))


# -- sorting -----------------------------------------------------------------------------------------------------------


@rule("topk")
def largest(to: Writer, x: Value, k: int, dim: int = -1, largest: bool = True) -> list[Value]:
    """The largest or smallest values of an axis, and their places."""
    return _ordered(to, x, k, dim, largest, next(tuple(each.shape) for each in to.result))


@rule("sort")
def sorted_values(to: Writer, x: Value, dim: int = -1, descending: bool = False) -> list[Value]:
    """The values of an axis in order, and their places."""
    (size,) = static([x.size(x.axis(dim))], "sort")
    return _ordered(to, x, size, dim, descending, x.shape)


@rule("argsort")
def sorted_places(to: Writer, x: Value, dim: int = -1, descending: bool = False) -> Value:
    """The places of the values of an axis in order."""
    return sorted_values(to, x, dim, descending)[1]


@rule("kthvalue")
def kth_smallest(to: Writer, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> list[Value]:
    """The k-th smallest value of an axis, and its place."""
    axis = x.axis(dim)
    shape = [*x.shape[:axis], k, *x.shape[axis + 1 :]]
    last = [to.slice(each, axis, k - 1, k) for each in _ordered(to, x, k, dim, False, shape)]
    return last if keepdim else [to.squeeze(each, [axis]) for each in last]


@rule("median")
def median(to: Writer, x: Value, dim: int | None = None, keepdim: bool = False) -> list[Value]:
    """The median of an axis (the smaller of two in the middle), and its place."""
    if dim is None:
        raise NotLoweredError("the median of a whole tensor")
    (size,) = static([x.size(x.axis(dim))], "a median")
    return kth_smallest(to, x, (size + 1) // 2, dim, keepdim)


def _ordered(to: Writer, x: Value, count: int, dim: int, descending: bool, shape: Sequence[object]) -> list[Value]:
    if not x.rank or x.dtype is torch.bool:
        raise NotLoweredError("an order of numbers or of truth values")
    outputs = [(x.dtype, shape), (torch.int64, shape)]
    return to.add_many("TopK", x, to.ints([count]), outputs=outputs, axis=x.axis(dim), largest=int(descending))  # type: ignore[arg-type]


_LARGEST = 2**18
_VALUES = {"zeros": 0, "ones": 1, "empty": 0}


def _filled(to: Writer, value: Operand) -> Value:
    one = as_value(to, value, to.dtype)
    if one.constant is not None and all(map(is_static, to.shape)):
        shape = static(to.shape, "a constant")
        if math.prod(shape) <= _LARGEST:
            return to.constant(one.constant.expand(shape).clone())
    return expanded_to(to, one, to.shape)


@rule("zeros", "ones", "empty", "new_zeros", "new_ones", "new_empty", "zeros_like", "ones_like", "empty_like",
      "empty_permuted", implied=("size", "x", "dtype", "physical_layout"))  # fmt: skip
def uniform(to: Writer, operator: str) -> Value:
    """Zeros or ones; what has no defined values is zero."""
    return _filled(to, _VALUES[operator.removeprefix("new_").partition("_")[0]])


@rule("full", "new_full", "full_like", implied=("size", "x", "dtype"))
def full(to: Writer, fill_value: Operand) -> Value:
    """One value everywhere."""
    return _filled(to, fill_value)


@rule("scalar_tensor", implied=("dtype",))
def number(to: Writer, s: Operand) -> Value:
    """A number, or a size."""
    return as_value(to, s, to.dtype)


@rule("arange", implied=("dtype",))
def counted(to: Writer, end: Number | torch.SymInt, start: Number | torch.SymInt = 0, step: Number = 1) -> Value:
    """Numbers at equal distances, up to a size."""
    whole = all(isinstance(each, (int, torch.SymInt)) for each in (start, end, step))
    computed = torch.int64 if whole else to.dtype
    limits = [as_value(to, each, computed) for each in (start, end, step)]
    return to.cast(to.add("Range", *limits, dtype=computed), to.dtype)
