"""Element-wise functions of one blob, with and without parameters; PReLU and CReLU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from amct.caffe.engine.blob import current_device
from amct.caffe.engine.layer import Activation, Layer, Place, ProtoMessage, Shape, Tensors, register
from amct.numerics.fold import ChannelAffine

if TYPE_CHECKING:
    from collections.abc import Callable


class Elementwise(Layer):
    """top = function(bottom), applied to each value; the shape stays."""

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """function(bottom)."""
        return [self.function(bottoms[0])]

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """The function of the layer with its options."""
        raise NotImplementedError


def _softplus(bottom: torch.Tensor) -> torch.Tensor:
    """max(x, 0) + log(1 + exp(-|x|)), which does not overflow; the gradient is sigmoid(x) (Caffe clips x at 50)."""
    positive = torch.maximum(bottom, bottom.new_zeros(()))  # unlike clamp, its gradient at 0 is 0.5
    return positive + torch.log1p(torch.exp(-bottom.abs()))


SIX = 6.0
#: Functions without options, by layer type: torch's function, the ONNX operator and its attributes.
_PLAIN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, dict[str, Any]]] = {
    "TanH": (torch.tanh, "Tanh", {}),
    "Hswish": (functional.hardswish, "HardSwish", {}),
    "HardSwish": (functional.hardswish, "HardSwish", {}),
    "HSwish": (functional.hardswish, "HardSwish", {}),
    "HSigmoid": (functional.hardsigmoid, "HardSigmoid", {"alpha": 1 / SIX, "beta": 0.5}),  # with MobileNet's slope
    "BNLL": (_softplus, "Softplus", {}),
    "Sqrt": (torch.sqrt, "Sqrt", {}),
    "Ceil": (torch.ceil, "Ceil", {}),
    "Sign": (torch.sign, "Sign", {}),
    "Cos": (torch.cos, "Cos", {}),
    "Sin": (torch.sin, "Sin", {}),
    "Erf": (torch.erf, "Erf", {}),
}


@register(*_PLAIN)
class Plain(Elementwise):
    """A function without options, that of the layer's type."""

    def setup(self, bottoms: list[Shape]) -> None:
        self._function, self._operator, self._attributes = _PLAIN[self.type]

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        return self._function(bottom)

    def to_onnx(self, place: Place) -> None:
        """The ONNX operator of the same function."""
        place.top(self._operator, place.bottom, **self._attributes)


def _write_relu(place: Place, tensor: str, slope: float) -> None:
    """Relu, or LeakyRelu if the slope is not 0."""
    if slope:
        place.top("LeakyRelu", tensor, alpha=float(slope))
    else:
        place.top("Relu", tensor)


@register("ReLU")
class ReLU(Elementwise):
    """y = max(x, 0) + negative_slope * min(x, 0)."""

    @classmethod
    def only_moves_values(cls, parameter: ProtoMessage) -> bool:
        """Without a slope."""
        return not parameter.relu_param.negative_slope

    def setup(self, bottoms: list[Shape]) -> None:
        """Read negative_slope."""
        self.slope: float = self.parameter.relu_param.negative_slope

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """max(x, 0) + negative_slope * min(x, 0); the gradient at 0 is negative_slope."""
        if self.slope != 0:
            return functional.leaky_relu(bottom, self.slope)
        return torch.relu_(bottom) if self.may_overwrite else torch.relu(bottom)

    def activation(self) -> Activation:
        """ReLU, or leaky ReLU if negative_slope is not 0."""
        return ("leaky_relu", (self.slope,)) if self.slope != 0 else ("relu", ())

    def to_onnx(self, place: Place) -> None:
        _write_relu(place, place.bottom, self.slope)


@register("Sigmoid")
class Sigmoid(Elementwise):
    """y = 1 / (1 + exp(-x))."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """1 / (1 + exp(-x))."""
        return torch.sigmoid_(bottom) if self.may_overwrite else torch.sigmoid(bottom)

    def to_onnx(self, place: Place) -> None:
        place.top("Sigmoid", place.bottom)


@register("ELU")
class ELU(Elementwise):
    """y = x if x > 0 else alpha * (exp(x) - 1)."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Return x if x > 0 else alpha * (exp(x) - 1)."""
        alpha: float = self.parameter.elu_param.alpha
        return functional.elu(bottom, alpha)

    def to_onnx(self, place: Place) -> None:
        place.top("Elu", place.bottom, alpha=float(self.parameter.elu_param.alpha))


