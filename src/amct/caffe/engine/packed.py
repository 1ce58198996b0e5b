"""Convolutions with weights rearranged once and the activation computed in the same pass (oneDNN, through torch).

torch's own compiler calls the same two operators; where a torch build lacks them, everything works without, a
little slower.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from amct.caffe.engine.layers.convolution import Window

#: What is applied to every value of the result: the operator's name for it, and its numbers.
Activation: TypeAlias = tuple[str, tuple[float, ...]]

#: Below this many input values the plain convolution is faster than the call.
SMALLEST_INPUT = 20480


@cache
def is_available() -> bool:
    """Whether this build of torch has the operators and they compute what they should."""
    try:
        bottom, weight, bias = torch.ones(1, 2, 3, 3), torch.ones(4, 2, 1, 1), torch.full((4,), -3.0)
        ones, none = (1, 1), (0, 0)
        packed = torch.ops.mkldnn._reorder_convolution_weight(weight, none, ones, ones, 1, [1, 2, 3, 3])
        result = torch.ops.mkldnn._convolution_pointwise(bottom, packed, bias, none, ones, ones, 1, "relu", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(torch.equal(result, torch.zeros(1, 4, 3, 3)))


def is_worthwhile(bottom: torch.Tensor) -> bool:
    """Whether the packed form runs here, and pays."""
    return (
        bottom.numel() > SMALLEST_INPUT
        and bottom.device.type == "cpu"
        and bottom.dtype == torch.float32
        and not torch.is_grad_enabled()
        and is_available()
    )


def pack(weight: torch.Tensor, window: Window, group: int, bottom_shape: torch.Size) -> torch.Tensor:
    """The weights in the order the kernel wants for bottoms of this shape."""
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
