"""Element-wise functions, matrix products, comparisons and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from amct.caffe.engine.layers import activations, tensor_math
from amct.caffe.engine.layers.tensor_math import ASUM, MEAN, SUMSQ, ArgMax, Reduction
from amct.caffe.onnx.forms.place import FLOAT, fixed, onnx_form, product

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.place import Place


_SAME_OPERATOR = {
    activations.Sigmoid: "Sigmoid",
    activations.TanH: "Tanh",
    activations.AbsVal: "Abs",
    activations.BNLL: "Softplus",
    activations.Hswish: "HardSwish",
    activations.Sqrt: "Sqrt",
    activations.Ceil: "Ceil",
    activations.Sign: "Sign",
    activations.Cos: "Cos",
    activations.Sin: "Sin",
    activations.Erf: "Erf",
}


@onnx_form(*_SAME_OPERATOR)
def same_operator(place: Place[Any]) -> None:
    """The ONNX operator of the same function."""
    place.top(_SAME_OPERATOR[type(place.layer)], place.bottom)


@onnx_form(activations.ReLU)
def relu(place: Place[activations.ReLU]) -> None:
    """Relu, or LeakyRelu if negative_slope is not 0."""
    if place.layer.slope:
        place.top("LeakyRelu", place.bottom, alpha=place.layer.slope)
    else:
        place.top("Relu", place.bottom)


@onnx_form(activations.ELU)
def elu(place: Place[activations.ELU]) -> None:
    """Elu."""
    place.top("Elu", place.bottom, alpha=float(place.layer.parameter.elu_param.alpha))


@onnx_form(activations.Swish)
def swish(place: Place[activations.Swish]) -> None:
    """Mul(x, Sigmoid(beta * x))."""
    beta = float(place.layer.parameter.swish_param.beta)
    inner = place.bottom
    if beta != 1.0:
        inner = place.step("inner", "Mul", inner, place.value("beta", beta))
    place.top("Mul", place.bottom, place.step("gate", "Sigmoid", inner))


@onnx_form(activations.Clip)
def clip(place: Place[activations.Clip]) -> None:
    """Clip."""
    limits = place.value("minimum", float(place.layer.low)), place.value("maximum", float(place.layer.high))
    place.top("Clip", place.bottom, *limits)


@onnx_form(activations.Threshold)
def threshold(place: Place[activations.Threshold]) -> None:
    """Greater, cast to float."""
    limit = float(place.layer.parameter.threshold_param.threshold)
    place.top("Cast", place.step("above", "Greater", place.bottom, place.value("threshold", limit)), to=1)


@onnx_form(activations.Dropout)
def dropout(place: Place[activations.Dropout]) -> None:
    """The identity, or a multiplication by 1 - p where training does not divide (``scale_train: false``)."""
    if place.layer.drops:
        raise place.error("it drops values at random; set sample_weights_test: false")
    if place.layer.scale_train:
        place.alias(place.bottom)
    else:
        place.top("Mul", place.bottom, place.value("kept", 1.0 - float(place.layer.ratio)))


@onnx_form(activations.PReLU)
def prelu(place: Place[activations.PReLU]) -> None:
    """PRelu; slopes per channel are reshaped to (C, 1, ...)."""
    behind = len(place.bottom_dims[0]) - 2
    shape = (1,) if place.layer.shared else (-1, *(1,) * behind)
    size = place.layer.blobs[0].count
    place.top("PRelu", place.bottom, place.parameter(0, "slope", tuple(size if one == -1 else one for one in shape)))


@onnx_form(activations.Power)
def power(place: Place[activations.Power]) -> None:
    """Mul, Add and Pow, without those that are the identity."""
    layer = place.layer
    if layer.power == 0 or layer.scale == 0:
        value = 1.0 if layer.power == 0 else float(layer.shift) ** float(layer.power)
        place.arithmetic(place.bottom, [("zero", "Mul", 0.0), ("constant", "Add", value)])
        return
    steps = []
    if layer.scale != 1:
        steps.append(("scale", "Mul", float(layer.scale)))
    if layer.shift != 0:
        steps.append(("shift", "Add", float(layer.shift)))
    if layer.power != 1:
        steps.append(("power", "Pow", float(layer.power)))
    place.arithmetic(place.bottom, steps)


@onnx_form(activations.Exp)
def exponential(place: Place[activations.Exp]) -> None:
    """Mul, Exp, Mul."""
    layer, tensor = place.layer, place.bottom
    if layer.inner != 1:
        tensor = place.step("inner", "Mul", tensor, place.value("inner_factor", float(layer.inner)))
    if layer.outer == 1:
        place.top("Exp", tensor)
    else:
        place.top("Mul", place.step("exp", "Exp", tensor), place.value("outer_factor", float(layer.outer)))


@onnx_form(activations.Log)
def logarithm(place: Place[activations.Log]) -> None:
    """Mul, Add, Log, Mul."""
    layer, tensor = place.layer, place.bottom
    if layer.options.scale != 1:
        tensor = place.step("scale", "Mul", tensor, place.value("scale_factor", float(layer.options.scale)))
    if layer.options.shift != 0:
        tensor = place.step("shift", "Add", tensor, place.value("shift_amount", float(layer.options.shift)))
    if layer.factor == 1:
        place.top("Log", tensor)
    else:
        place.top("Mul", place.step("log", "Log", tensor), place.value("base_factor", float(layer.factor)))


@onnx_form(activations.HSigmoid)
def hard_sigmoid(place: Place[activations.HSigmoid]) -> None:
    """HardSigmoid with MobileNet's slope."""
    place.top("HardSigmoid", place.bottom, alpha=1 / activations.SIX, beta=0.5)