@register("AbsVal")
class AbsVal(Elementwise):
    """y = |x|; the gradient at 0 is 0."""

    allows_in_place = False

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Return |x|."""
        return bottom.abs()

    def to_onnx(self, place: Place) -> None:
        place.top("Abs", place.bottom)


@register("Swish")
class Swish(Elementwise):
    """y = x * sigmoid(beta * x)."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Return x * sigmoid(beta * x)."""
        beta: float = self.parameter.swish_param.beta
        return bottom * torch.sigmoid(beta * bottom)

    def to_onnx(self, place: Place) -> None:
        """Mul(x, Sigmoid(beta * x))."""
        beta, inner = float(self.parameter.swish_param.beta), place.bottom
        if beta != 1.0:
            inner = place.step("inner", "Mul", inner, place.value("beta", beta))
        place.top("Mul", place.bottom, place.step("gate", "Sigmoid", inner))


@register("Clip")
class Clip(Elementwise):
    """y = min(max(x, min), max); the gradient at both bounds is 1."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read min and max."""
        options = self.parameter.clip_param
        if not self.parameter.HasField("clip_param"):
            raise self.error("needs clip_param with min and max")
        self.low, self.high = options.min, options.max

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """min(max(x, min), max)."""
        if self.may_overwrite:
            return bottom.clamp_(self.low, self.high)
        clipped = bottom.clamp(self.low, self.high)
        if not bottom.requires_grad:
            return clipped
        # Caffe's gradient is 1 at the bounds too; torch's depends on its release, 1 before 2.15.
        return torch.where((bottom >= self.low) & (bottom <= self.high), bottom, clipped.detach())

    def activation(self) -> Activation:
        """A hardtanh with the bounds min and max."""
        return "hardtanh", (self.low, self.high)

    def to_onnx(self, place: Place) -> None:
        limits = place.value("minimum", float(self.low)), place.value("maximum", float(self.high))
        place.top("Clip", place.bottom, *limits)


@register("Threshold")
class Threshold(Elementwise):
    """y = 1 if x > threshold else 0; not differentiable."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """1 if x > threshold else 0."""
        threshold: float = self.parameter.threshold_param.threshold
        return (bottom > threshold).to(bottom.dtype)

    def to_onnx(self, place: Place) -> None:
        """Greater, cast to float."""
        limit = float(self.parameter.threshold_param.threshold)
        place.top("Cast", place.step("above", "Greater", place.bottom, place.value("threshold", limit)), to=1)


@register("Dropout")
class Dropout(Elementwise):
    """Training: each value becomes 0 with probability p = dropout_ratio, else x / (1 - p). Testing: the identity.

    With ``scale_train: false`` (Faster R-CNN) training does not divide, and testing multiplies by 1 - p. With
    ``sample_weights_test`` (Bayesian SegNet) testing drops values as training does.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the ratio and scale_train."""
        self.ratio: float = self.parameter.dropout_param.dropout_ratio
        self.scale_train: bool = self.parameter.dropout_param.scale_train
        self.drops: bool = self.is_training or getattr(self.parameter.dropout_param, "sample_weights_test", False)
        self.changes_values = self.drops or not self.scale_train
        if not 0.0 < self.ratio < 1.0:
            raise self.error(f"dropout_ratio must lie between 0 and 1, got {self.ratio}")

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Drop and scale in training; in testing the identity or a multiplication by 1 - p."""
        if self.drops:
            kept = functional.dropout(bottom, self.ratio, training=True)
            return kept if self.scale_train else kept * (1 - self.ratio)
        if not self.scale_train:
            return bottom * (1 - self.ratio)
        return bottom if self.may_overwrite else bottom.clone()

    def channel_affine(self) -> ChannelAffine | None:
        """The identity at inference, if ``scale_train`` is set."""
        is_identity = self.scale_train and not self.drops
        return ChannelAffine.scale(torch.ones(1, device=current_device())) if is_identity else None

    def to_onnx(self, place: Place) -> None:
        """The identity, or a multiplication by 1 - p where training does not divide (``scale_train: false``)."""
        if self.drops:
            raise place.error("it drops values at random; set sample_weights_test: false")
        if self.scale_train:
            place.alias(place.bottom)
        else:
            place.top("Mul", place.bottom, place.value("kept", 1.0 - float(self.ratio)))


