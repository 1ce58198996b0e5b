"""Element-wise functions, and CReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.caffe.engine.layers import activations
from amct.caffe.onnx.forms.registry import onnx_form

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
