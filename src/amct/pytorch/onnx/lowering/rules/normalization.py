"""Rules of reductions over axes and of normalizations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from amct.pytorch.onnx.lowering.rules.layers import batch_norm, scaled_channels, vector_of
from amct.pytorch.onnx.lowering.writer import NotLoweredError, rule, static

if TYPE_CHECKING:
    from amct.pytorch.onnx.lowering.writer import Number, Value, Writer


_REDUCTIONS = {
    "mean": "ReduceMean", "sum": "ReduceSum", "prod": "ReduceProd", "amax": "ReduceMax", "amin": "ReduceMin",
    "logsumexp": "ReduceLogSumExp",
}  # fmt: skip
Axes = int | Sequence[int] | None


@rule(*_REDUCTIONS, implied=("dtype",))
def reduced(to: Writer, x: Value, operator: str, dim: Axes = None, keepdim: bool = False) -> Value:
    """One value for all positions of axes."""
    x = to.cast(x, to.dtype)
    return to.reduce(_REDUCTIONS[operator], x, x.axes(dim), keep=keepdim) if x.rank else x


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


@rule("var", "std", "var_mean", "std_mean")
def variance(
    to: Writer,
    x: Value,
    operator: str,
    dim: Axes = None,
    unbiased: bool = True,
    correction: Number | None = None,
    keepdim: bool = False,
) -> Value | list[Value]:
    """The variance or its root, with the mean if the operator returns both."""
    both = operator.endswith("_mean")
    if both:
        to.result = to.result[0]
    if correction is None:
        correction = int(unbiased)
    axes = x.axes(dim)
    mean = to.reduce("ReduceMean", x, axes)
    centred = to.binary("Sub", x, mean)
    found = to.reduce("ReduceMean", to.mul(centred, centred), axes, keep=keepdim)
    if correction:
        count = math.prod(static([x.size(axis) for axis in axes], "a variance"))
        if count <= correction:
            raise NotLoweredError("a variance of one value")
        found = to.mul(found, to.constant(count / (count - correction), x.dtype))
    if operator.startswith("std"):
        found = to.unary("Sqrt", found)
    if not both:
        return found
    return [found, mean if keepdim else to.squeeze(mean, axes)]


@rule("cumsum", implied=("dtype",))
def running_sum(to: Writer, x: Value, dim: int) -> Value:
    """Sums up to each position."""
    if not x.rank:
        return to.cast(x, to.dtype)
    return to.add("CumSum", to.cast(x, to.dtype), to.constant(x.axis(dim), torch.int64))


@rule("native_layer_norm", first=True)
@rule("layer_norm")
def layer_norm(
    to: Writer,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
) -> Value:
    """A normalization over the last axes."""
    shape = static(normalized_shape, "a layer norm")
    scale = to.constant(torch.ones(shape, dtype=to.dtype)) if weight is None else weight
    return to.add("LayerNormalization", x, scale, bias, axis=-len(shape), epsilon=eps)


@rule("rms_norm")
def rms_norm(
    to: Writer, x: Value, normalized_shape: Sequence[int], weight: Value | None = None, eps: float | None = None
) -> Value:
    """``x / sqrt(mean(x²) + eps) · weight``."""
    axes = list(range(x.rank - len(normalized_shape), x.rank))
    epsilon = to.constant(torch.finfo(x.dtype).eps if eps is None else eps, x.dtype)
    mean = to.reduce("ReduceMean", to.mul(x, x), axes)
    normal = to.mul(x, to.unary("Reciprocal", to.unary("Sqrt", to.binary("Add", mean, epsilon))))
    return normal if weight is None else to.mul(normal, weight)


@rule("group_norm")
def group_norm(
    to: Writer,
    x: Value,
    num_groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
) -> Value:
    """An instance norm of the groups, each as one channel; then scale and shift of the channels."""
    shape = x.shape
    rest = math.prod(shape[1:]) // num_groups
    grouped = to.reshape(x, [shape[0], num_groups, rest])
    scale, shift = vector_of(to, 1.0, num_groups), vector_of(to, 0.0, num_groups)
    normal = to.add("InstanceNormalization", grouped, scale, shift, epsilon=eps, shape=grouped.shape)
    return scaled_channels(to, to.reshape(normal, shape), weight, bias)


@rule("instance_norm")
def instance_norm(
    to: Writer,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    use_input_stats: bool,
    eps: float,
) -> Value:
    """A normalization of each channel of each sample."""
    if not use_input_stats:
        return batch_norm(to, x, weight, bias, running_mean, running_var, eps)
    channels = x.size(1)
    scale = vector_of(to, 1.0, channels) if weight is None else weight
    shift = vector_of(to, 0.0, channels) if bias is None else bias
    return to.add("InstanceNormalization", x, scale, shift, epsilon=eps)


@rule("linalg_vector_norm", implied=("dtype",), ord="order")
@rule("norm", implied=("dtype",), p="order")
def vector_norm(
    to: Writer,
    x: Value,
    order: float | None = None,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
) -> Value:
    """The length of vectors in the 1-, 2- or maximum norm."""
    kind = 2 if order is None else order
    operators = {1: "ReduceL1", 2: "ReduceL2"}
    x, axes = to.cast(x, to.dtype), x.axes(dim)
    if kind == math.inf:
        return to.reduce("ReduceMax", to.unary("Abs", x), axes, keep=keepdim)
    if kind not in operators:
        raise NotLoweredError(f"a norm of order {kind}")
    return to.reduce(operators[int(kind)], x, axes, keep=keepdim)
