"""Windows over images: those of convolutions, Pooling with Caffe's window rules, and SPP, which is built from it.

The output size of a pooling is rounded up (unless ``round_mode`` is FLOOR or ``ceil_mode`` false); a last window that
would start in the padding is dropped; MAX ignores the padding; AVE divides by the area of the window inside the padded
image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from amct.caffe.engine.layer import Layer, register, require_image

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.layer import Call
    from amct.caffe.engine.messages import ProtoMessage

    Convolve = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

SPATIAL_AXES = 2
"""Of images: rows and columns."""
MAX, AVE, STOCHASTIC = 0, 1, 2
FLOOR = 1
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


@register("Pooling")
class Pooling(Layer):
    """MAX, AVE or STOCHASTIC over windows of (N, C, H, W); with MAX an optional second top holds the indices."""

    top_count = (1, 2)

    @classmethod
    def only_moves_values(cls, parameter: ProtoMessage) -> bool:
        """MAX without the places."""
        return len(parameter.top) == 1 and bool(parameter.pooling_param.pool == parameter.pooling_param.MAX)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read and check the window."""
        options = self.options = self.parameter.pooling_param
        require_image(bottoms[0], self.name)
        if len(self.top_blobs) > 1 and options.pool != MAX:
            raise self.error("only MAX pooling has a second top (the indices of the maxima)")
        self._check_options(options)
        self._window(bottoms[0])

    def _check_options(self, options: ProtoMessage) -> None:
        pair = options.HasField("kernel_h") or options.HasField("kernel_w")
        if options.global_pooling:
            if options.HasField("kernel_size") or pair:
                raise self.error("With Global_pooling: true Filter size cannot specified")
            if (options.pad, options.pad_h, options.pad_w) != (0, 0, 0) or options.stride != 1:
                raise self.error("With Global_pooling: true; only pad = 0 and stride = 1")
        elif options.HasField("kernel_size") == pair or (
            pair and not (options.HasField("kernel_h") and options.HasField("kernel_w"))
        ):
            raise self.error(
                "Filter size is kernel_size OR kernel_h and kernel_w; not both, and one of them is required"
            )
        for name in ("pad", "stride"):
            if options.HasField(name) and (options.HasField(f"{name}_h") or options.HasField(f"{name}_w")):
                raise self.error(f"{name} is {name} OR {name}_h and {name}_w; not both")

    def _window(self, shape: Shape) -> PoolWindow:
        kernel, stride, pad = (size_pair(self.options, name) for name in ("kernel", "stride", "pad"))
        if self.options.global_pooling:
            kernel = (shape[2], shape[3])
        if min(kernel) <= 0 or min(stride) <= 0:
            raise self.error(f"Filter dimensions cannot be zero: kernel {kernel}, stride {stride}")
        # Beyond the padded image all windows are equally empty: a larger stride would only need more memory.
        reachable = (
            min(step, size + 2 * margin + 1) for step, size, margin in zip(stride, shape[2:], pad, strict=True)
        )
        stride = (next(reachable), next(reachable))
        floor = self.options.round_mode == FLOOR or not getattr(self.options, "ceil_mode", True)
        window = PoolWindow(kernel=kernel, stride=stride, pad=pad, floor=floor)
        if any(pad >= size for pad, size in zip(window.pad, window.kernel, strict=True)):
            raise self.error(f"pad {window.pad} must be smaller than the kernel {window.kernel}")
        return window

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(N, C, H', W') with Caffe's output size."""
        require_image(bottoms[0], self.name)
        self.window = self._window(bottoms[0])
        height, width = self.window.output(bottoms[0][2:])
        if height <= 0 or width <= 0:
            raise self.error(f"the kernel {self.window.kernel} is larger than the padded input {bottoms[0]}")
        if self.options.pool == STOCHASTIC:
            values = (*bottoms[0][:2], *self.window.kernel, height * width)
            self.context.check_size(values, f'the values of all windows of layer "{self.name}"')
        return [(*bottoms[0][:2], height, width)] * len(self.top_blobs)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Pool each window by the method."""
        bottom, method = bottoms[0], self.options.pool
        if method == AVE:
            return [average_pool(bottom, self.window)]
        if method == STOCHASTIC:
            return [self._stochastic(bottom)]
        if len(self.top_blobs) > 1:
            values, places = max_pool(bottom, self.window)
            return [values, places.to(bottom.dtype)]
        return [max_pool_values(bottom, self.window)]

    def bind(self, bottoms: list[torch.Tensor]) -> Call:
        """MAX without the places: torch's function with the window for these sizes."""
        if self.options.pool != MAX or len(self.top_blobs) > 1 or not self.computes_forward("bind"):
            return super().bind(bottoms)
        pool = bind_max_pool(bottoms[0], self.window)
        return lambda given: (pool(given[0]),)

    def _stochastic(self, bottom: torch.Tensor) -> torch.Tensor:
        """Training: draw one value per window with probability x / sum(x). Testing: sum(x^2) / sum(x)."""
        window = self.window
        output = window.output(bottom.shape[2:])
        padded = functional.pad(bottom, window.overhang(bottom.shape[2:], output))
        columns = functional.unfold(padded, window.kernel, stride=window.stride)
        cells = columns.reshape(bottom.shape[0], bottom.shape[1], -1, columns.shape[2])
        total = cells.sum(2)
        if not self.is_training:
            pooled = torch.where(total > 0, (cells * cells).sum(2) / total, torch.zeros_like(total))
        else:
            chance = torch.where(total.unsqueeze(2) > 0, cells.detach(), torch.ones_like(cells)).clamp(min=0)
            rows = chance.permute(0, 1, 3, 2).reshape(-1, cells.shape[2])
            chosen = torch.multinomial(rows, 1).reshape(*cells.shape[:2], 1, cells.shape[3])
            pooled = cells.gather(2, chosen).squeeze(2)
        return pooled.reshape(*bottom.shape[:2], *output)


