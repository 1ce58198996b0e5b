"""Element-wise functions without parameters, and PReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.engine.packed import Activation


class Elementwise(Layer):
    """A layer whose top has the bottom's shape and is computed value by value: subclasses define ``function``."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Apply the function."""
        del parameters
        return [self.function(bottoms[0])]

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """The function of one value."""
        raise NotImplementedError


@register("ReLU")
class ReLU(Elementwise):
    """max(x, 0) + negative_slope * min(x, 0)."""

    @classmethod
    def only_moves_values(cls, parameter: ProtoMessage) -> bool:
        """Without a slope."""
        return not parameter.relu_param.negative_slope

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the slope."""
        del bottoms
        self.slope: float = self.parameter.relu_param.negative_slope

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """At exactly 0 the gradient is the slope's."""
        if self.slope != 0:
            return functional.leaky_relu(bottom, self.slope)
        return torch.relu_(bottom) if self.may_overwrite else torch.relu(bottom)

    def activation(self) -> Activation:
        """A slope of 0 or not."""
        return ("leaky_relu", (self.slope,)) if self.slope != 0 else ("relu", ())


@register("Sigmoid")
class Sigmoid(Elementwise):
    """1 / (1 + exp(-x))."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return torch.sigmoid_(bottom) if self.may_overwrite else torch.sigmoid(bottom)


@register("TanH")
class TanH(Elementwise):
    """tanh(x)."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return torch.tanh(bottom)


@register("ELU")
class ELU(Elementwise):
    """x above 0, alpha * (exp(x) - 1) below."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        alpha: float = self.parameter.elu_param.alpha
        return functional.elu(bottom, alpha)


@register("AbsVal")
class AbsVal(Elementwise):
    """|x|; the gradient at 0 is 0."""

    allows_in_place = False

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.abs()


@register("BNLL")
class BNLL(Elementwise):
    """log(1 + exp(x))."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """Written so that large x do not overflow; the derivative is the sigmoid (Caffe cuts x at 50 there)."""
        return bottom.clamp(min=0) + torch.log1p(torch.exp(-bottom.abs()))


@register("Swish")
class Swish(Elementwise):
    """x * sigmoid(beta * x)."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        beta: float = self.parameter.swish_param.beta
        return bottom * torch.sigmoid(beta * bottom)


@register("Clip")
class Clip(Elementwise):
    """min(max(x, min), max); the gradient passes at the very ends."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the range."""
        del bottoms
        options = self.parameter.clip_param
        if not self.parameter.HasField("clip_param"):
            raise self.error("needs clip_param with min and max")
        self.low, self.high = options.min, options.max

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        return bottom.clamp_(self.low, self.high) if self.may_overwrite else bottom.clamp(self.low, self.high)

    def activation(self) -> Activation:
        """Two ends."""
        return "hardtanh", (self.low, self.high)


@register("Threshold")
class Threshold(Elementwise):
    """1 where x > threshold, else 0; no gradient."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        threshold: float = self.parameter.threshold_param.threshold
        return (bottom > threshold).to(bottom.dtype)


@register("Dropout")
class Dropout(Elementwise):
    """While training, zeroes a part of the values and scales the rest up; else the identity.

    With ``scale_train: false`` (Faster R-CNN's) the rest stays as it is, and values are scaled down while testing.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the ratio."""
        del bottoms
        self.ratio: float = self.parameter.dropout_param.dropout_ratio
        self.scale_train: bool = self.parameter.dropout_param.scale_train
        if not 0.0 < self.ratio < 1.0:
            raise self.error(f"dropout_ratio must lie between 0 and 1, got {self.ratio}")

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """As it says."""
        if self.is_training:
            kept = functional.dropout(bottom, self.ratio, training=True)
            return kept if self.scale_train else kept * (1 - self.ratio)
        if not self.scale_train:
            return bottom * (1 - self.ratio)
        return bottom if self.may_overwrite else bottom.clone()

    def channel_affine(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """Nothing to do at inference."""
        return None if self.is_training or not self.scale_train else (None, None)


@register("PReLU")
class PReLU(Layer):
    """max(x, 0) + a * min(x, 0) with a learned slope, per channel or one for all."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Make the slopes."""
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
        """As it says."""
        return [functional.prelu(bottoms[0], parameters[0].reshape(-1))]