@onnx_form(activations.Mish)
def mish(place: Place[activations.Mish]) -> None:
    """Mul(x, Tanh(Softplus(x))): ONNX has Mish from opset 18 on only."""
    place.top("Mul", place.bottom, place.step("gate", "Tanh", place.step("soft", "Softplus", place.bottom)))


@onnx_form(activations.ReLU6)
def relu6(place: Place[activations.ReLU6]) -> None:
    """Clip, plus negative_slope * min(x, 0)."""
    limits = place.value("minimum", 0.0), place.value("maximum", activations.SIX)
    if not place.layer.slope:
        place.top("Clip", place.bottom, *limits)
        return
    limited = place.step("limited", "Clip", place.bottom, *limits)
    negative = place.step("negative", "Min", place.bottom, limits[0])
    place.top("Add", limited, place.step("sloped", "Mul", negative, place.value("slope", float(place.layer.slope))))


@onnx_form(activations.RReLU)
def rrelu(place: Place[activations.RReLU]) -> None:
    """LeakyRelu with the mean of lower and upper."""
    place.top("LeakyRelu", place.bottom, alpha=(place.layer.lower + place.layer.upper) / 2)


@onnx_form(activations.CReLU)
def crelu(place: Place[activations.CReLU]) -> None:
    """Relu of Concat(x, -x)."""
    options = place.layer.parameter.crelu_param
    opposite = place.step("opposite", "Neg", place.bottom)
    both = place.step("both", "Concat", place.bottom, opposite, axis=int(options.concat_axis))
    if options.negative_slope:
        place.top("LeakyRelu", both, alpha=float(options.negative_slope))
    else:
        place.top("Relu", both)


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
    attributes: dict[str, Any] = {
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


_REDUCTION_OPERATORS = {ASUM: "ReduceL1", SUMSQ: "ReduceSumSquare", MEAN: "ReduceMean"}


@onnx_form(Reduction)
def reduction(place: Place[Reduction]) -> None:
    """The reduction over all axes from ``axis`` on, times coeff."""
    options, axes = place.layer.parameter.reduction_param, range(place.layer.axis, len(place.bottom_dims[0]))
    operator = _REDUCTION_OPERATORS.get(options.operation, "ReduceSum")
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
        place.value(name, [edge])
        for name, edge in (("from", -1), ("to", np.iinfo(np.int64).min), ("axis", axis), ("step", -1))
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
