"""Rules of convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.pytorch.onnx.lowering.registry import NotLoweredError, rule
from amct.pytorch.onnx.lowering.sizes import static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.onnx.lowering.writer import Value, Writer


def spread(value: int | Sequence[int], rank: int) -> list[int]:
    """A setting for each spatial axis; torch stores one number for all of them."""
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


@rule("conv1d", "conv2d", "conv3d")
def convolution(
    to: Writer,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Value:
    """A convolution; padding "same" may differ between both ends by one."""
    rank = weight.rank - 2
    kernel = static(weight.shape[2:], "the kernel of a convolution")
    dilations = spread(dilation, rank)
    if isinstance(padding, str):
        totals = [step * (size - 1) if padding == "same" else 0 for step, size in zip(dilations, kernel, strict=True)]
        pads = [*(total // 2 for total in totals), *(total - total // 2 for total in totals)]
    else:
        pads = spread(padding, rank) * 2
    return _convolved(
        to, "Conv", x, weight, bias,
        dilations=dilations, group=groups, kernel_shape=kernel, pads=pads, strides=spread(stride, rank),
    )  # fmt: skip


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(
    to: Writer,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Value:
    """A transposed convolution."""
    rank = weight.rank - 2
    extra = spread(output_padding, rank)
    return _convolved(
        to, "ConvTranspose", x, weight, bias,
        dilations=spread(dilation, rank), group=groups, pads=spread(padding, rank) * 2, strides=spread(stride, rank),
        kernel_shape=static(weight.shape[2:], "the kernel of a convolution"),
        output_padding=extra if any(extra) else None,
    )  # fmt: skip


@rule("convolution")
def any_convolution(
    to: Writer,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    """The operator behind all convolutions."""
    if transposed:
        return transposed_convolution(to, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return convolution(to, x, weight, bias, stride, padding, dilation, groups)


def _convolved(to: Writer, operator: str, x: Value, weight: Value, bias: Value | None, **settings: Any) -> Value:
    if x.dtype is not weight.dtype:
        raise NotLoweredError(f"a convolution of {x.dtype} with {weight.dtype}")
    if x.rank == weight.rank:
        return to.add(operator, x, weight, bias, **settings)
    found = to.add(operator, to.unsqueeze(x, [0]), weight, bias, shape=[1, *to.shape], **settings)
    return to.squeeze(found, [0])
