"""Rules of layers: convolutions, linear layers, batch norms, poolings, paddings and resizings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amct.pytorch.onnx.lowering.writer import NotLoweredError, Size, is_static, rule, static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.onnx.lowering.writer import Value, Writer


def spread(value: int | Sequence[int], rank: int) -> list[int]:
    """A setting for each spatial axis; torch stores one number for all of them."""
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(
    to: Writer,
    x: Value,
    weight: Value,
    operator: str,
    bias: Value | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
) -> Value:
    """A convolution, also a transposed one; padding "same" may differ between both ends by one."""
    if x.dtype is not weight.dtype:
        raise NotLoweredError(f"a convolution of {x.dtype} with {weight.dtype}")
    rank = weight.rank - 2
    kernel = static(weight.shape[2:], "the kernel of a convolution")
    dilations, extra = spread(dilation, rank), spread(output_padding, rank)
    if isinstance(padding, str):
        totals = [step * (size - 1) if padding == "same" else 0 for step, size in zip(dilations, kernel, strict=True)]
        pads = [*(total // 2 for total in totals), *(total - total // 2 for total in totals)]
    else:
        pads = spread(padding, rank) * 2
    settings: dict[str, Any] = {"dilations": dilations, "group": groups, "kernel_shape": kernel, "pads": pads}
    settings["strides"] = spread(stride, rank)
    name = "Conv"
    if transposed or "transpose" in operator:
        name, settings["kernel_shape"] = "ConvTranspose", settings.pop("kernel_shape")  # the order of the files
        settings["output_padding"] = extra if any(extra) else None
    if x.rank == weight.rank:
        return to.add(name, x, weight, bias, **settings)
    return to.squeeze(to.add(name, to.unsqueeze(x, [0]), weight, bias, shape=[1, *to.shape], **settings), [0])


@rule("linear")
def linear(to: Writer, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Gemm for a matrix; MatMul with the transposed weight, and Add, otherwise."""
    if x.rank == 2:
        return to.add("Gemm", x, weight, bias, transB=1)
    product = to.add("MatMul", x, transposed(to, weight))
    return product if bias is None else to.binary("Add", product, bias)