@register("PReLU")
class PReLU(Layer):
    """y = max(x, 0) + a * min(x, 0) with learned slopes a: (C,), or a scalar with ``channel_shared``."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the slopes."""
        options = self.parameter.prelu_param
        if len(bottoms[0]) < 2:
            raise self.error(f"Number of axes of bottom blob must be >=2, got shape {bottoms[0]}")
        self.shared = options.channel_shared
        shape = () if self.shared else (bottoms[0][1],)
        self.add_parameter(shape, options.filler if options.HasField("filler") else None, default=0.25)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        if not self.shared and bottoms[0][1] != self.blobs[0].shape[0]:
            raise self.error(
                f"Negative slope size is inconsistent with prototxt config: {self.blobs[0].shape} for {bottoms[0]}"
            )
        return [bottoms[0]]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """max(x, 0) + a * min(x, 0)."""
        slopes = parameters[0]
        return [torch.prelu(bottoms[0], slopes.reshape(1) if self.shared else slopes)]

    def to_onnx(self, place: Place) -> None:
        """PRelu; slopes per channel are reshaped to (C, 1, ...)."""
        behind = 0 if self.shared else len(place.bottom_dims[0]) - 2
        place.top("PRelu", place.bottom, place.parameter(0, "slope", (self.blobs[0].count, *(1,) * behind)))


@register("ReLU6")
class ReLU6(Elementwise):
    """y = min(max(x, 0), 6) + negative_slope * min(x, 0), as in MobileNet."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read negative_slope."""
        self.slope: float = self.parameter.relu6_param.negative_slope

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """min(max(x, 0), 6) + negative_slope * min(x, 0)."""
        limited = bottom.clamp(0, SIX)
        return limited + self.slope * bottom.clamp(max=0) if self.slope else limited

    def activation(self) -> Activation | None:
        """A hardtanh with the bounds 0 and 6, if negative_slope is 0."""
        return None if self.slope else ("hardtanh", (0.0, SIX))

    def to_onnx(self, place: Place) -> None:
        """Clip, plus negative_slope * min(x, 0)."""
        limits = place.value("minimum", 0.0), place.value("maximum", SIX)
        if not self.slope:
            place.top("Clip", place.bottom, *limits)
            return
        limited = place.step("limited", "Clip", place.bottom, *limits)
        negative = place.step("negative", "Min", place.bottom, limits[0])
        place.top("Add", limited, place.step("sloped", "Mul", negative, place.value("slope", float(self.slope))))


@register("Mish")
class Mish(Elementwise):
    """y = x * tanh(log(1 + exp(x))), as in YOLO v4."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        return functional.mish(bottom)

    def to_onnx(self, place: Place) -> None:
        """Mul(x, Tanh(Softplus(x))): ONNX has Mish from opset 18 on only."""
        place.top("Mul", place.bottom, place.step("gate", "Tanh", place.step("soft", "Softplus", place.bottom)))


@register("RReLU")
class RReLU(Elementwise):
    """y = max(x, 0) + a * min(x, 0); a is uniform in lower..upper per value in training, their mean in testing."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read lower and upper."""
        options = self.parameter.rrelu_param
        self.lower, self.upper = options.lower, options.upper
        if not 0 <= self.lower <= self.upper:
            raise self.error(f"needs 0 <= lower <= upper, got {self.lower} and {self.upper}")

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """max(x, 0) + a * min(x, 0)."""
        if self.is_training:
            return functional.rrelu(bottom, self.lower, self.upper, training=True)
        return functional.leaky_relu(bottom, (self.lower + self.upper) / 2)

    def to_onnx(self, place: Place) -> None:
        """LeakyRelu with the mean of lower and upper."""
        place.top("LeakyRelu", place.bottom, alpha=(self.lower + self.upper) / 2)


