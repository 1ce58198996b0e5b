"""Convolution, Deconvolution and Im2col."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from amct.caffe.engine.layers.shaping import Im2col
from amct.caffe.engine.layers.weighted import Convolution, Deconvolution
from amct.caffe.onnx.forms.place import Place, fixed
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.engine.layers.pooling import Window
    from amct.caffe.onnx.forms.writer import Attribute


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


def window_attributes(window: Window, group: int) -> dict[str, Attribute]:
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
