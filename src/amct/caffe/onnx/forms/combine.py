"""Split, Concat, Slice, Tile and Eltwise."""

from __future__ import annotations

from amct.caffe.engine.layers.combine import MAX, PROD, Concat, Eltwise, Slice, Split, Tile
from amct.caffe.onnx.forms.place import Place, fixed
from amct.caffe.onnx.forms.registry import onnx_form


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
