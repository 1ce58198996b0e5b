"""Layers that move, join, split or select values."""

from __future__ import annotations

import numpy as np

from amct.caffe.engine.layer import canonical_axis
from amct.caffe.engine.layers.combine import MAX, PROD, BatchReindex, Concat, Eltwise, Filter, Slice, Split, Tile
from amct.caffe.engine.layers.input import DummyData, Parameter
from amct.caffe.engine.layers.normalization import Permute
from amct.caffe.engine.layers.shaping import Crop, Flatten, Pad, Reorg, Reshape, Reverse, ShuffleChannel
from amct.caffe.engine.layers.tensor_math import Sort, TopK
from amct.caffe.onnx.forms.place import BOOL, FLOAT, INT64, FollowsBatchError, Place, fixed, onnx_form, product


@onnx_form(Split)
def split(place: Place[Split]) -> None:
    """Aliases: an ONNX tensor may have several readers."""
    for index in range(len(place.tops)):
        place.alias(place.bottom, index)


@onnx_form(Concat)
def concat(place: Place[Concat]) -> None:
    """Concat."""
    if len(place.bottoms) == 1:
        place.alias(place.bottom)
    else:
        place.top("Concat", *place.bottoms, axis=place.layer.axis)


@onnx_form(Slice)
def slice_axis(place: Place[Slice]) -> None:
    """ONNX's Split."""
    layer = place.layer
    if len(place.tops) == 1:
        place.alias(place.bottom)
        return
    fixed([dims[layer.axis] for dims in place.top_dims])
    place.node("Split", "", [place.bottom, place.value("sizes", layer.sizes)], place.tops, axis=layer.axis)


@onnx_form(Tile)
def tile(place: Place[Tile]) -> None:
    """Tile."""
    times = [1] * len(place.bottom_dims[0])
    times[place.layer.axis] = place.layer.parameter.tile_param.tiles
    place.top("Tile", place.bottom, place.value("times", times))


@onnx_form(Eltwise)
def eltwise(place: Place[Eltwise]) -> None:
    """A chain of Add or Mul, or Max; a single bottom is multiplied by its coefficient."""
    layer = place.layer
    if len(place.bottoms) == 1:
        place.top("Mul", place.bottom, place.value("coefficient", float(layer.coefficients[0])))
        return
    if layer.operation == MAX:
        place.top("Max", *place.bottoms)
        return
    operator = "Mul" if layer.operation == PROD else "Add"
    operands = []
    for index, (bottom, coefficient) in enumerate(zip(place.bottoms, layer.coefficients, strict=True)):
        weighted = bottom
        if coefficient != 1.0:
            weighted = place.step(
                f"weighted{index}", "Mul", bottom, place.value(f"coefficient{index}", float(coefficient))
            )
        operands.append(weighted)
    total = operands[0]
    for index, operand in enumerate(operands[1:-1], 1):
        total = place.step(f"partial{index}", operator, total, operand)
    place.top(operator, total, operands[-1])


WRAP, WRAP_OPSET = 3, 19
_PAD_MODES = {1: "reflect", 2: "edge", WRAP: "wrap"}
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
    mode = _PAD_MODES.get(options.mode)
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


@onnx_form(BatchReindex)
def batch_reindex(place: Place[BatchReindex]) -> None:
    """Gather of samples."""
    place.top("Gather", place.bottom, place.step("index", "Cast", place.bottoms[1], to=INT64), axis=0)


@onnx_form(Filter)
def filter_samples(place: Place[Filter]) -> None:
    """Compress by the last bottom."""
    selector = place.reshaped(place.bottoms[-1], (None,), "selector")
    kept = place.step("kept", "Cast", selector, to=BOOL)
    for index, bottom in enumerate(place.bottoms[:-1]):
        place.top("Compress", bottom, kept, index=index, axis=0)


@onnx_form(Parameter)
def parameter(place: Place[Parameter]) -> None:
    """A constant."""
    place.alias(place.parameter(0, "value"))


@onnx_form(DummyData)
def dummy_data(place: Place[DummyData]) -> None:
    """A constant; random data is an error."""
    for index, (blob, filler) in enumerate(zip(place.layer.top_blobs, place.layer.fillers, strict=True)):
        if filler.type != "constant":
            raise place.error(
                f"its data is random ({filler.type}), which an ONNX file cannot express; make it an Input"
            )
        place.alias(place.value(f"value{index}", blob.tensor.detach().numpy()), index)


@onnx_form(Flatten)
def flatten(place: Place[Flatten]) -> None:
    """Flatten if the result is a matrix, else Reshape."""
    own, wanted = place.bottom_dims[0], place.top_dims[0]
    if len(wanted) == 2 and wanted[1] is not None and wanted[1] == product(own[1:]):
        place.top("Flatten", place.bottom, axis=1)
    else:
        place.top("Reshape", place.bottom, place.target(place.top_dims[0], "shape"))


@onnx_form(Reshape)
def reshape(place: Place[Reshape]) -> None:
    """Reshape to the known sizes."""
    place.top("Reshape", place.bottom, place.target(place.top_dims[0], "shape"))


@onnx_form(Crop)
def crop(place: Place[Crop]) -> None:
    """Slice; the second bottom only gives the size."""
    starts, ends, axes = [], [], []
    for axis, (own, wanted, start) in enumerate(
        zip(place.bottom_dims[0], place.top_dims[0], place.layer.starts, strict=True)
    ):
        if own is None or wanted is None:
            if start or own != wanted:
                raise FollowsBatchError(f'layer "{place.layer.name}" crops along it')
            continue
        if (start, wanted) != (0, own):
            starts.append(start)
            ends.append(start + wanted)
            axes.append(axis)
    if not axes:
        place.alias(place.bottom)
        return
    place.top(
        "Slice", place.bottom, place.value("starts", starts), place.value("ends", ends), place.value("axes", axes)
    )
