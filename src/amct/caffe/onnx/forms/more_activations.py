"""Element-wise functions that Caffe 1.0 does not have, and CReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.caffe.engine.layers import more_activations as more
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.place import Place

_SAME_OPERATOR = {
    more.Hswish: "HardSwish",
    more.Sqrt: "Sqrt",
    more.Ceil: "Ceil",
    more.Sign: "Sign",
    more.Cos: "Cos",
    more.Sin: "Sin",
    more.Erf: "Erf",
}


@onnx_form(*_SAME_OPERATOR)
def same_operator(place: Place[Any]) -> None:
    """The ONNX operator of the same function."""
    place.top(_SAME_OPERATOR[type(place.layer)], place.bottom)


@onnx_form(more.ReLU6)
def relu6(place: Place[more.ReLU6]) -> None:
    """Clip, plus negative_slope * min(x, 0)."""
    limits = place.value("minimum", 0.0), place.value("maximum", more.SIX)
    if not place.layer.slope:
        place.top("Clip", place.bottom, *limits)
        return
    limited = place.step("limited", "Clip", place.bottom, *limits)
    negative = place.step("negative", "Min", place.bottom, limits[0])
    place.top("Add", limited, place.step("sloped", "Mul", negative, place.value("slope", float(place.layer.slope))))


@onnx_form(more.RReLU)
def rrelu(place: Place[more.RReLU]) -> None:
    """LeakyRelu with the mean of lower and upper."""
    place.top("LeakyRelu", place.bottom, alpha=(place.layer.lower + place.layer.upper) / 2)


@onnx_form(more.CReLU)
def crelu(place: Place[more.CReLU]) -> None:
    """Relu of Concat(x, -x)."""
    options = place.layer.parameter.crelu_param
    opposite = place.step("opposite", "Neg", place.bottom)
    both = place.step("both", "Concat", place.bottom, opposite, axis=int(options.concat_axis))
    if options.negative_slope:
        place.top("LeakyRelu", both, alpha=float(options.negative_slope))
    else:
        place.top("Relu", both)
