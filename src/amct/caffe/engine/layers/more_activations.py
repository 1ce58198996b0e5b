"""Element-wise functions beyond Caffe 1.0, and CReLU."""

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
    """min(max(x, 0), 6) + negative_slope * min(x, 0), as in MobileNet."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the slope."""
        del bottoms
        self.slope: float = self.parameter.relu6_param.negative_slope

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        limited = bottom.clamp(0, SIX)
        return limited + self.slope * bottom.clamp(max=0) if self.slope else limited

    def activation(self) -> Activation | None:
        """Two ends, unless there is a slope."""
        return None if self.slope else ("hardtanh", (0.0, SIX))


@register("Hswish")
class Hswish(Elementwise):
    """x * min(max(x + 3, 0), 6) / 6, as in MobileNet v3."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return functional.hardswish(bottom)


@register("RReLU")
class RReLU(Elementwise):
    """max(x, 0) + a * min(x, 0); a is drawn anew for every value while training, else the mean of its range."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the range of slopes."""
        del bottoms
        options = self.parameter.rrelu_param
        self.lower, self.upper = options.lower, options.upper
        if not 0 <= self.lower <= self.upper:
            raise self.error(f"needs 0 <= lower <= upper, got {self.lower} and {self.upper}")

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        if self.is_training:
            return functional.rrelu(bottom, self.lower, self.upper, training=True)
        return functional.leaky_relu(bottom, (self.lower + self.upper) / 2)


@register("Sqrt")
class Sqrt(Elementwise):
    """The square root."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.sqrt()


@register("Ceil")
class Ceil(Elementwise):
    """The next whole number from x on; no gradient."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.ceil()


@register("Sign")
class Sign(Elementwise):
    """-1, 0 or 1; no gradient."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.sign()


@register("Cos")
class Cos(Elementwise):
    """The cosine, x in radians."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.cos()


@register("Sin")
class Sin(Elementwise):
    """The sine, x in radians."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.sin()


@register("Erf")
class Erf(Elementwise):
    """The error function."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.erf()


@register("CReLU")
class CReLU(TensorOperator):
    """ReLU of x and of -x, one behind the other along ``concat_axis``."""

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Twice as long along the axis."""
        shape = list(bottoms[0])
        shape[canonical_axis(self.parameter.crelu_param.concat_axis, len(shape), self.name)] *= 2
        return [tuple(shape)]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it says."""
        options = self.parameter.crelu_param
        both = torch.cat([bottoms[0], -bottoms[0]], options.concat_axis)
        return [functional.leaky_relu(both, options.negative_slope) if options.negative_slope else torch.relu(both)]