def transposed(to: Writer, x: Value) -> Value:
    """The last two axes exchanged; of a small constant at once."""
    if x.rank < 2:
        return x
    if x.constant is not None:
        return to.constant(x.constant.transpose(-1, -2).contiguous())
    return to.transpose(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


def vector_of(to: Writer, value: float, size: Size) -> Value:
    """One value for each channel."""
    return to.constant(torch.full(static([size], "a normalization"), value, dtype=to.dtype))


@rule("_native_batch_norm_legit_no_training", first=True)
@rule("batch_norm")
def batch_norm(
    to: Writer,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    eps: float,
    training: bool = False,
) -> Value:
    """A batch norm in eval mode, or a normalization of each channel over the batch (weight standardization)."""
    if running_mean is None or running_var is None:
        return _normalized_channels(to, x, weight, bias, eps)
    if training:
        raise NotLoweredError("a batch norm in training mode")
    channels = running_mean.size(0)
    scale = vector_of(to, 1.0, channels) if weight is None else weight
    shift = vector_of(to, 0.0, channels) if bias is None else bias
    return to.add("BatchNormalization", x, scale, shift, running_mean, running_var, epsilon=eps)


def _normalized_channels(to: Writer, x: Value, weight: Value | None, bias: Value | None, eps: float) -> Value:
    axes = [axis for axis in range(x.rank) if axis != 1]
    centred = to.binary("Sub", x, to.reduce("ReduceMean", x, axes))
    variance = to.reduce("ReduceMean", to.mul(centred, centred), axes)
    found = to.binary("Div", centred, to.unary("Sqrt", to.binary("Add", variance, to.constant(eps))))
    return scaled_channels(to, found, weight, bias)


def scaled_channels(to: Writer, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """A tensor with its channels multiplied and shifted."""
    axes = list(range(1, x.rank - 1))
    if weight is not None:
        x = to.mul(x, to.unsqueeze(weight, axes))
    return x if bias is None else to.binary("Add", x, to.unsqueeze(bias, axes))


def _pooled_axes(operator: str) -> int:
    """2 for ``max_pool2d``."""
    return int(operator.partition("_pool")[2][0])


def _pooled(to: Writer, operator: str, x: Value, **settings: Any) -> Value:
    """A pooling of the last axes; ONNX needs the batch axis, which torch lets users leave out."""
    rank = len(settings["kernel_shape"])
    given = x if x.rank == rank + 2 else to.unsqueeze(x, [0])
    shape = [*given.shape[:2], *to.shape[-rank:]]
    found = to.add(operator, given, shape=shape, **settings)
    return found if given is x else to.squeeze(found, [0])


def _beyond(x: Value, shape: Sequence[Size], kernel: list[int], stride: list[int], before: list[int]) -> list[int]:
    """How many positions the last window needs behind the end of each axis, where torch rounds sizes up."""
    sizes = static(x.shape[-len(kernel) :], "a pooling that rounds sizes up")
    results = static(shape[-len(kernel) :], "a pooling that rounds sizes up")
    return [
        max((result - 1) * step + window - size - pad, pad)
        for size, result, window, step, pad in zip(sizes, results, kernel, stride, before, strict=True)
    ]


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", first=True)
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
    rank = _pooled_axes(operator)
    kernel, before, dilations = (spread(each, rank) for each in (kernel_size, padding, dilation))
    strides = spread(stride, rank) or kernel
    after = before
    if ceil_mode:
        windows = [step * (size - 1) + 1 for size, step in zip(kernel, dilations, strict=True)]
        after = _beyond(x, to.shape, windows, strides, before)
        if any(pad >= size for pad, size in zip(after, kernel, strict=True)):
            raise NotLoweredError("a pooling whose last window is mostly outside")
    pads = [*before, *after]
    return _pooled(to, "MaxPool", x, dilations=dilations, kernel_shape=kernel, pads=pads, strides=strides)


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
    rank = _pooled_axes(operator)
    kernel, before = spread(kernel_size, rank), spread(padding, rank)
    strides = spread(stride, rank) or kernel
    after = _beyond(x, to.shape, kernel, strides, before) if ceil_mode else before
    counted = int(count_include_pad and any(before))
    if counted and after != before:
        front = [0] * (x.rank - rank)
        amounts = to.ints([*front, *before, *front, *before])
        sizes = (size + 2 * pad for size, pad in zip(x.shape[-rank:], before, strict=True))
        x = to.add("Pad", x, amounts, shape=[*x.shape[:-rank], *sizes])
        before, after, counted = [0] * rank, [b - a for a, b in zip(before, after, strict=True)], 0
    pads = [*before, *after]
    return _pooled(to, "AveragePool", x, count_include_pad=counted, kernel_shape=kernel, pads=pads, strides=strides)


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
        return _pooled(to, "AveragePool", x, kernel_shape=kernel, strides=kernel)
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


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", first=True)
def adaptive_max_pool(to: Writer, x: Value, output_size: Sequence[int]) -> Value:
    """The maximum of everything or of equal windows; its place has no rule."""
    rank = len(spread(output_size, 1))
    results = static(to.shape[-rank:], "an adaptive pooling")
    sizes = x.shape[-rank:]
    if all(size == 1 for size in results):
        return to.reduce("ReduceMax", x, list(range(x.rank - rank, x.rank)))
    known = static(sizes, "an adaptive pooling")
    if any(size % result for size, result in zip(known, results, strict=True)):
        raise NotLoweredError("an adaptive maximum over windows of different sizes")
    kernel = [size // result for size, result in zip(known, results, strict=True)]
    return _pooled(to, "MaxPool", x, kernel_shape=kernel, strides=kernel)


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@rule("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", padding="pad")
@rule("replication_pad1d", "replication_pad2d", "replication_pad3d", padding="pad")
@rule("constant_pad_nd", "pad")
def padded(
    to: Writer, x: Value, pad: Sequence[int], operator: str, mode: str = "constant", value: float | None = None
) -> Value:
    """Positions added at both ends of the last axes; torch lists the last axis first."""
    amounts = static(pad, "padding")
    if not any(amounts):
        return x
    mode = {"reflection": "reflect", "replication": "replicate"}.get(operator.partition("_")[0], mode)
    places = len(amounts) // 2
    front = [0] * (x.rank - places)
    pads = [*front, *amounts[::2][::-1], *front, *amounts[1::2][::-1]]
    if mode != "constant" and min(pads) < 0:
        raise NotLoweredError(f"padding of {pads} in the mode {mode}")
    filling = to.constant(value or 0, x.dtype) if mode == "constant" else None
    return to.add("Pad", x, to.ints(pads), filling, mode=_MODES[mode])


@rule(
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d", implied=("output_size",), scales="scales_w"
)
@rule("upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
      "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", implied=("output_size",))  # fmt: skip
def resized(
    to: Writer,
    x: Value,
    operator: str,
    align_corners: bool = False,
    scale_factors: Sequence[float] | None = None,
    scales_d: float | None = None,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    """Resize to the sizes of the result; by given factors if these are not just what the sizes say.

    The nearest value is that rounded down from the upper left corner, or from the middle of a position. Interpolation
    is linear, or by cubic polynomials with torch's coefficient; aligned corners follow from the sizes.
    """
    settings: dict[str, Any] = {"mode": "nearest" if "nearest" in operator else "linear"}
    if "nearest" in operator:
        middle = "exact" in operator
        corners, rounding = ("half_pixel", "round_prefer_ceil") if middle else ("asymmetric", "floor")
        settings |= {"coordinate_transformation_mode": corners, "nearest_mode": rounding}
    else:
        if "cubic" in operator:
            settings = {"mode": "cubic", "cubic_coeff_a": -0.75}
        settings["coordinate_transformation_mode"] = "align_corners" if align_corners else "half_pixel"
    factors = scale_factors or [each for each in (scales_d, scales_h, scales_w) if each is not None]
    if factors and len(factors) != x.rank - 2:
        raise NotLoweredError("a resizing with a factor for some axes only")
    exact = all(
        is_static(size) and is_static(result) and size * factor == result
        for factor, size, result in zip(factors, x.shape[2:], to.shape[2:], strict=False)
    )
    if exact or align_corners:
        return to.add("Resize", x, None, None, to.sizes.shape(to.shape), **settings)
    return to.add("Resize", x, None, to.constant([1.0, 1.0, *factors], torch.float32), **settings)
