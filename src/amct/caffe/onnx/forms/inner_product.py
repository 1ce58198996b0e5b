"""InnerProduct and Embed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.layers.weighted import Embed, InnerProduct
from amct.caffe.onnx.forms.place import INT64
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.place import Place

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