@register("SPP")
class SPP(Layer):
    """Spatial pyramid pooling: 1x1, 2x2, 4x4, ... bins over the whole image, flattened and concatenated."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read pyramid_height and the method."""
        options = self.options = self.parameter.spp_param
        require_image(bottoms[0], self.name)
        self.levels: int = options.pyramid_height
        if self.levels <= 0:
            raise self.error(f"pyramid_height must be > 0, got {self.levels}")
        if options.pool == STOCHASTIC:
            raise self.error("STOCHASTIC pooling is not available in SPP")

    def _windows(self, shape: Shape) -> list[PoolWindow]:
        windows = []
        for level in range(self.levels):
            bins = 2**level
            kernel = (math.ceil(shape[2] / bins), math.ceil(shape[3] / bins))
            pad = ((kernel[0] * bins - shape[2] + 1) // 2, (kernel[1] * bins - shape[3] + 1) // 2)
            if any(margin >= size for margin, size in zip(pad, kernel, strict=True)):
                raise self.error(f"a pyramid of {self.levels} levels does not fit a picture of {shape[2]} x {shape[3]}")
            windows.append(PoolWindow(kernel=kernel, stride=kernel, pad=pad))
        return windows

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(N, C * total number of bins); with one level (N, C, 1, 1)."""
        shape = bottoms[0]
        require_image(shape, self.name)
        self.windows = self._windows(shape)
        outputs = [window.output(shape[2:]) for window in self.windows]
        if self.levels == 1:
            return [(*shape[:2], *outputs[0])]
        return [(shape[0], sum(shape[1] * height * width for height, width in outputs))]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Pool each level and concatenate."""
        pool = average_pool if self.options.pool == AVE else max_pool_values
        levels = [pool(bottoms[0], window) for window in self.windows]
        return [levels[0]] if self.levels == 1 else [torch.cat([level.flatten(1) for level in levels], 1)]


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
