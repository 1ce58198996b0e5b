"""Layers that resize an image: Upsample, Unpooling, Interp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from amct.caffe.engine.layers.resample import AVERAGE, Interp, Unpooling, Upsample
from amct.caffe.onnx.forms.place import INT64, fixed
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.place import Place
    from amct.caffe.onnx.forms.writer import Attribute


@onnx_form(Upsample)
def upsample(place: Place[Upsample]) -> None:
    """Resize (nearest), or ScatterElements with a mask."""
    layer = place.layer
    if len(place.bottoms) > 1:
        places = place.step("index", "Cast", place.bottoms[1], to=INT64)
        result = _scattered(place, places)
    else:
        scales = place.value("scales", np.array([1, 1, *layer.factor], np.float32))
        mode: dict[str, Attribute] = {
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
    mode: dict[str, Attribute] = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    place.top("Resize", inner, "", place.value("scales", factors), **mode)


def _factor(size: int, wanted: int) -> float:
    """The smallest float32 factor with which ``floor(size * factor)`` is the wanted size."""
    factor = np.float32(wanted) / np.float32(size)
    while np.floor(np.float32(size) * factor) < wanted or int(np.floor(size * float(factor))) < wanted:
        factor = np.nextafter(factor, np.float32(np.inf))
    return float(factor)
