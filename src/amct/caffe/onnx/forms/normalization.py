"""Normalizations, Softmax, and layers of detectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from amct.caffe.engine.layers.batch_norm import BN, BatchNorm, Bias, Scale
from amct.caffe.engine.layers.detection import PriorBox
from amct.caffe.engine.layers.losses import Softmax
from amct.caffe.engine.layers.normalization import LRN, MVN, WITHIN_CHANNEL, GroupNorm, LayerNormalization, Normalize
from amct.caffe.engine.layers.regions import COLUMNS, ROIAlign, ROIPooling
from amct.caffe.engine.layers.tensor_math import Nms
from amct.caffe.onnx.forms.place import FLOAT, INT64, Dims, Place, fixed, onnx_form


@onnx_form(BatchNorm)
def batch_norm(place: Place[BatchNorm]) -> None:
    """BatchNormalization with scale 1 and shift 0; from Reduce operators if the layer uses batch statistics."""
    layer = place.layer
    axes = len(place.bottom_dims[0])
    if not layer.use_global:
        place.top("Div", *_centred_and_deviation(place, place.bottom, [0, *range(2, axes)], float(layer.eps)))
        return
    mean, variance_values = (tensor.numpy().astype(np.float32) for tensor in layer.statistics())
    if axes == 1:
        deviation = np.sqrt(variance_values.astype(np.float64) + layer.eps)
        place.arithmetic(place.bottom, [("mean", "Sub", float(mean[0])), ("deviation", "Div", float(deviation[0]))])
        return
    ones, zeros = np.ones(layer.channels, np.float32), np.zeros(layer.channels, np.float32)
    names = ("scale", "shift", "mean", "variance")
    values = [place.value(name, array) for name, array in zip(names, (ones, zeros, mean, variance_values), strict=True)]
    place.top("BatchNormalization", place.bottom, *values, epsilon=float(layer.eps))


@onnx_form(BN)
def bn(place: Place[BN]) -> None:
    """Mul and Add; behind a normalization by Reduce operators if the layer uses batch statistics."""
    layer, axes = place.layer, len(place.bottom_dims[0])
    shape = (layer.channels, *(1,) * (axes - 2))
    affine = layer.channel_affine()
    if affine is not None:
        values = [each.float().reshape(shape).numpy() for each in (affine.multiplier, affine.addend)]
        scaled = place.step("scaled", "Mul", place.bottom, place.value("scale", values[0]))
        place.top("Add", scaled, place.value("shift", values[1]))
        return
    if len(place.tops) > 1:
        raise place.error("its further tops (mean, variance) have no ONNX form")
    parts = _centred_and_deviation(place, place.bottom, [0, *range(2, axes)], float(layer.eps))
    scaled = place.step("scaled", "Mul", place.step("normalized", "Div", *parts), place.parameter(0, "scale", shape))
    place.top("Add", scaled, place.parameter(1, "shift", shape))


def _centred(place: Place[Any], tensor: str, axes: list[int]) -> tuple[str, str]:
    """Return x - mean over the axes, and the variance."""
    centred = place.step("centred", "Sub", tensor, place.reduced("mean", "ReduceMean", tensor, axes))
    squares = place.step("squares", "Mul", centred, centred)
    return centred, place.reduced("variance", "ReduceMean", squares, axes)


def _centred_and_deviation(place: Place[Any], tensor: str, axes: list[int], eps: float) -> tuple[str, str]:
    """Return x - mean over the axes, and sqrt(variance + eps)."""
    centred, variance = _centred(place, tensor, axes)
    shifted = place.step("shifted", "Add", variance, place.value("eps", eps))
    return centred, place.step("deviation", "Sqrt", shifted)


def _broadcast(place: Place[Scale] | Place[Bias]) -> Dims:
    """The shape in which a second bottom broadcasts to the first."""
    own, shape = place.bottom_dims[0], place.layer.broadcast
    return tuple(None if known is None and size != 1 else size for known, size in zip(own, shape, strict=True))


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without leading axes of size 1: broadcasting adds them, and runtimes fold such operands more often."""
    start = next((index for index, size in enumerate(shape) if size != 1), len(shape))
    return shape[start:]


