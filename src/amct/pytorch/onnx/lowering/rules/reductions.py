"""Rules of reductions over axes, and of running sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from amct.pytorch.onnx.lowering.registry import NotLoweredError, rule
from amct.pytorch.onnx.lowering.sizes import static

if TYPE_CHECKING:
    from amct.pytorch.onnx.lowering.writer import Number, Value, Writer

_OPERATORS = {
    "mean": "ReduceMean", "sum": "ReduceSum", "prod": "ReduceProd", "amax": "ReduceMax", "amin": "ReduceMin",
    "logsumexp": "ReduceLogSumExp",
}  # fmt: skip
Axes = int | Sequence[int] | None


@rule(*_OPERATORS)
def reduced(
    to: Writer, x: Value, operator: str, dim: Axes = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    """One value for all positions of axes."""
    del dtype  # that of the result
    x = to.cast(x, to.dtype)
    return to.reduce(_OPERATORS[operator], x, x.axes(dim), keep=keepdim) if x.rank else x


@rule("max", "min")
def extreme(
    to: Writer,
    x: Value,
    operator: str,
    dim: int | None = None,
    keepdim: bool = False,
    other: Value | None = None,
) -> Value | list[Value]:
    """The largest or smallest of all values, of an axis with its place, or of two tensors."""
    name = operator.capitalize()
    if other is not None:
        return to.binary(name, to.cast(x, to.dtype), to.cast(other, to.dtype))
    if dim is None:
        return to.reduce(f"Reduce{name}", x, x.axes(None), keep=False) if x.rank else x
    to.result = to.result[0]
    value = to.reduce(f"Reduce{name}", x, [x.axis(dim)], keep=keepdim)
    place = to.add(f"Arg{name}", x, axis=x.axis(dim), keepdims=int(keepdim), dtype=torch.int64)
    return [value, place]


@rule("argmax", "argmin")
def place_of_extreme(to: Writer, x: Value, operator: str, dim: int | None = None, keepdim: bool = False) -> Value:
    """The place of the largest or smallest value, the first one if there are several."""
    if dim is None:
        if keepdim or not x.rank:
            raise NotLoweredError(f"{operator} of all values that keeps the axes")
        x, dim = to.reshape(x, [math.prod(x.shape)]), 0
    name = f"Arg{operator.removeprefix('arg').capitalize()}"
    return to.add(name, x, axis=x.axis(dim), keepdims=int(keepdim))


@rule("any", "all")
def truth(to: Writer, x: Value, operator: str, dim: Axes = None, keepdim: bool = False) -> Value:
    """Whether any or all values are true."""
    whole = to.cast(to.cast(x, torch.bool), torch.int32)
    if x.rank:
        whole = to.reduce("ReduceMax" if operator == "any" else "ReduceMin", whole, x.axes(dim), keep=keepdim)
    return to.cast(whole, torch.bool)


@rule("var", "std")
def spread(
    to: Writer,
    x: Value,
    operator: str,
    dim: Axes = None,
    unbiased: bool = True,
    correction: Number | None = None,
    keepdim: bool = False,
) -> Value:
    """The variance, or its root."""
    return _moments(to, x, dim, _correction(unbiased, correction), keepdim, root=operator == "std")[0]


@rule("var_mean", "std_mean")
def spread_and_mean(
    to: Writer,
    x: Value,
    operator: str,
    dim: Axes = None,
    unbiased: bool = True,
    correction: Number | None = None,
    keepdim: bool = False,
) -> list[Value]:
    """The variance or its root, and the mean."""
    to.result = to.result[0]
    return _moments(to, x, dim, _correction(unbiased, correction), keepdim, root=operator == "std_mean")


def _correction(unbiased: bool, correction: Number | None) -> Number:
    return int(unbiased) if correction is None else correction


def _moments(to: Writer, x: Value, dim: Axes, correction: Number, keep: bool, *, root: bool) -> list[Value]:
    axes = x.axes(dim)
    mean = to.reduce("ReduceMean", x, axes)
    centred = to.binary("Sub", x, mean)
    variance = to.reduce("ReduceMean", to.mul(centred, centred), axes, keep=keep)
    if correction:
        count = math.prod(static([x.size(axis) for axis in axes], "a variance"))
        if count <= correction:
            raise NotLoweredError("a variance of one value")
        variance = to.mul(variance, to.constant(count / (count - correction), x.dtype))
    return [to.unary("Sqrt", variance) if root else variance, mean if keep else to.squeeze(mean, axes)]


@rule("cumsum")
def running_sum(to: Writer, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Sums up to each position."""
    del dtype  # that of the result
    if not x.rank:
        return to.cast(x, to.dtype)
    return to.add("CumSum", to.cast(x, to.dtype), to.constant(x.axis(dim), torch.int64))
