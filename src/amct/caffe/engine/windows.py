"""Windows over images: those of poolings, with Caffe's rules, those of convolutions, and how both are computed.

Where it is faster, images are convolved with packed weights and a fused activation: the operators of oneDNN that
torch's compiler uses. A torch build without them runs the plain convolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amct.caffe.engine.layer import Activation, Layer
    from amct.caffe.engine.messages import ProtoMessage

SPATIAL_AXES = 2
"""Of images: rows and columns."""
LOWEST = torch.finfo(torch.float32).min
INDICES_AT_ONCE = 1 << 18  # 2 MB; torch's max pooling always writes int64 indices too


@dataclass(frozen=True, kw_only=True)
class PoolWindow:
    """Kernel, stride and padding as (height, width), and the rounding of the output size."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    floor: bool = False

    def output(self, sizes: Sequence[int]) -> tuple[int, int]:
        """The output's (height, width)."""
        results = []
        for size, kernel, stride, pad in zip(sizes, self.kernel, self.stride, self.pad, strict=True):
            steps = (size + 2 * pad - kernel) / stride
            results.append((math.floor(steps) if self.floor else math.ceil(steps)) + 1)
        if any(self.pad):
            for axis in (0, 1):
                if (results[axis] - 1) * self.stride[axis] >= sizes[axis] + self.pad[axis]:
                    results[axis] -= 1
        return results[0], results[1]

    def is_torch_like(self, sizes: Sequence[int], output: tuple[int, int]) -> bool:
        """Whether torch's pooling with ``ceil_mode`` uses the same windows."""
        if any(2 * pad > kernel for pad, kernel in zip(self.pad, self.kernel, strict=True)):
            return False
        for size, kernel, stride, pad, result in zip(sizes, self.kernel, self.stride, self.pad, output, strict=True):
            steps = size + 2 * pad - kernel
            theirs = (steps // stride if self.floor else -(-steps // stride)) + 1
            if not self.floor and (theirs - 1) * stride >= size + pad:
                theirs -= 1
            if theirs != result:
                return False
        return True

    def overhang(self, sizes: Sequence[int], output: tuple[int, int]) -> list[int]:
        """The padding that covers all windows, in torch's order: left, right, top, bottom."""
        amounts: list[int] = []
        for axis in (1, 0):
            end = (output[axis] - 1) * self.stride[axis] + self.kernel[axis]
            amounts += [self.pad[axis], max(0, end - sizes[axis] - self.pad[axis])]
        return amounts

    def ends(self, sizes: Sequence[int]) -> tuple[int, int]:
        """How far the last window extends beyond the image, as (height, width)."""
        _, right, _, bottom = self.overhang(sizes, self.output(sizes))
        return bottom, right


def size_pair(options: ProtoMessage, name: str) -> tuple[int, int]:
    """Height and width of the kernel, stride or pad of a pooling."""
    if options.HasField(f"{name}_h") or options.HasField(f"{name}_w"):
        return getattr(options, f"{name}_h"), getattr(options, f"{name}_w")
    single: int = getattr(options, "kernel_size" if name == "kernel" else name)
    return single, single


def max_pool(bottom: torch.Tensor, window: PoolWindow) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each window (the first on a tie) and its index, row * width + column."""
    sizes = bottom.shape[2:]
    output = window.output(sizes)
    if window.is_torch_like(sizes, output):
        values, places = functional.max_pool2d_with_indices(
            bottom, window.kernel, window.stride, window.pad, ceil_mode=not window.floor
        )
        return values, places
    pads = window.overhang(sizes, output)
    padded = functional.pad(bottom, pads, value=LOWEST)
    values, places = functional.max_pool2d_with_indices(padded, window.kernel, window.stride)
    rows, columns = places // padded.shape[3] - window.pad[0], places % padded.shape[3] - window.pad[1]
    return values[..., : output[0], : output[1]], (rows * sizes[1] + columns)[..., : output[0], : output[1]]


def max_pool_values(bottom: torch.Tensor, window: PoolWindow) -> torch.Tensor:
    """The largest value of each window."""
    return bind_max_pool(bottom, window)(bottom)


def bind_max_pool(bottom: torch.Tensor, window: PoolWindow) -> Callable[[torch.Tensor], torch.Tensor]:
    """``max_pool_values`` for bottoms of this shape."""
    sizes = bottom.shape[2:]
    output = window.output(sizes)
    if not window.is_torch_like(sizes, output):
        return lambda given: max_pool(given, window)[0]
    pictures = max(1, INDICES_AT_ONCE // max(1, bottom.shape[1] * math.prod(output)))
    if torch.is_grad_enabled() or bottom.device.type != "cpu" or pictures >= bottom.shape[0]:
        arguments = window.kernel, window.stride, window.pad, (1, 1), not window.floor
        return lambda given: torch.max_pool2d(given, *arguments)
    return lambda given: _max_pool_in_parts(given, window, output, pictures)


def _max_pool_in_parts(
    bottom: torch.Tensor, window: PoolWindow, output: tuple[int, int], pictures: int
) -> torch.Tensor:
    """Pool a few images at a time, so that the unused indices take little memory."""
    is_channels_last = bottom.is_contiguous(memory_format=torch.channels_last) and not bottom.is_contiguous()
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    shape = (bottom.shape[1], *output)
    values = torch.empty((bottom.shape[0], *shape), dtype=bottom.dtype, memory_format=layout)
    places = torch.empty((pictures, *shape), dtype=torch.int64, memory_format=layout)
    for begin in range(0, bottom.shape[0], pictures):
        part = bottom[begin : begin + pictures]
        torch.ops.aten.max_pool2d_with_indices.out(
            part,
            window.kernel,
            window.stride,
            window.pad,
            ceil_mode=not window.floor,
            out=values[begin : begin + pictures],
            indices=places[: part.shape[0]],
        )
    return values


def average_pool(bottom: torch.Tensor, window: PoolWindow) -> torch.Tensor:
    """The mean of each window; padding is included, the part of a window beyond the padding is not."""
    sizes = bottom.shape[2:]
    output = window.output(sizes)
    if output == (1, 1) and window.kernel == tuple(sizes) and not any(window.pad):
        return bottom.mean((2, 3), keepdim=True)
    if window.is_torch_like(sizes, output):
        return functional.avg_pool2d(bottom, window.kernel, window.stride, window.pad, ceil_mode=not window.floor)
    padded = functional.pad(bottom, window.overhang(sizes, output))
    sums = functional.avg_pool2d(padded, window.kernel, window.stride, divisor_override=1)
    return sums[..., : output[0], : output[1]] / _areas(window, sizes, output).to(bottom.device)


def _areas(window: PoolWindow, sizes: Sequence[int], output: tuple[int, int]) -> torch.Tensor:
    """The area of each window inside the padded image."""
    lengths = []
    for axis in (0, 1):
        start = torch.arange(output[axis]) * window.stride[axis] - window.pad[axis]
        end = torch.clamp(start + window.kernel[axis], max=sizes[axis] + window.pad[axis])
        lengths.append((end - start).to(torch.float32))
    return lengths[0][:, None] * lengths[1][None, :]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Kernel, stride, padding and dilation along each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]

    def output(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """floor((size + 2 * pad - dilation * (kernel - 1) - 1) / stride) + 1 for each axis."""
        return tuple(
            (size + 2 * pad - (dilation * (kernel - 1) + 1)) // stride + 1
            for size, kernel, stride, pad, dilation in zip(
                sizes, self.kernel, self.stride, self.pad, self.dilation, strict=True
            )
        )

    def onnx_attributes(self, group: int) -> dict[str, Any]:
        """The attributes of a convolution in ONNX; without spatial axes it has one of size 1."""
        if not self.kernel:
            return {"kernel_shape": [1], "group": group}
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.stride),
            "pads": [*self.pad, *self.pad],
            "dilations": list(self.dilation),
            "group": group,
        }

    def transposed_output(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return stride * (size - 1) + dilation * (kernel - 1) + 1 - 2 * pad for each axis."""
        return tuple(
            stride * (size - 1) + dilation * (kernel - 1) + 1 - 2 * pad
            for size, kernel, stride, pad, dilation in zip(
                sizes, self.kernel, self.stride, self.pad, self.dilation, strict=True
            )
        )


def read_window(layer: Layer, options: ProtoMessage, axes: int) -> Window:
    """Read kernel, stride, padding and dilation from a ConvolutionParameter for ``axes`` spatial axes.

    Raises:
        ModelError: Sizes are missing, zero, given twice, or of the wrong number.
    """
    kernel = _sizes(layer, options, "kernel_size", ("kernel_h", "kernel_w"), axes, None)
    stride = _sizes(layer, options, "stride", ("stride_h", "stride_w"), axes, 1)
    pad = _sizes(layer, options, "pad", ("pad_h", "pad_w"), axes, 0)
    dilation = _sizes(layer, options, "dilation", None, axes, 1)
    for name, sizes in (("kernel_size", kernel), ("stride", stride), ("dilation", dilation)):
        if any(size <= 0 for size in sizes):
            raise layer.error(f"{name}: Filter dimensions must be nonzero, got {sizes}")
    return Window(kernel=kernel, stride=stride, pad=pad, dilation=dilation)


def _sizes(
    layer: Layer, options: ProtoMessage, name: str, pair: tuple[str, str] | None, axes: int, default: int | None
) -> tuple[int, ...]:
    given = list(getattr(options, name))
    if pair is not None and (options.HasField(pair[0]) or options.HasField(pair[1])):
        if axes != SPATIAL_AXES:
            raise layer.error(
                f"{pair[0]} & {pair[1]} can only be used for 2D convolution, this one has {axes} spatial axes"
            )
        if given:
            raise layer.error(f"Either {name} or {pair[0]}/{pair[1]} should be specified; not both")
        return getattr(options, pair[0]), getattr(options, pair[1])
    if not given and default is not None:
        return (default,) * axes
    if len(given) not in (1, axes):
        raise layer.error(
            f"{name} must be specified once, or once per spatial dimension ({axes}), got {len(given)} value(s)"
        )
    return tuple(given * axes if len(given) == 1 else given)[:axes]


#: torch's own limits: one small image with a small kernel is convolved by a matrix product.
SMALLEST_INPUT = 20480
LARGEST_SMALL_KERNEL = 3
#: For that an image in channels_last would have to be converted first, unless the kernel is one pixel.
SMALLEST_REORDERED_INPUT = 8192


@cache
def can_pack() -> bool:
    """Whether this torch build has the operators and they compute correct results."""
    try:
        bottom, weight, bias = torch.ones(1, 2, 3, 3), torch.ones(4, 2, 1, 1), torch.full((4,), -3.0)
        ones, none = (1, 1), (0, 0)
        packed = torch.ops.mkldnn._reorder_convolution_weight(weight, none, ones, ones, 1, [1, 2, 3, 3])
        result = torch.ops.mkldnn._convolution_pointwise(bottom, packed, bias, none, ones, ones, 1, "relu", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(torch.equal(result, torch.zeros(1, 4, 3, 3)))


def packing_is_worthwhile(bottom: torch.Tensor, window: Window, group: int) -> bool:
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
        and can_pack()
    )


def _is_reordered(bottom: torch.Tensor) -> bool:
    return bottom.is_contiguous(memory_format=torch.channels_last) and not bottom.is_contiguous()


def pack(weight: torch.Tensor, window: Window, group: int, bottom_shape: torch.Size) -> torch.Tensor:
    """The weights packed for bottoms of this shape."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight(
        weight.contiguous(), window.pad, window.stride, window.dilation, group, list(bottom_shape)
    )
    return packed


def bind_packed(
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


def convolve_one_channel(
    bottom: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window
) -> torch.Tensor:
    """The convolution of (N, 1, H, W) with a weight (outputs, 1, kernel...)."""
    result: torch.Tensor = _OneChannel.apply(bottom, weight, bias, window)  # type: ignore[no-untyped-call]
    return result


class _OneChannel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's untyped context
        bottom: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        window: Window,
    ) -> torch.Tensor:
        ctx.save_for_backward(bottom, weight)
        ctx.window, ctx.has_bias = window, bias is not None
        return functional.conv2d(bottom, weight, bias, window.stride, window.pad, window.dilation)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - as above
        bottom, weight = ctx.saved_tensors
        window, outputs = ctx.window, weight.shape[0]
        needs_bias = ctx.has_bias and ctx.needs_input_grad[2]
        _, for_weight, for_bias = torch.ops.aten.convolution_backward(
            gradients[0],
            bottom,
            weight,
            [outputs] if ctx.has_bias else None,
            window.stride,
            window.pad,
            window.dilation,
            False,
            [0, 0],
            1,
            [False, ctx.needs_input_grad[1], needs_bias],
        )
        columns = weight.reshape(outputs, -1).t() @ gradients[0].reshape(len(bottom), outputs, -1)
        for_bottom = functional.fold(
            columns, bottom.shape[2:], window.kernel, window.dilation, window.pad, window.stride
        )
        return for_bottom, for_weight, for_bias, None
