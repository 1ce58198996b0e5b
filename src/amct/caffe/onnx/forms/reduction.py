"""Reduction and ArgMax."""

from __future__ import annotations

import numpy as np

from amct.caffe.engine.layers.tensor_math import ASUM, MEAN, SUMSQ, ArgMax, Reduction
from amct.caffe.onnx.forms.place import FLOAT, Place, fixed, product
from amct.caffe.onnx.forms.registry import onnx_form

_OPERATORS = {ASUM: "ReduceL1", SUMSQ: "ReduceSumSquare", MEAN: "ReduceMean"}
_FIRST_PLACE = np.iinfo(np.int64).min


@onnx_form(Reduction)
def reduction(place: Place[Reduction]) -> None:
    """The reduction over all axes from ``axis`` on, times coeff."""
    options, axes = place.layer.parameter.reduction_param, range(place.layer.axis, len(place.bottom_dims[0]))
    operator = _OPERATORS.get(options.operation, "ReduceSum")
    result = place.reduced("reduced", operator, place.bottom, list(axes), keep=False)
    if options.coeff == 1:
        place.alias(result)
    else:
        place.top("Mul", result, place.value("coeff", float(options.coeff)))


@onnx_form(ArgMax)
def arg_max(place: Place[ArgMax]) -> None:
    """TopK of the reversed values, because on a tie TopK returns the first index and Caffe the last."""
    layer, options = place.layer, place.layer.options
    values, axis = place.bottom, layer.axis
    if axis is None:
        values, axis = place.step("rows", "Flatten", values, axis=1), 1
        length = product(place.bottom_dims[0][1:])
    else:
        length = place.bottom_dims[0][axis]
    (length,) = fixed([length])
    edges = [
        place.value(name, [edge]) for name, edge in (("from", -1), ("to", _FIRST_PLACE), ("axis", axis), ("step", -1))
    ]
    turned = place.step("turned", "Slice", values, *edges)
    found, order = (place.writer.tensor(f"{layer.name}.{part}") for part in ("values", "order"))
    place.node("TopK", "top_k", [turned, place.value("count", [int(options.top_k)])], [found, order], axis=axis)
    if layer.axis is not None and options.out_max_val:
        place.alias(found)
        return
    places = place.step("places", "Sub", place.value("last", np.int64(length - 1)), order)
    if layer.axis is not None:
        place.top("Cast", places, to=FLOAT)
        return
    result = place.step("numbers", "Cast", places, to=FLOAT)
    if options.out_max_val:
        result = place.step("both", "Concat", result, found, axis=1)
    place.top_reshaped(result)
