"""Convolution, Deconvolution, Im2col, InnerProduct, Embed, Pooling, SPP and layers that resize an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from amct.caffe.engine.layers.pooling import AVE, LOWEST, MAX, SPP, Pooling, PoolWindow, Window
from amct.caffe.engine.layers.resample import AVERAGE, Interp, Unpooling, Upsample
from amct.caffe.engine.layers.shaping import Im2col
from amct.caffe.engine.layers.weighted import Convolution, Deconvolution, Embed, InnerProduct
from amct.caffe.onnx.forms.place import FLOAT, INT64, Place, fixed, onnx_form


@onnx_form(Convolution)
def convolution(place: Place[Convolution]) -> None:
    """One Conv per bottom, with the same weights."""
    _all(place, "Conv")


@onnx_form(Deconvolution)
def deconvolution(place: Place[Deconvolution]) -> None:
    """One ConvTranspose per bottom, with the same weights."""
    _all(place, "ConvTranspose")


def _all(place: Place[Convolution] | Place[Deconvolution], operator: str) -> None:
    layer = place.layer
    shape = layer.weight_shape() if layer.spatial_axes else (*layer.weight_shape(), 1)
    weights = [place.parameter(0, "weight", shape)]
    if len(layer.blobs) > 1:
        weights.append(place.parameter(1, "bias", (layer.outputs,)))
    for index in range(len(place.bottoms)):
        _one(place, operator, weights, index)


def _one(place: Place[Convolution] | Place[Deconvolution], operator: str, weights: list[str], index: int) -> None:
    layer = place.layer
    attributes = window_attributes(layer.window, layer.group)
    bottom = place.bottoms[index]
    if layer.axis == 1 and layer.spatial_axes:
        place.top(operator, bottom, *weights, index=index, **attributes)
        return
    # Other axes: the axes before the channels are merged into the batch; without spatial axes one of size 1 is added.
    suffix = "" if index == 0 else f".{index}"
    rest = place.bottom_dims[index][layer.axis :]
    flat = place.reshaped(bottom, (None, *rest) if layer.spatial_axes else (None, *rest, 1), f"flat{suffix}")
    place.top_reshaped(place.main(operator, flat, *weights, index=index, **attributes), index)


def window_attributes(window: Window, group: int) -> dict[str, Any]:
    """The attributes of a convolution."""
    if not window.kernel:
        return {"kernel_shape": [1], "group": group}
    return {
        "kernel_shape": list(window.kernel),
        "strides": list(window.stride),
        "pads": [*window.pad, *window.pad],
        "dilations": list(window.dilation),
        "group": group,
    }


@onnx_form(Im2col)
def im2col(place: Place[Im2col]) -> None:
    """A Conv whose filters each select one value of the window."""
    layer, dims = place.layer, place.bottom_dims[0]
    (channels,) = fixed(dims[layer.axis : layer.axis + 1])
    cells = int(np.prod(layer.window.kernel))
    filters = np.tile(np.eye(cells, dtype=np.float32), (channels, 1)).reshape(-1, 1, *layer.window.kernel)
    flat = place.reshaped(place.bottom, (None, *dims[layer.axis :]), "flat")
    attributes = window_attributes(layer.window, channels)
    place.top_reshaped(place.main("Conv", flat, place.value("filters", filters), **attributes))


MATRIX = 2


@onnx_form(InnerProduct)
def inner_product(place: Place[InnerProduct]) -> None:
    """Gemm of the flattened bottom."""
    layer, flat = place.layer, place.bottom
    is_matrix = layer.axis == 1
    if is_matrix and len(place.bottom_dims[0]) > MATRIX:
        flat = place.step("flat", "Flatten", flat, axis=1)
    elif not is_matrix:
        flat = place.reshaped(flat, (None, layer.inputs), "flat")
    weights = [place.parameter(0, "weight", transposed=bool(layer.options.transpose))]
    if len(layer.blobs) > 1:
        weights.append(place.parameter(1, "bias", (layer.outputs,)))
    if is_matrix:
        place.top("Gemm", flat, *weights, transB=1)
    else:
        place.top_reshaped(place.main("Gemm", flat, *weights, transB=1))


@onnx_form(Embed)
def embed(place: Place[Embed]) -> None:
    """Gather of weight rows, plus the bias."""
    index = place.step("index", "Cast", place.bottom, to=INT64)
    table = place.parameter(0, "weight")
    if len(place.layer.blobs) == 1:
        place.top("Gather", table, index, axis=0)
        return
    rows = place.step("rows", "Gather", table, index, axis=0)
    place.top("Add", rows, place.parameter(1, "bias", (place.layer.options.num_output,)))


@dataclass(frozen=True, kw_only=True)
class _Margins:
    """How far windows extend beyond the image, as (height, width)."""

    begin: tuple[int, int]
    end: tuple[int, int]
    """Padding and overhang of the last window."""

    @property
    def pads(self) -> list[int]:
        """The ``pads`` attribute of ONNX's poolings."""
        return [*self.begin, *self.end]

    def fit(self, window: PoolWindow) -> bool:
        """Whether runtimes accept the paddings: each smaller than the kernel."""
        both = (*zip(self.begin, window.kernel, strict=True), *zip(self.end, window.kernel, strict=True))
        return all(pad < kernel for pad, kernel in both)

    def overhang(self, window: PoolWindow) -> tuple[int, int]:
        """How far the last window extends beyond the padded image."""
        return max(0, self.end[0] - window.pad[0]), max(0, self.end[1] - window.pad[1])


