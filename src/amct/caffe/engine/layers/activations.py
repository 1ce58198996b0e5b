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
    """top = function(bottom), applied to each value; the shape stays. Subclasses define ``function``."""

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """function(bottom)."""
        return [self.function(bottoms[0])]

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """The activation function."""
        raise NotImplementedError


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

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """tanh(x)."""
        return torch.tanh(bottom)


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

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """|x|."""
        return bottom.abs()


@register("BNLL")
class BNLL(Elementwise):
    """y = log(1 + exp(x))."""

    def function(self, bottom: torch.Tensor) -> torch.Tensor:
        """max(x, 0) + log(1 + exp(-|x|)), which does not overflow; the gradient is sigmoid(x) (Caffe clips x at 50)."""
        return bottom.clamp(min=0) + torch.log1p(torch.exp(-bottom.abs()))


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

    def channel_affine(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """The identity at inference, if ``scale_train`` is set."""
        return None if self.drops or not self.scale_train else (None, None)


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
