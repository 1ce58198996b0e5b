"""Permute and Normalize, as defined by SSD."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape


@register("Permute")
class Permute(Layer):
    """Permutes the axes; axes that ``order`` does not list follow in their own order."""

    moves_values = True
    allows_in_place = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the order."""
        axes = len(bottoms[0])
        given = list(self.parameter.permute_param.order)
        for axis in given:
            if axis >= axes:
                raise self.error(f"order should be less than the input dimension: {axis} for shape {bottoms[0]}")
        if len(set(given)) != len(given):
            raise self.error(f"there are duplicate orders: {given}")
        self.order = [*given, *(axis for axis in range(axes) if axis not in given)]

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The permuted shape."""
        if len(bottoms[0]) != len(self.order):
            raise self.error(f"was set up for {len(self.order)} axes, got shape {bottoms[0]}")
        return [tuple(bottoms[0][axis] for axis in self.order)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Permute and copy."""
        return [bottoms[0].permute(self.order).clone(memory_format=torch.contiguous_format)]


@register("Normalize")
class Normalize(Layer):
    """y = scale * x / sqrt(sum(x^2) + eps); the sum is over the channels, or over the sample with ``across_spatial``.

    The scale has one value per channel, or a single one with ``channel_shared``.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the scale."""
        options = self.options = self.parameter.norm_param
        if len(bottoms[0]) < 2:
            raise self.error(f"needs a bottom of at least two axes, got shape {bottoms[0]}")
        shape = () if options.channel_shared else (bottoms[0][1],)
        self.add_parameter(shape, options.scale_filler if options.HasField("scale_filler") else None, default=1.0)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        if not self.options.channel_shared and bottoms[0][1] != self.blobs[0].shape[0]:
            raise self.error(f"the scale has {self.blobs[0].shape[0]} channels, the bottom {bottoms[0]}")
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return scale * x / sqrt(sum(x^2) + eps)."""
        bottom = bottoms[0]
        axes = list(range(1, bottom.dim())) if self.options.across_spatial else [1]
        norm = (bottom * bottom).sum(axes, keepdim=True).add(self.options.eps).sqrt()
        scale = parameters[0].reshape(1, -1, *(1,) * (bottom.dim() - 2))
        return [bottom / norm * scale]
