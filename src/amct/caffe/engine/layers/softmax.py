"""Softmax along one axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape


@register("Softmax")
class Softmax(Layer):
    """y = exp(x) / sum(exp(x)) along ``axis``; the maximum is subtracted first."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        self.axis = canonical_axis(self.parameter.softmax_param.axis, len(bottoms[0]), self.name)
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Softmax along the axis."""
        return [torch.softmax(bottoms[0], self.axis)]
