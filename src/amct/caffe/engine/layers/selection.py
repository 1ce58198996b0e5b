"""Layers that select or drop whole samples: BatchReindex, Filter, Silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape


@register("BatchReindex")
class BatchReindex(Layer):
    """top[i] = bottom[index[i]]."""

    bottom_count = (2, 2)
    no_gradient = (1,)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(number of indices, ...)."""
        if len(bottoms[1]) != 1:
            raise self.error(f"the second bottom must be a list of indices, got shape {bottoms[1]}")
        return [(bottoms[1][0], *bottoms[0][1:])]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Select the samples."""
        index = bottoms[1].detach().to(torch.int64)
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < bottoms[0].shape[0]):
            raise self.error(
                f"an index lies outside 0..{bottoms[0].shape[0] - 1}: {int(index.min())}..{int(index.max())}"
            )
        return [bottoms[0].index_select(0, index)]


@register("Filter")
class Filter(Layer):
    """Keeps the samples whose selector (the last bottom) is not 0; the tops' shapes are the bottoms' until forward."""

    bottom_count = (2, None)
    top_count = (1, None)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottoms' shapes; forward sets the real number of samples."""
        *values, selector = bottoms
        if len(values) != len(self.top_blobs):
            raise self.error(f"needs one top for each bottom but the selector: {len(self.top_blobs)} for {len(values)}")
        if count(selector, 1) != 1:
            raise self.error(
                f"Selector blob must have all the dimensions of size 1 (except the first one), got {selector}"
            )
        for index, shape in enumerate(values):
            if shape[:1] != selector[:1]:
                raise self.error(
                    f"Each bottom should have the same 0th dimension as the selector: {shape} (bottom {index})"
                )
        self.no_gradient = (len(values),)
        return values

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Select the samples."""
        kept = bottoms[-1].detach().reshape(-1).nonzero().reshape(-1)
        return [bottom.index_select(0, kept) for bottom in bottoms[:-1]]


@register("Silence")
class Silence(Layer):
    """Consumes blobs that no other layer reads, so that they are not outputs of the net."""

    bottom_count = (1, None)
    top_count = (0, 0)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """No tops."""
        return []

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Do nothing."""
        return []
