"""GroupNorm and LayerNormalization: each sample is normalized by its own mean and variance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from amct.caffe.engine.blob import Shape


@register("GroupNorm")
class GroupNorm(Layer):
    """y = (x - mean) / sqrt(variance + eps) over each of ``group_num`` groups of the channels of (N, C, ...)."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        groups, shape = self.parameter.group_norm_param.group_num, bottoms[0]
        if len(shape) < 2 or groups <= 0 or shape[1] % groups:
            raise self.error(f"group_num {groups} does not divide the channels of {shape}")
        return [shape]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Normalize each group."""
        options = self.parameter.group_norm_param
        return [functional.group_norm(bottoms[0], options.group_num, eps=options.eps)]


@register("LayerNormalization")
class LayerNormalization(Layer):
    """ONNX's: y = scale * (x - mean) / sqrt(variance + epsilon) + bias over the axes from ``axis`` on.

    Scale and bias are parameters, or the second and third bottom if given; their shape is that of the normalized axes.
    """

    bottom_count = (1, 3)
    allows_in_place = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Create scale and bias unless they are bottoms."""
        options = self.options = self.parameter.layer_normalization_param
        self.axis = canonical_axis(options.axis, len(bottoms[0]), self.name)
        if len(bottoms) > 1:
            return
        inner = bottoms[0][self.axis :]
        self.add_parameter(inner, options.scale_filler if options.HasField("scale_filler") else None, default=1.0)
        if options.bias_term:
            self.add_parameter(inner, options.bias_filler)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        inner = bottoms[0][self.axis :]
        for shape in [*bottoms[1:], *(blob.shape for blob in self.blobs)]:
            if shape != inner:
                raise self.error(f"scale and bias must have shape {inner}, the axes from {self.axis} on, got {shape}")
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Normalize, multiply by the scale, add the bias."""
        bottom, *factors = [*bottoms, *parameters]
        scale = factors[0]
        bias = factors[1] if len(factors) > 1 else None
        return [functional.layer_norm(bottom, bottom.shape[self.axis :], scale, bias, self.options.epsilon)]