@onnx_form(Scale)
def scale(place: Place[Scale]) -> None:
    """Mul, and Add if there is a bias."""
    layer = place.layer
    shape = _trimmed(layer.broadcast)
    if len(place.bottoms) > 1:
        factor = place.reshaped(place.bottoms[1], _broadcast(place), "factor")
    else:
        factor = place.parameter(0, "scale", shape)
    if not layer.options.bias_term:
        place.top("Mul", place.bottom, factor)
        return
    product = place.step("product", "Mul", place.bottom, factor)
    place.top("Add", product, place.parameter(len(layer.blobs) - 1, "shift", shape))


@onnx_form(Bias)
def bias(place: Place[Bias]) -> None:
    """Add."""
    if len(place.bottoms) > 1:
        place.top("Add", place.bottom, place.reshaped(place.bottoms[1], _broadcast(place), "addend"))
    else:
        place.top("Add", place.bottom, place.parameter(0, "shift", _trimmed(place.layer.broadcast)))


@onnx_form(LRN)
def lrn(place: Place[LRN]) -> None:
    """LRN across channels; within a channel computed from an AveragePool of squares."""
    options = place.layer.options
    size, alpha, beta = int(options.local_size), float(options.alpha), float(options.beta)
    if options.norm_region != WITHIN_CHANNEL:
        place.top("LRN", place.bottom, size=size, alpha=alpha, beta=beta, bias=float(options.k))
        return
    squares = place.step("squares", "Mul", place.bottom, place.bottom)
    window = {"kernel_shape": [size, size], "strides": [1, 1], "pads": [size // 2] * 4, "count_include_pad": 1}
    mean = place.step("mean", "AveragePool", squares, **window)
    weighted = place.step("weighted", "Mul", mean, place.value("alpha", alpha))
    base = place.step("base", "Add", weighted, place.value("one", 1.0))
    place.top("Mul", place.bottom, place.step("factor", "Pow", base, place.value("exponent", -beta)))


@onnx_form(MVN)
def mvn(place: Place[MVN]) -> None:
    """(x - mean) / (deviation + eps) of each row."""
    options, dims = place.layer.options, place.bottom_dims[0]
    behind = dims[1:] if options.across_channels else dims[2:]
    rows = place.reshaped(place.bottom, (None, math.prod(fixed(behind))), "rows")
    if not options.normalize_variance:
        mean = place.reduced("mean", "ReduceMean", rows, [1])
        place.top_reshaped(place.step("centred", "Sub", rows, mean))
        return
    centred, variance = _centred(place, rows, [1])
    deviation = place.step("deviation", "Sqrt", variance)
    divisor = place.step("divisor", "Add", deviation, place.value("eps", float(options.eps)))
    place.top_reshaped(place.step("normalized", "Div", centred, divisor))


@onnx_form(GroupNorm)
def group_norm(place: Place[GroupNorm]) -> None:
    """Normalize each group as a row."""
    options = place.layer.parameter.group_norm_param
    shape = place.value("groups", [0, int(options.group_num), -1])  # 0 keeps the batch size
    rows = place.step("rows", "Reshape", place.bottom, shape)
    parts = _centred_and_deviation(place, rows, [2], float(options.eps))
    place.top_reshaped(place.step("normalized", "Div", *parts))


@onnx_form(LayerNormalization)
def layer_normalization(place: Place[LayerNormalization]) -> None:
    """Normalize the last axes, multiply by the scale, add the bias."""
    layer = place.layer
    axes = list(range(layer.axis, len(place.bottom_dims[0])))
    factors = place.bottoms[1:] or [place.parameter(index, f"factor{index}") for index in range(len(layer.blobs))]
    parts = _centred_and_deviation(place, place.bottom, axes, float(layer.options.epsilon))
    normalized = place.step("normalized", "Div", *parts)
    if len(factors) == 1:
        place.top("Mul", normalized, factors[0])
    else:
        place.top("Add", place.step("scaled", "Mul", normalized, factors[0]), factors[1])


@onnx_form(Softmax)
def softmax(place: Place[Softmax]) -> None:
    """Softmax."""
    place.top("Softmax", place.bottom, axis=place.layer.axis)


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
