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
    """Sum of outside * f(inside * (a - b)) over the batch size; f is quadratic up to 1/sigma^2, then linear.

    The weights inside and outside are bottoms 2 and 3, 1 where missing.
    """

    bottom_count = (2, 4)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """A scalar."""
        for index, shape in enumerate(bottoms[1:], 1):
            require_same_shape(bottoms[0], shape, self.name, index)
        return super().reshape(bottoms)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """As it says."""
        del parameters
        sharpness = self.parameter.smooth_l1_loss_param.sigma**2
        difference = bottoms[0] - bottoms[1]
        if len(bottoms) > INSIDE:
            difference = difference * bottoms[INSIDE].detach()
        size = difference.abs()
        values = torch.where(size < 1 / sharpness, 0.5 * sharpness * size * size, size - 0.5 / sharpness)
        if len(bottoms) > OUTSIDE:
            values = values * bottoms[OUTSIDE].detach()
        return [values.sum() / bottoms[0].shape[0]]

    def allows_forced_backward(self, bottom: int) -> bool:
        """All but the weights."""
        return bottom < INSIDE
