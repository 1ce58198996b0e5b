"""SmoothL1Loss, as Fast R-CNN defines it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layers.loss_base import LossLayer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import require_same_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

INSIDE, OUTSIDE = 2, 3


@register("SmoothL1Loss")
class SmoothL1Loss(LossLayer):
    """sum(outside * f(inside * (a - b))) / N; f(d) = (sigma d)^2 / 2 if |d| < 1 / sigma^2, else |d| - 1 / (2 sigma^2).

    Bottom 2 holds the inside weights, bottom 3 the outside weights; both default to 1.
    """

    bottom_count = (2, 4)
    no_gradient = (INSIDE, OUTSIDE)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """()."""
        for index, shape in enumerate(bottoms[1:], 1):
            require_same_shape(bottoms[0], shape, self.name, index)
        return super().reshape(bottoms)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The smooth L1 loss of the batch."""
        sharpness = self.parameter.smooth_l1_loss_param.sigma**2
        difference = bottoms[0] - bottoms[1]
        if len(bottoms) > INSIDE:
            difference = difference * bottoms[INSIDE].detach()
        size = difference.abs()
        values = torch.where(size < 1 / sharpness, 0.5 * sharpness * size * size, size - 0.5 / sharpness)
        if len(bottoms) > OUTSIDE:
            values = values * bottoms[OUTSIDE].detach()
        return [values.sum() / bottoms[0].shape[0]]
