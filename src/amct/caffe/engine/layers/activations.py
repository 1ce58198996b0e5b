"""Element-wise functions of one blob, with and without parameters; PReLU and CReLU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from amct.caffe.engine.blob import current_device
from amct.caffe.engine.layer import Layer, canonical_axis, register
from amct.caffe.engine.layers.tensor_math import TensorOperator
from amct.numerics.fold import ChannelAffine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.layer import Activation
    from amct.caffe.engine.messages import ProtoMessage


class Elementwise(Layer):
    """top = function(bottom), applied to each value; the shape stays."""

    plain: ClassVar[Callable[..., torch.Tensor]]
    """The function, of a subclass without options; one with options overrides ``function``."""

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """function(bottom)."""
        return [self.function(bottoms[0])]

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """The function of the layer with its options."""
        return type(self).plain(bottom)


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


@register("Sigmoid")
class Sigmoid(Elementwise):
    """y = 1 / (1 + exp(-x))."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """1 / (1 + exp(-x))."""
        return torch.sigmoid_(bottom) if self.may_overwrite else torch.sigmoid(bottom)


@register("TanH")
class TanH(Elementwise):
    """y = tanh(x)."""

    plain = torch.tanh


@register("ELU")
class ELU(Elementwise):
    """y = x if x > 0 else alpha * (exp(x) - 1)."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Return x if x > 0 else alpha * (exp(x) - 1)."""
        alpha: float = self.parameter.elu_param.alpha
        return functional.elu(bottom, alpha)


@register("AbsVal")
class AbsVal(Elementwise):
    """y = |x|; the gradient at 0 is 0."""

    allows_in_place = False

    plain = torch.abs


@register("BNLL")
class BNLL(Elementwise):
    """y = log(1 + exp(x))."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """max(x, 0) + log(1 + exp(-|x|)), which does not overflow; the gradient is sigmoid(x) (Caffe clips x at 50)."""
        positive = torch.maximum(bottom, bottom.new_zeros(()))  # unlike clamp, its gradient at 0 is 0.5
        return positive + torch.log1p(torch.exp(-bottom.abs()))


@register("Swish")
class Swish(Elementwise):
    """y = x * sigmoid(beta * x)."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Return x * sigmoid(beta * x)."""
        beta: float = self.parameter.swish_param.beta
        return bottom * torch.sigmoid(beta * bottom)


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


@register("Threshold")
class Threshold(Elementwise):
    """y = 1 if x > threshold else 0; not differentiable."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """1 if x > threshold else 0."""
        threshold: float = self.parameter.threshold_param.threshold
        return (bottom > threshold).to(bottom.dtype)


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
        """The bottom's shape."""
        if not self.shared and bottoms[0][1] != self.blobs[0].shape[0]:
            raise self.error(
                f"Negative slope size is inconsistent with prototxt config: {self.blobs[0].shape} for {bottoms[0]}"
            )
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """max(x, 0) + a * min(x, 0)."""
        slopes = parameters[0]
        return [torch.prelu(bottoms[0], slopes.reshape(1) if self.shared else slopes)]


SIX = 6.0


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


@register("Hswish", "HardSwish", "HSwish")
class Hswish(Elementwise):
    """y = x * min(max(x + 3, 0), 6) / 6, as in MobileNet v3."""

    plain = functional.hardswish


@register("HSigmoid")
class HSigmoid(Elementwise):
    """y = min(max(x + 3, 0), 6) / 6, as in MobileNet v3."""

    plain = functional.hardsigmoid


@register("Mish")
class Mish(Elementwise):
    """y = x * tanh(log(1 + exp(x))), as in YOLO v4."""

    plain = functional.mish


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


@register("Sqrt")
class Sqrt(Elementwise):
    """y = sqrt(x)."""

    plain = torch.sqrt


@register("Ceil")
class Ceil(Elementwise):
    """The smallest integer >= x; not differentiable."""

    plain = torch.ceil


@register("Sign")
class Sign(Elementwise):
    """-1, 0 or 1 by the sign of x; not differentiable."""

    plain = torch.sign


@register("Cos")
class Cos(Elementwise):
    """y = cos(x), x in radians."""

    plain = torch.cos


@register("Sin")
class Sin(Elementwise):
    """y = sin(x), x in radians."""

    plain = torch.sin


@register("Erf")
class Erf(Elementwise):
    """y = erf(x), the error function."""

    plain = torch.erf


@register("CReLU")
class CReLU(TensorOperator):
    """ReLU of x and ReLU of -x, concatenated along ``concat_axis``; leaky with ``negative_slope``."""

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape with twice the size along the axis."""
        shape = list(bottoms[0])
        shape[canonical_axis(self.parameter.crelu_param.concat_axis, len(shape), self.name)] *= 2
        return [tuple(shape)]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """ReLU(concat(x, -x))."""
        options = self.parameter.crelu_param
        both = torch.cat([bottoms[0], -bottoms[0]], options.concat_axis)
        return [functional.leaky_relu(both, options.negative_slope) if options.negative_slope else torch.relu(both)]


NATURAL = -1.0


@register("Power")
class Power(Elementwise):
    """y = (shift + scale * x) ^ power; a constant if power or scale is 0."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
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


def _power(base: float, power: float) -> float:
    return float(torch.tensor(base).pow(power))


@register("Exp")
class Exp(Elementwise):
    """y = base ^ (shift + scale * x); base -1 means e."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
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


@register("Log")
class Log(Elementwise):
    """y = log_base(shift + scale * x); base -1 means e."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
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
