"""Pooling with Caffe's window rules, and SPP, which is built from it.

The output size of a pooling is rounded up (unless ``round_mode`` is FLOOR or ``ceil_mode`` false); a last window that
would start in the padding is dropped; MAX ignores the padding; AVE divides by the area of the window inside the padded
image.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from amct.caffe.engine.layer import WINDOW_COST, Call, Layer, Place, ProtoMessage, Shape, Tensors, count, register
from amct.caffe.engine.onnx_place import FLOAT, fixed
from amct.caffe.engine.windows import (
    LOWEST,
    PoolWindow,
    average_pool,
    bind_max_pool,
    max_pool,
    max_pool_values,
    size_pair,
)

MAX, AVE, STOCHASTIC = 0, 1, 2
FLOOR = 1


def _fits(window: PoolWindow, ends: tuple[int, int]) -> bool:
    """Whether ONNX runtimes accept the paddings: each smaller than the kernel."""
    return all(pad < kernel for pad, kernel in zip((*window.pad, *ends), window.kernel * 2, strict=True))


def _beyond(window: PoolWindow, ends: tuple[int, int]) -> tuple[int, int]:
    """How far the last window extends beyond the padded image."""
    return max(0, ends[0] - window.pad[0]), max(0, ends[1] - window.pad[1])


def _padded(
    place: Place, tensor: str, part: str, begin: tuple[int, int], end: tuple[int, int], value: float = 0.0
) -> str:
    inputs = [tensor, place.value(f"{part}_amounts", [0, 0, *begin, 0, 0, *end])]
    if value:
        inputs.append(place.value(f"{part}_value", value))
    return place.step(part, "Pad", *inputs)


def _pool(place: Place, window: PoolWindow, method: int, prefix: str = "") -> tuple[str, str, dict[str, Any]]:
    """Write the nodes before the pooling; returns its input, operator and attributes."""
    ends = window.ends(fixed(place.bottom_dims[0][2:]))
    attributes: dict[str, Any] = {"kernel_shape": list(window.kernel), "strides": list(window.stride)}
    pads = {"pads": [*window.pad, *ends]}
    if method == MAX:
        if _fits(window, ends):
            return place.bottom, "MaxPool", attributes | pads
        return _padded(place, place.bottom, f"{prefix}pad", window.pad, ends, LOWEST), "MaxPool", attributes
    beyond = _beyond(window, ends)
    if not any(beyond) and _fits(window, ends):
        return place.bottom, "AveragePool", attributes | pads | {"count_include_pad": 1}
    tensor = place.bottom
    if any(window.pad):
        inside = min(ends[0], window.pad[0]), min(ends[1], window.pad[1])
        tensor = _padded(place, tensor, f"{prefix}pad", window.pad, inside)
    return tensor, "AveragePool", attributes | {"pads": [0, 0, *beyond], "count_include_pad": 0}


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
        self.require_image(bottoms[0])
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
        self.require_image(bottoms[0])
        self.window = self._window(bottoms[0])
        height, width = self.window.output(bottoms[0][2:])
        if height <= 0 or width <= 0:
            raise self.error(f"the kernel {self.window.kernel} is larger than the padded input {bottoms[0]}")
        if self.options.pool == STOCHASTIC:
            values = (*bottoms[0][:2], *self.window.kernel, height * width)
            self.context.check_size(values, f'the values of all windows of layer "{self.name}"')
        return [(*bottoms[0][:2], height, width)] * len(self.top_blobs)

    def operations(self, bottoms: list[Shape], tops: list[Shape]) -> int:
        """For each value of the top as many as its window has inside of the picture."""
        inside = [min(size, length) for size, length in zip(self.window.kernel, bottoms[0][2:], strict=True)]
        return count(tops[0]) * count(inside) * WINDOW_COST

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
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

    def bind(self, bottoms: Tensors) -> Call:
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

    def to_onnx(self, place: Place) -> None:
        """MaxPool or AveragePool, or the global ones with ``global_pooling``."""
        method = self.options.pool
        if self.options.global_pooling and len(place.tops) == 1 and method in (MAX, AVE):
            place.top("GlobalAveragePool" if method == AVE else "GlobalMaxPool", place.bottom)
        elif method == MAX and len(place.tops) > 1:
            self._max_with_indices(place)
        elif method == MAX or (method == AVE and not self._has_empty_window(place)):
            tensor, operator, attributes = _pool(place, self.window, method)
            place.top(operator, tensor, **attributes)
        elif method == AVE:
            self._average_with_empty_windows(place)
        else:
            self._write_stochastic(place)

    def _has_empty_window(self, place: Place) -> bool:
        beyond = _beyond(self.window, self.window.ends(fixed(place.bottom_dims[0][2:])))
        return any(over >= kernel for over, kernel in zip(beyond, self.window.kernel, strict=True))

    def _max_with_indices(self, place: Place) -> None:
        """MaxPool with indices.

        Caffe's count from the start of each plane; ONNX's from the start of the (padded) tensor.
        """
        tensor, operator, attributes = _pool(place, self.window, MAX)
        height, width = fixed(place.bottom_dims[0][2:])
        top, left = (0, 0)
        if tensor != place.bottom:
            (top, left), ends = self.window.pad, self.window.ends((height, width))
            height, width = height + top + ends[0], width + left + ends[1]
        places = place.writer.tensor(f"{self.name}.places")
        place.node(operator, "", [tensor], [place.tops[0], places], **attributes)
        inside = place.step("inside", "Mod", places, place.value("area", np.int64(height * width)))
        if tensor != place.bottom:
            columns = place.value("columns", np.int64(width))
            row = place.step(
                "row", "Sub", place.step("padded_row", "Div", inside, columns), place.value("top", np.int64(top))
            )
            column = place.step("padded_column", "Mod", inside, columns)
            column = place.step("column", "Sub", column, place.value("left", np.int64(left)))
            own = place.value("own_columns", np.int64(fixed(place.bottom_dims[0][3:])[0]))
            inside = place.step("place", "Add", place.step("start", "Mul", row, own), column)
        place.writer.node("Cast", f"{self.name}.mask", [inside], [place.tops[1]], to=FLOAT)

    def _average_with_empty_windows(self, place: Place) -> None:
        """Windows that start beyond the image (only without padding) have an area below 1, by which Caffe divides 0."""
        window, sizes = self.window, fixed(place.bottom_dims[0][2:])
        output = window.output(sizes)
        kept, shares = [], []
        for axis in (0, 1):
            start = np.arange(output[axis]) * window.stride[axis]
            kept.append(int((start < sizes[axis]).sum()))
            shares.append(np.where(start < sizes[axis], 1, sizes[axis] - start))
        end = [max(0, (kept[axis] - 1) * window.stride[axis] + window.kernel[axis] - sizes[axis]) for axis in (0, 1)]
        attributes = {"kernel_shape": list(window.kernel), "strides": list(window.stride), "pads": [0, 0, *end]}
        mean = place.step("mean", "AveragePool", place.bottom, **attributes, count_include_pad=0)
        missing = (output[0] - kept[0], output[1] - kept[1])
        full = _padded(place, mean, "empty", (0, 0), missing)
        divisor = (shares[0][:, None] * shares[1][None, :]).astype(np.float32)
        place.top("Div", full, place.value("areas", divisor))

    def _means(self, place: Place, tensor: str, part: str) -> str:
        """The mean of each whole window, with overhang as zeros."""
        window, ends = self.window, self.window.ends(fixed(place.bottom_dims[0][2:]))
        if not _fits(window, ends):
            raise place.error("some windows lie outside the image: STOCHASTIC pooling in ONNX does not support that")
        attributes = {"kernel_shape": list(window.kernel), "strides": list(window.stride), "pads": [*window.pad, *ends]}
        return place.step(part, "AveragePool", tensor, **attributes, count_include_pad=1)

    def _write_stochastic(self, place: Place) -> None:
        """The expectation at inference: sum(x^2) / sum(x), 0 where the sum is not positive."""
        squares = place.step("squares", "Mul", place.bottom, place.bottom)
        total, weighted = self._means(place, place.bottom, "total"), self._means(place, squares, "weighted")
        zero = place.value("zero", 0.0)
        is_positive = place.step("positive", "Greater", total, zero)
        place.top("Where", is_positive, place.step("expectation", "Div", weighted, total), zero)


@register("SPP")
class SPP(Layer):
    """Spatial pyramid pooling: 1x1, 2x2, 4x4, ... bins over the whole image, flattened and concatenated."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read pyramid_height and the method."""
        options = self.options = self.parameter.spp_param
        self.require_image(bottoms[0])
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
        self.require_image(shape)
        self.windows = self._windows(shape)
        outputs = [window.output(shape[2:]) for window in self.windows]
        if self.levels == 1:
            return [(*shape[:2], *outputs[0])]
        return [(shape[0], sum(shape[1] * height * width for height, width in outputs))]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Pool each level and concatenate."""
        pool = average_pool if self.options.pool == AVE else max_pool_values
        levels = [pool(bottoms[0], window) for window in self.windows]
        return [levels[0]] if self.levels == 1 else [torch.cat([level.flatten(1) for level in levels], 1)]

    def to_onnx(self, place: Place) -> None:
        """A pooling per level, flattened and concatenated."""
        method = AVE if self.options.pool == AVE else MAX
        if self.levels == 1:
            tensor, operator, attributes = _pool(place, self.windows[0], method)
            place.top(operator, tensor, **attributes)
            return
        levels = []
        for number, window in enumerate(self.windows):
            tensor, operator, attributes = _pool(place, window, method, f"level{number}_")
            pooled = place.step(f"level{number}", operator, tensor, **attributes)
            levels.append(place.step(f"level{number}_flat", "Flatten", pooled, axis=1))
        place.top("Concat", *levels, axis=1)