def _margins(window: PoolWindow, sizes: tuple[int, ...]) -> _Margins:
    output = window.output(sizes)
    left, right, top, bottom = window.overhang(sizes, output)
    return _Margins(begin=(top, left), end=(bottom, right))


def _image_pads(begin: tuple[int, int], end: tuple[int, int]) -> list[int]:
    return [0, 0, *begin, 0, 0, *end]


def _padded(place: Place[Pooling] | Place[SPP], tensor: str, part: str, pads: list[int], value: float) -> str:
    inputs = [tensor, place.value(f"{part}_amounts", pads)]
    if value:
        inputs.append(place.value(f"{part}_value", value))
    return place.step(part, "Pad", *inputs)


def _pool(
    place: Place[Pooling] | Place[SPP], window: PoolWindow, method: int, prefix: str
) -> tuple[str, str, dict[str, Any]]:
    """Write the nodes before the pooling; returns its input, operator and attributes."""
    margins = _margins(window, fixed(place.bottom_dims[0][2:]))
    attributes: dict[str, Any] = {"kernel_shape": list(window.kernel), "strides": list(window.stride)}
    if method == MAX:
        if margins.fit(window):
            return place.bottom, "MaxPool", {**attributes, "pads": margins.pads}
        pads = _image_pads(margins.begin, margins.end)
        return _padded(place, place.bottom, f"{prefix}pad", pads, LOWEST), "MaxPool", attributes
    overhang = margins.overhang(window)
    if not any(overhang) and margins.fit(window):
        return place.bottom, "AveragePool", {**attributes, "pads": margins.pads, "count_include_pad": 1}
    tensor = place.bottom
    if any(window.pad):
        end = min(margins.end[0], window.pad[0]), min(margins.end[1], window.pad[1])
        tensor = _padded(place, tensor, f"{prefix}pad", _image_pads(window.pad, end), 0.0)
    return tensor, "AveragePool", {**attributes, "pads": [0, 0, *overhang], "count_include_pad": 0}


def _has_empty_window(place: Place[Pooling] | Place[SPP], window: PoolWindow) -> bool:
    margins = _margins(window, fixed(place.bottom_dims[0][2:]))
    return any(over >= kernel for over, kernel in zip(margins.overhang(window), window.kernel, strict=True))


