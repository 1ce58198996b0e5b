"""Convolutions with packed weights and a fused activation (oneDNN, through torch).

These are the operators that torch's compiler uses; a torch build without them runs the plain convolution.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from amct.caffe.engine.layers.convolution import Window

#: An activation: its name for the operator, and its arguments.
Activation: TypeAlias = tuple[str, tuple[float, ...]]

#: torch's own limits: one small image with a small kernel is convolved by a matrix product.
SMALLEST_INPUT = 20480
LARGEST_SMALL_KERNEL = 3
#: For that an image in channels_last would have to be converted first, unless the kernel is one pixel.
SMALLEST_REORDERED_INPUT = 8192


@cache
def is_available() -> bool:
    """Whether this torch build has the operators and they compute correct results."""
    try:
        bottom, weight, bias = torch.ones(1, 2, 3, 3), torch.ones(4, 2, 1, 1), torch.full((4,), -3.0)
        ones, none = (1, 1), (0, 0)
        packed = torch.ops.mkldnn._reorder_convolution_weight(weight, none, ones, ones, 1, [1, 2, 3, 3])
        result = torch.ops.mkldnn._convolution_pointwise(bottom, packed, bias, none, ones, ones, 1, "relu", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(torch.equal(result, torch.zeros(1, 4, 3, 3)))


def is_worthwhile(bottom: torch.Tensor, window: Window, group: int) -> bool:
    """Whether the packed convolution can run on this input and is faster.

    That is where torch itself uses oneDNN, which then need not reorder the weights each time, with dilation, and where
    the input has oneDNN's layout.
    """
    is_reordered = max(window.kernel) > 1 and _is_reordered(bottom)
    return (
        (
            bottom.numel() > (SMALLEST_REORDERED_INPUT if is_reordered else SMALLEST_INPUT)
            or bottom.shape[0] > 1
            or group > 1
            or min(window.kernel) > LARGEST_SMALL_KERNEL
            or max(window.dilation) > 1
        )
        and bottom.device.type == "cpu"
        and bottom.dtype == torch.float32
        and not torch.is_grad_enabled()
        and is_available()
    )


def _is_reordered(bottom: torch.Tensor) -> bool:
    return bottom.is_contiguous(memory_format=torch.channels_last) and not bottom.is_contiguous()


def pack(weight: torch.Tensor, window: Window, group: int, bottom_shape: torch.Size) -> torch.Tensor:
    """The weights packed for bottoms of this shape."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight(
        weight.contiguous(), window.pad, window.stride, window.dilation, group, list(bottom_shape)
    )
    return packed


def bind(
    packed: torch.Tensor, bias: torch.Tensor | None, window: Window, group: int, activation: Activation
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A call that convolves, adds the bias and applies the activation in one pass; its result is channels_last."""
    name, numbers = activation
    kernel = torch.ops.mkldnn._convolution_pointwise.default
    rest = packed, bias, list(window.pad), list(window.stride), list(window.dilation), group, name, list(numbers), ""
    channels_last = torch.channels_last

    def call(bottom: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = kernel(bottom.contiguous(memory_format=channels_last), *rest)
        return result

    return call
