"""Layers of detectors: Normalize, PriorBox, ROIPooling, ROIAlign, Nms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.caffe.engine.layers.detection import PriorBox
from amct.caffe.engine.layers.normalization import Normalize
from amct.caffe.engine.layers.regions import COLUMNS, ROIAlign, ROIPooling
from amct.caffe.engine.layers.tensor_math import Nms
from amct.caffe.onnx.forms.place import FLOAT, INT64, fixed
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.place import Place


@onnx_form(Normalize)
def normalize(place: Place[Normalize]) -> None:
    """Return scale * x / sqrt(sum(x^2) + eps)."""
    layer, axes = place.layer, len(place.bottom_dims[0])
    over = list(range(1, axes)) if layer.options.across_spatial else [1]
    squares = place.step("squares", "Mul", place.bottom, place.bottom)
    total = place.reduced("total", "ReduceSum", squares, over)
    shifted = place.step("shifted", "Add", total, place.value("eps", float(layer.options.eps)))
    quotient = place.step("quotient", "Div", place.bottom, place.step("norm", "Sqrt", shifted))
    place.top("Mul", quotient, place.parameter(0, "scale", (layer.blobs[0].count, *(1,) * (axes - 2))))


@onnx_form(PriorBox)
def prior_box(place: Place[PriorBox]) -> None:
    """A constant, because the result depends on the shapes only."""
    pictures = [torch.empty(1, 1, *fixed(dims[2:])) for dims in place.bottom_dims]
    place.alias(place.value("boxes", place.layer.forward(pictures, [])[0].numpy()))


@onnx_form(ROIPooling)
def roi_pooling(place: Place[ROIPooling]) -> None:
    """MaxRoiPool."""
    layer = place.layer
    regions = place.reshaped(place.bottoms[1], (None, COLUMNS), "regions")
    place.top("MaxRoiPool", place.bottom, regions, pooled_shape=list(layer.pooled), spatial_scale=float(layer.scale))


@onnx_form(ROIAlign)
def roi_align(place: Place[ROIAlign]) -> None:
    """RoiAlign without the half-pixel shift; image indices and corners are separate inputs."""
    layer = place.layer
    regions = place.reshaped(place.bottoms[1], (None, COLUMNS), "regions")
    parts = [place.writer.tensor(f"{layer.name}.{part}") for part in ("picture", "corners")]
    place.node("Split", "parts", [regions, place.value("columns", [1, COLUMNS - 1])], parts, axis=1)
    picture = place.step("flat_picture", "Reshape", parts[0], place.value("flat_shape", [-1]))
    picture = place.step("index", "Cast", picture, to=INT64)
    corners = parts[1]
    if layer.options.roi_end_mode:
        inside = np.array([0.0, 0.0, layer.options.roi_end_mode, layer.options.roi_end_mode], np.float32)
        corners = place.step("ends", "Add", corners, place.value("inside", inside))
    place.top(
        "RoiAlign",
        place.bottom,
        corners,
        picture,
        mode="avg",
        coordinate_transformation_mode="output_half_pixel",
        output_height=layer.pooled[0],
        output_width=layer.pooled[1],
        sampling_ratio=max(0, int(layer.options.sampling_ratio)),
        spatial_scale=float(layer.scale),
    )


@onnx_form(Nms)
def nms(place: Place[Nms]) -> None:
    """NonMaxSuppression, its indices cast to float."""
    layer = place.layer
    (boxes,) = fixed(place.bottom_dims[0][1:2])
    most = boxes if layer.most is None else layer.most
    inputs = [*place.bottoms, place.value("most", [most])]
    inputs.append(place.value("iou_threshold", np.array([layer.options.iou_threshold], np.float32)))
    if layer.options.HasField("score_threshold"):
        inputs.append(place.value("score_threshold", np.array([layer.threshold], np.float32)))
    kept = place.main("NonMaxSuppression", *inputs, center_point_box=int(layer.options.center_point_box))
    place.writer.node("Cast", f"{layer.name}.rows", [kept], place.tops, to=FLOAT)
