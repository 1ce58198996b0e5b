"""Layers that only move values: Permute, Reorg, PassThrough, ShuffleChannel, Reverse, Pad, Sort, TopK."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from amct.caffe.engine.layer import canonical_axis
from amct.caffe.engine.layers.normalization import Permute
from amct.caffe.engine.layers.shaping import Pad, Reorg, Reverse, ShuffleChannel
from amct.caffe.engine.layers.tensor_math import Sort, TopK
from amct.caffe.onnx.forms.place import FLOAT, fixed
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.place import Place

WRAP, WRAP_OPSET = 3, 19
_MODES = {1: "reflect", 2: "edge", WRAP: "wrap"}
_FIRST_PLACE = int(np.iinfo(np.int64).min)


@onnx_form(Permute)
def permute(place: Place[Permute]) -> None:
    """Transpose."""
    place.top("Transpose", place.bottom, perm=list(place.layer.order))


@onnx_form(Reorg)
def reorg(place: Place[Reorg]) -> None:
    """Reshape to six axes, Transpose, Reshape; ONNX's SpaceToDepth supports square blocks only."""
    batch, *rest = place.bottom_dims[0]
    channels, rows, columns = fixed(rest)
    height, width = place.layer.block
    if place.layer.is_reverse:
        split = (batch, height, width, channels // (height * width), rows, columns)
        order = [0, 3, 4, 1, 5, 2]
    else:
        split = (batch, channels, rows // height, height, columns // width, width)
        order = [0, 3, 5, 1, 2, 4]
    place.top_reshaped(place.main("Transpose", place.reshaped(place.bottom, split, "split"), perm=order))


@onnx_form(ShuffleChannel)
def shuffle_channel(place: Place[ShuffleChannel]) -> None:
    """Reshape, Transpose, Reshape."""
    batch, *rest = place.bottom_dims[0]
    group = int(place.layer.parameter.shuffle_channel_param.group)
    (channels,) = fixed(rest[:1])
    rows = place.reshaped(place.bottom, (batch, group, channels // group, *rest[1:]), "rows")
    place.top_reshaped(place.main("Transpose", rows, perm=[0, 2, 1, *range(3, 2 + len(rest))]))


@onnx_form(Reverse)
def reverse(place: Place[Reverse]) -> None:
    """Slice with step -1."""
    axes = place.layer.axes
    edges = {"from": [-1] * len(axes), "to": [_FIRST_PLACE] * len(axes), "axes": axes, "steps": [-1] * len(axes)}
    place.top("Slice", place.bottom, *(place.value(name, values) for name, values in edges.items()))


@onnx_form(Pad)
def pad(place: Place[Pad]) -> None:
    """Pad; mode WRAP needs opset 19."""
    options, sides = place.layer.parameter.pad_param, place.layer.sides
    both = [sides.get(axis, (0, 0)) for axis in range(len(place.bottom_dims[0]))]
    inputs = [place.bottom, place.value("amounts", [*(before for before, _ in both), *(after for _, after in both)])]
    mode = _MODES.get(options.mode)
    if mode is None:
        place.top("Pad", *inputs, place.value("filling", float(options.value)))
        return
    if options.mode == WRAP and place.writer.opset < WRAP_OPSET:
        raise place.error(f"mode WRAP needs opset {WRAP_OPSET}, got {place.writer.opset}; request a newer one")
    place.top("Pad", *inputs, mode=mode)


@onnx_form(Sort)
def sort(place: Place[Sort]) -> None:
    """TopK of all values."""
    options, dims = place.layer.parameter.sort_param, place.bottom_dims[0]
    axis = canonical_axis(options.axis, len(dims), place.layer.name)
    (length,) = fixed(dims[axis : axis + 1])
    _top_k(place, length, axis, largest=bool(options.descending))


@onnx_form(TopK)
def top_k(place: Place[TopK]) -> None:
    """TopK."""
    options = place.layer.parameter.topk_param
    axis = canonical_axis(options.axis, len(place.bottom_dims[0]), place.layer.name)
    _top_k(place, int(options.k), axis, largest=bool(options.largest))


def _top_k(place: Place[Sort] | Place[TopK], count: int, axis: int, *, largest: bool) -> None:
    places = place.writer.tensor(f"{place.layer.name}.places")
    inputs = [place.bottom, place.value("count", [count])]
    place.node("TopK", "", inputs, [place.tops[0], places], axis=axis, largest=int(largest))
    if len(place.tops) > 1:
        place.top("Cast", places, index=1, to=FLOAT)
