"""Rules of pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amct.pytorch.onnx.lowering.registry import NotLoweredError, rule
from amct.pytorch.onnx.lowering.rules.convolution import spread
from amct.pytorch.onnx.lowering.rules.products import transposed
from amct.pytorch.onnx.lowering.sizes import Size, static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.onnx.lowering.writer import Value, Writer

_RANKS = {f"{kind}_pool{rank}d": rank for kind in ("max", "avg") for rank in (1, 2, 3)}


def _with_batch(to: Writer, x: Value, rank: int) -> Value:
    """The tensor with a batch axis, which torch lets users leave out."""
    return x if x.rank == rank + 2 else to.unsqueeze(x, [0])


def _finished(to: Writer, x: Value) -> Value:
    return x if x.rank == len(to.shape) else to.squeeze(x, [0])


def _beyond(x: Value, shape: Sequence[Size], kernel: list[int], stride: list[int], before: list[int]) -> list[int]:
    """How many positions the last window needs behind the end of each axis, where torch rounds sizes up."""
    sizes = static(x.shape[-len(kernel) :], "a pooling that rounds sizes up")
    results = static(shape[-len(kernel) :], "a pooling that rounds sizes up")
    return [
        max((result - 1) * step + window - size - pad, pad)
        for size, result, window, step, pad in zip(sizes, results, kernel, stride, before, strict=True)
    ]


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
    to: Writer,
    x: Value,
    kernel_size: int | Sequence[int],
    operator: str,
    stride: int | Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Value:
    """The maximum of each window."""
    rank = _RANKS[operator]
    kernel, before, dilations = (spread(each, rank) for each in (kernel_size, padding, dilation))
    strides = spread(stride, rank) or kernel
    after = before
    if ceil_mode:
        windows = [step * (size - 1) + 1 for size, step in zip(kernel, dilations, strict=True)]
        after = _beyond(x, to.shape, windows, strides, before)
        if any(pad >= size for pad, size in zip(after, kernel, strict=True)):
            raise NotLoweredError("a pooling whose last window is mostly outside")
    given = _with_batch(to, x, rank)
    shape = [*given.shape[:2], *to.shape[-rank:]]
    settings: dict[str, Any] = {
        "dilations": dilations,
        "kernel_shape": kernel,
        "pads": [*before, *after],
        "strides": strides,
    }
    return _finished(to, to.add("MaxPool", given, shape=shape, **settings))


@rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_with_places(
    to: Writer,
    x: Value,
    kernel_size: Sequence[int],
    operator: str,
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> list[Value]:
    """The maximum of each window; its place has no rule."""
    to.result = to.result[0]
    return [max_pool(to, x, kernel_size, operator.removesuffix("_with_indices"), stride, padding, dilation, ceil_mode)]


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pool(
    to: Writer,
    x: Value,
    kernel_size: int | Sequence[int],
    operator: str,
    stride: int | Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Value:
    """The mean of each window, over the zeros of the padding too unless these are not to count.

    torch never counts what is beyond the padding because sizes are rounded up: there the zeros are an operator of their
    own, so that the pooling counts none.
    """
    rank = _RANKS[operator]
    kernel, before = spread(kernel_size, rank), spread(padding, rank)
    strides = spread(stride, rank) or kernel
    after = _beyond(x, to.shape, kernel, strides, before) if ceil_mode else before
    counted = count_include_pad and any(before)
    given = _with_batch(to, x, rank)
    shape = [*given.shape[:2], *to.shape[-rank:]]
    if counted and after != before:
        amounts = to.ints([0, 0, *before, 0, 0, *before])
        padded = [*given.shape[:2], *(size + 2 * pad for size, pad in zip(given.shape[2:], before, strict=True))]
        given = to.add("Pad", given, amounts, shape=padded)
        before, after, counted = [0] * rank, [b - a for a, b in zip(before, after, strict=True)], False
    settings: dict[str, Any] = {"kernel_shape": kernel, "pads": [*before, *after], "strides": strides}
    found = to.add("AveragePool", given, shape=shape, count_include_pad=int(counted), **settings)
    return _finished(to, found)


# -- adaptive ----------------------------------------------------------------------------------------------------------


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_average_pool(to: Writer, x: Value, output_size: Sequence[int]) -> Value:
    """The mean of everything, of equal windows, or of windows of different sizes (a product with their weights)."""
    rank = len(spread(output_size, 1))
    axes = list(range(x.rank - rank, x.rank))
    results = static(to.shape[-rank:], "an adaptive pooling")
    if all(size == 1 for size in results):
        return to.reduce("ReduceMean", x, axes)
    sizes = static(x.shape[-rank:], "an adaptive pooling")
    if sizes == results:
        return x
    if all(size % result == 0 for size, result in zip(sizes, results, strict=True)):
        kernel = [size // result for size, result in zip(sizes, results, strict=True)]
        given = _with_batch(to, x, rank)
        shape = [*given.shape[:2], *results]
        return _finished(to, to.add("AveragePool", given, shape=shape, kernel_shape=kernel, strides=kernel))
    if rank > 2:
        raise NotLoweredError("an adaptive pooling of three axes to windows of different sizes")
    last = to.constant(_window_means(sizes[-1], results[-1]).to(x.dtype))
    found = to.add("MatMul", x, last, shape=[*x.shape[:-1], results[-1]])
    if rank == 1:
        return found
    rows = to.constant(_window_means(sizes[0], results[0]).to(x.dtype))
    return to.add("MatMul", transposed(to, rows), found)


def _window_means(size: int, result: int) -> torch.Tensor:
    """The matrix [size, result] whose columns take the mean of torch's windows."""
    weights = torch.zeros(size, result, dtype=torch.float64)
    for place in range(result):
        start, end = place * size // result, -(-(place + 1) * size // result)
        weights[start:end, place] = 1 / (end - start)
    return weights


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(to: Writer, x: Value, output_size: Sequence[int]) -> list[Value]:
    """The maximum of everything or of equal windows; its place has no rule."""
    to.result = to.result[0]
    rank = len(spread(output_size, 1))
    results = static(to.shape[-rank:], "an adaptive pooling")
    sizes = x.shape[-rank:]
    if all(size == 1 for size in results):
        return [to.reduce("ReduceMax", x, list(range(x.rank - rank, x.rank)))]
    known = static(sizes, "an adaptive pooling")
    if any(size % result for size, result in zip(known, results, strict=True)):
        raise NotLoweredError("an adaptive maximum over windows of different sizes")
    kernel = [size // result for size, result in zip(known, results, strict=True)]
    given = _with_batch(to, x, rank)
    shape = [*given.shape[:2], *results]
    return [_finished(to, to.add("MaxPool", given, shape=shape, kernel_shape=kernel, strides=kernel))]
