"""Matrix products, comparisons and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.caffe.engine.layers import tensor_math
from amct.caffe.onnx.forms.place import FLOAT
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.place import Place
    from amct.caffe.onnx.forms.writer import Attribute

_REDUCTIONS = {
    tensor_math.ReduceSum: "ReduceSum",
    tensor_math.ReduceMean: "ReduceMean",
    tensor_math.ReduceMax: "ReduceMax",
    tensor_math.ReduceMin: "ReduceMin",
    tensor_math.ReduceProd: "ReduceProd",
}


@onnx_form(tensor_math.MatMul)
def matmul(place: Place[tensor_math.MatMul]) -> None:
    """MatMul, after a Transpose of transposed operands."""
    options = place.layer.parameter.matmul_param
    operands = []
    for name, bottom, dims, is_transposed in (
        ("left", place.bottoms[0], place.bottom_dims[0], options.transpose_a),
        ("right", place.bottoms[1], place.bottom_dims[1], options.transpose_b),
    ):
        *lead, rows, columns = range(len(dims))
        operands.append(place.step(name, "Transpose", bottom, perm=[*lead, columns, rows]) if is_transposed else bottom)
    place.top("MatMul", *operands)


@onnx_form(tensor_math.Mvm)
def mvm(place: Place[tensor_math.Mvm]) -> None:
    """MatMul with a matrix of one column."""
    last = place.value("last", [-1])
    column = place.step("column", "Unsqueeze", place.bottoms[1], last)
    place.top("Squeeze", place.step("product", "MatMul", place.bottom, column), last)


@onnx_form(tensor_math.Gemm)
def gemm(place: Place[tensor_math.Gemm]) -> None:
    """Gemm."""
    options = place.layer.parameter.gemm_param
    attributes: dict[str, Attribute] = {
        "alpha": float(options.alpha),
        "transA": int(options.trans_a),
        "transB": int(options.trans_b),
    }
    if len(place.bottoms) > tensor_math.MATRIX_AXES:
        attributes["beta"] = float(options.beta)
    place.top("Gemm", *place.bottoms, **attributes)


@onnx_form(tensor_math.Equal, tensor_math.Greater)
def comparison(place: Place[Any]) -> None:
    """Equal or Greater, cast to float."""
    operator = "Equal" if isinstance(place.layer, tensor_math.Equal) else "Greater"
    place.top("Cast", place.step("holds", operator, *place.bottoms), to=FLOAT)


@onnx_form(tensor_math.Axpy)
def axpy(place: Place[tensor_math.Axpy]) -> None:
    """Mul and Add."""
    factor, x, y = place.bottoms
    dims = place.bottom_dims[1]
    factor = place.reshaped(factor, (*dims[:2], *(1,) * (len(dims) - 2)), "factor")
    place.top("Add", place.step("product", "Mul", factor, x), y)


@onnx_form(*_REDUCTIONS)
def reduce(place: Place[Any]) -> None:
    """The ONNX reduction of the same name."""
    layer = place.layer
    if layer.axes:
        place.alias(place.reduced("reduced", _REDUCTIONS[type(layer)], place.bottom, layer.axes, keep=layer.keep))
    else:
        place.alias(place.bottom)


@onnx_form(tensor_math.ArgMin)
def arg_min(place: Place[tensor_math.ArgMin]) -> None:
    """ArgMin, cast to float."""
    options = place.layer.parameter.argmin_param
    attributes = {
        "axis": int(options.axis),
        "keepdims": int(options.keepdims),
        "select_last_index": int(options.select_last_index),
    }
    place.top("Cast", place.step("place", "ArgMin", place.bottom, **attributes), to=FLOAT)