@onnx_form(Pooling)
def pooling(place: Place[Pooling]) -> None:
    """MaxPool or AveragePool, or the global ones with ``global_pooling``."""
    layer, method = place.layer, place.layer.options.pool
    if layer.options.global_pooling and len(place.tops) == 1 and method in (MAX, AVE):
        place.top("GlobalAveragePool" if method == AVE else "GlobalMaxPool", place.bottom)
    elif method == MAX and len(place.tops) > 1:
        _max_with_indices(place)
    elif method == MAX or (method == AVE and not _has_empty_window(place, layer.window)):
        tensor, operator, attributes = _pool(place, layer.window, method, "")
        place.top(operator, tensor, **attributes)
    elif method == AVE:
        _average_with_empty_windows(place)
    else:
        _stochastic(place)


def _max_with_indices(place: Place[Pooling]) -> None:
    """MaxPool with indices.

    Caffe's count from the start of each plane; ONNX's from the start of the (padded) tensor.
    """
    tensor, operator, attributes = _pool(place, place.layer.window, MAX, "")
    height, width = fixed(place.bottom_dims[0][2:])
    top, left = (0, 0)
    if tensor != place.bottom:
        margins = _margins(place.layer.window, (height, width))
        top, left = margins.begin
        height, width = height + top + margins.end[0], width + left + margins.end[1]
    places = place.writer.tensor(f"{place.layer.name}.places")
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
    place.writer.node("Cast", f"{place.layer.name}.mask", [inside], [place.tops[1]], to=FLOAT)


def _average_with_empty_windows(place: Place[Pooling]) -> None:
    """Windows that start beyond the image (only without padding) have a non-positive area, by which Caffe divides 0."""
    window, sizes = place.layer.window, fixed(place.bottom_dims[0][2:])
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
    full = _padded(place, mean, "empty", _image_pads((0, 0), missing), 0.0)
    divisor = (shares[0][:, None] * shares[1][None, :]).astype(np.float32)
    place.top("Div", full, place.value("areas", divisor))


def _means(place: Place[Pooling], tensor: str, part: str) -> str:
    """The mean of each whole window, with overhang as zeros."""
    window = place.layer.window
    margins = _margins(window, fixed(place.bottom_dims[0][2:]))
    if not margins.fit(window):
        raise place.error("some windows lie outside the image: STOCHASTIC pooling in ONNX does not support that")
    attributes = {"kernel_shape": list(window.kernel), "strides": list(window.stride), "pads": margins.pads}
    return place.step(part, "AveragePool", tensor, **attributes, count_include_pad=1)


def _stochastic(place: Place[Pooling]) -> None:
    """The expectation at inference: sum(x^2) / sum(x), 0 where the sum is not positive."""
    squares = place.step("squares", "Mul", place.bottom, place.bottom)
    total, weighted = _means(place, place.bottom, "total"), _means(place, squares, "weighted")
    zero = place.value("zero", 0.0)
    is_positive = place.step("positive", "Greater", total, zero)
    place.top("Where", is_positive, place.step("expectation", "Div", weighted, total), zero)


@onnx_form(SPP)
def spp(place: Place[SPP]) -> None:
    """A pooling per level, flattened and concatenated."""
    layer = place.layer
    method = AVE if layer.options.pool == AVE else MAX
    if layer.levels == 1:
        tensor, operator, attributes = _pool(place, layer.windows[0], method, "")
        place.top(operator, tensor, **attributes)
        return
    levels = []
    for number, window in enumerate(layer.windows):
        tensor, operator, attributes = _pool(place, window, method, f"level{number}_")
        pooled = place.step(f"level{number}", operator, tensor, **attributes)
        levels.append(place.step(f"level{number}_flat", "Flatten", pooled, axis=1))
    place.top("Concat", *levels, axis=1)


