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

#: torch computes rows shorter than a vector of the processor number by number; so many of them are faster as columns.
SHORT_ROW, MANY_ROWS = 16, 64


@register("Softmax")
class Softmax(Layer):
    """y = exp(x) / sum(exp(x)) along ``axis``; the maximum is subtracted first."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        self.axis = canonical_axis(self.parameter.softmax_param.axis, len(bottoms[0]), self.name)
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Softmax along the axis; many short rows are computed as columns."""
        bottom, axis = bottoms[0], self.axis
        is_last = 0 < axis == bottom.dim() - 1
        if is_last and bottom.shape[axis] < SHORT_ROW and bottom.shape[axis - 1] >= MANY_ROWS:
            columns = torch.softmax(bottom.transpose(axis - 1, axis).contiguous(), axis - 1)
            return [columns.transpose(axis - 1, axis).contiguous()]
        return [torch.softmax(bottom, axis)]
