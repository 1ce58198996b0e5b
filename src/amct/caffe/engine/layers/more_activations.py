"""Element-wise functions that Caffe 1.0 does not have, and CReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from amct.caffe.engine.layers.activations import Elementwise
from amct.caffe.engine.layers.tensor_operator import TensorOperator
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis

if TYPE_CHECKING:
    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.packed import Activation

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

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Return x * min(max(x + 3, 0), 6) / 6."""
        return functional.hardswish(bottom)


@register("HSigmoid")
class HSigmoid(Elementwise):
    """y = min(max(x + 3, 0), 6) / 6, as in MobileNet v3."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Return min(max(x + 3, 0), 6) / 6."""
        return functional.hardsigmoid(bottom)


@register("Mish")
class Mish(Elementwise):
    """y = x * tanh(log(1 + exp(x))), as in YOLO v4."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Return x * tanh(log(1 + exp(x)))."""
        return functional.mish(bottom)


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

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """sqrt(x)."""
        return bottom.sqrt()


@register("Ceil")
class Ceil(Elementwise):
    """The smallest integer >= x; not differentiable."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """ceil(x)."""
        return bottom.ceil()


@register("Sign")
class Sign(Elementwise):
    """-1, 0 or 1 by the sign of x; not differentiable."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """sign(x)."""
        return bottom.sign()


@register("Cos")
class Cos(Elementwise):
    """y = cos(x), x in radians."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """cos(x)."""
        return bottom.cos()


@register("Sin")
class Sin(Elementwise):
    """y = sin(x), x in radians."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """sin(x)."""
        return bottom.sin()


@register("Erf")
class Erf(Elementwise):
    """y = erf(x), the error function."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """erf(x)."""
        return bottom.erf()


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