@register("CReLU")
class CReLU(Layer):
    """ReLU of x and ReLU of -x, concatenated along ``concat_axis``; leaky with ``negative_slope``."""

    allows_in_place = False

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape with twice the size along the axis."""
        shape = list(bottoms[0])
        shape[self.canonical_axis(self.parameter.crelu_param.concat_axis, len(shape))] *= 2
        return [tuple(shape)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """ReLU(concat(x, -x))."""
        options = self.parameter.crelu_param
        both = torch.cat([bottoms[0], -bottoms[0]], options.concat_axis)
        return [functional.leaky_relu(both, options.negative_slope) if options.negative_slope else torch.relu(both)]

    def to_onnx(self, place: Place) -> None:
        """Relu of Concat(x, -x)."""
        options = self.parameter.crelu_param
        opposite = place.step("opposite", "Neg", place.bottom)
        both = place.step("both", "Concat", place.bottom, opposite, axis=int(options.concat_axis))
        _write_relu(place, both, options.negative_slope)


NATURAL = -1.0


@register("Power")
class Power(Elementwise):
    """y = (shift + scale * x) ^ power; a constant if power or scale is 0."""

    def setup(self, bottoms: list[Shape]) -> None:
        options = self.parameter.power_param
        self.power, self.scale, self.shift = options.power, options.scale, options.shift

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Powers 1 and 2 are computed by multiplication, which is exact for a zero or negative base."""
        if self.power == 0 or self.scale == 0:
            value = 1.0 if self.power == 0 else _power(self.shift, self.power)
            return bottom.detach() * 0 + value if bottom.isnan().any() else torch.full_like(bottom, value)
        base = bottom if (self.scale, self.shift) == (1.0, 0.0) else bottom * self.scale + self.shift
        if self.power == 1:
            return base.clone() if base is bottom else base
        return base * base if self.power == 2 else base.pow(self.power)

    def channel_affine(self) -> ChannelAffine | None:
        """(scale, shift) if power is 1."""
        if self.power != 1:
            return None
        scale, shift = (torch.tensor([value], dtype=torch.float64) for value in (self.scale, self.shift))
        return ChannelAffine(scale, shift)

    def to_onnx(self, place: Place) -> None:
        """Mul, Add and Pow, without those that are the identity."""
        if self.power == 0 or self.scale == 0:
            value = 1.0 if self.power == 0 else float(self.shift) ** float(self.power)
            place.arithmetic(place.bottom, [("zero", "Mul", 0.0), ("constant", "Add", value)])
            return
        steps = (("scale", "Mul", self.scale, 1), ("shift", "Add", self.shift, 0), ("power", "Pow", self.power, 1))
        needed = [(part, operator, float(value)) for part, operator, value, neutral in steps if value != neutral]
        place.arithmetic(place.bottom, needed)


def _power(base: float, power: float) -> float:
    return float(torch.tensor(base).pow(power))


@register("Exp")
class Exp(Elementwise):
    """y = base ^ (shift + scale * x); base -1 means e."""

    def setup(self, bottoms: list[Shape]) -> None:
        options = self.parameter.exp_param
        if options.base != NATURAL and options.base <= 0:
            raise self.error(f"base must be strictly positive (or -1 for e), got {options.base}")
        log_base = 1.0 if options.base == NATURAL else math.log(options.base)
        self.inner = log_base * options.scale
        self.outer = math.exp(log_base * options.shift)

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """exp(log(base) * scale * x) * base ^ shift."""
        result = torch.exp(bottom if self.inner == 1 else bottom * self.inner)
        return result if self.outer == 1 else result * self.outer

    def to_onnx(self, place: Place) -> None:
        """Mul, Exp, Mul."""
        tensor = place.bottom
        if self.inner != 1:
            tensor = place.step("inner", "Mul", tensor, place.value("inner_factor", float(self.inner)))
        if self.outer == 1:
            place.top("Exp", tensor)
        else:
            place.top("Mul", place.step("exp", "Exp", tensor), place.value("outer_factor", float(self.outer)))


@register("Log")
class Log(Elementwise):
    """y = log_base(shift + scale * x); base -1 means e."""

    def setup(self, bottoms: list[Shape]) -> None:
        options = self.options = self.parameter.log_param
        if options.base != NATURAL and (options.base <= 0 or options.base == 1):
            raise self.error(f"base must be strictly positive and not 1 (or -1 for e), got {options.base}")
        self.factor = 1.0 if options.base == NATURAL else 1.0 / math.log(options.base)

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """log(shift + scale * x) / log(base)."""
        options = self.options
        inner = bottom if (options.scale, options.shift) == (1.0, 0.0) else bottom * options.scale + options.shift
        result = torch.log(inner)
        return result if self.factor == 1 else result * self.factor

    def to_onnx(self, place: Place) -> None:
        """Mul, Add, Log, Mul."""
        tensor = place.bottom
        if self.options.scale != 1:
            tensor = place.step("scale", "Mul", tensor, place.value("scale_factor", float(self.options.scale)))
        if self.options.shift != 0:
            tensor = place.step("shift", "Add", tensor, place.value("shift_amount", float(self.options.shift)))
        if self.factor == 1:
            place.top("Log", tensor)
        else:
            place.top("Mul", place.step("log", "Log", tensor), place.value("base_factor", float(self.factor)))
