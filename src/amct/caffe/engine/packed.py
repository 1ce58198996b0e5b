"""Convolutions with packed weights and a fused activation (oneDNN, through torch).

These are the operators that torch's compiler uses; a torch build without them runs the plain convolution.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from amct.caffe.engine.layers.convolution import Window

#: An activation: its name for the operator, and its arguments.
Activation: TypeAlias = tuple[str, tuple[float, ...]]

#: With fewer input values the plain convolution is faster.
SMALLEST_INPUT = 20480


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


def is_worthwhile(bottom: torch.Tensor) -> bool:
    """Whether the packed convolution can run on this input and is faster."""
    return (
        bottom.numel() > SMALLEST_INPUT
        and bottom.device.type == "cpu"
        and bottom.dtype == torch.float32
        and not torch.is_grad_enabled()
        and is_available()
    )


def pack(weight: torch.Tensor, window: Window, group: int, bottom_shape: torch.Size) -> torch.Tensor:
    """The weights packed for bottoms of this shape."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight(
        weight.contiguous(), window.pad, window.stride, window.dilation, group, list(bottom_shape)
    )
    return packed


def convolve(
    bottom: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    window: Window,
    group: int,
    activation: Activation = ("none", ()),
) -> torch.Tensor:
    """The convolution, bias and activation in one pass; the result is channels_last."""
    name, numbers = activation
    result: torch.Tensor = torch.ops.mkldnn._convolution_pointwise(
        bottom, packed, bias, window.pad, window.stride, window.dilation, group, name, list(numbers), ""
    )
    return result