@onnx_form(Upsample)
def upsample(place: Place[Upsample]) -> None:
    """Resize (nearest), or ScatterElements with a mask."""
    layer = place.layer
    if len(place.bottoms) > 1:
        places = place.step("index", "Cast", place.bottoms[1], to=INT64)
        result = _scattered(place, places)
    else:
        scales = place.value("scales", np.array([1, 1, *layer.factor], np.float32))
        mode: dict[str, Any] = {
            "mode": "nearest",
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "floor",
        }
        if layer.times == 1:
            place.top("Resize", place.bottom, "", scales, **mode)
            return
        result = place.main("Resize", place.bottom, "", scales, **mode)
    if layer.times == 1:
        place.alias(result)
    else:
        place.writer.node("Mul", f"{layer.name}.times", [result, place.value("factor", float(layer.times))], place.tops)


def _scattered(place: Place[Upsample] | Place[Unpooling], places: str) -> str:
    """A plane of zeros with the values at their indices, row * width + column."""
    batch, channels, *_ = fixed(place.bottom_dims[0])
    height, width = place.layer.size
    plane = place.value("plane", np.zeros((batch, channels, height * width), np.float32))
    flat = (batch, channels, -1)
    shape = place.value("flat_shape", list(flat))
    index = place.step("flat_index", "Reshape", places, shape)
    values = place.step("flat", "Reshape", place.bottom, shape)
    filled = place.main("ScatterElements", plane, index, values, axis=2)
    return place.reshaped(filled, place.top_dims[0], "picture")


@onnx_form(Unpooling)
def unpooling(place: Place[Unpooling]) -> None:
    """ScatterElements by the mask, or at the first pixel of each window."""
    layer = place.layer
    if layer.options.unpool == AVERAGE:
        raise place.error("there is no ONNX form of AVE unpooling; end the file before it (outputs=[...])")
    if len(place.bottoms) > 1:
        place.alias(_scattered(place, place.step("index", "Cast", place.bottoms[1], to=INT64)))
        return
    dims = fixed(place.bottom_dims[0])
    rows, columns = (
        np.clip(np.arange(count) * stride - pad, 0, limit - 1)
        for count, stride, pad, limit in zip(dims[2:], layer.stride, layer.pad, layer.size, strict=True)
    )
    starts = rows[:, None] * layer.size[1] + columns
    place.alias(_scattered(place, place.value("index", np.broadcast_to(starts, dims).astype(np.int64))))


@onnx_form(Interp)
def interp(place: Place[Interp]) -> None:
    """Slice (cropping), then Resize with aligned corners."""
    options, dims = place.layer.options, place.bottom_dims[0]
    inner, sizes = place.bottom, fixed(dims[2:])
    if options.pad_beg or options.pad_end:
        start, ends = -options.pad_beg, [size + options.pad_end for size in sizes]
        sizes = tuple(end - start for end in ends)
        edges = {"starts": [start, start], "ends": ends, "axes": [2, 3]}
        inner = place.step("cropped", "Slice", inner, *(place.value(name, edge) for name, edge in edges.items()))
    wanted = fixed(place.top_dims[0][2:])
    if sizes == wanted:
        place.alias(inner)
        return
    # Factors instead of sizes: they leave the batch open without ``axes``, which onnxruntime's optimizer does not move.
    factors = np.array([1, 1, *(_factor(size, target) for size, target in zip(sizes, wanted, strict=True))], np.float32)
    mode: dict[str, Any] = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    place.top("Resize", inner, "", place.value("scales", factors), **mode)


def _factor(size: int, wanted: int) -> float:
    """The smallest float32 factor with which ``floor(size * factor)`` is the wanted size."""
    factor = np.float32(wanted) / np.float32(size)
    while np.floor(np.float32(size) * factor) < wanted or int(np.floor(size * float(factor))) < wanted:
        factor = np.nextafter(factor, np.float32(np.inf))
    return float(factor)
