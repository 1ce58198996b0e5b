"""The base of layers that are a function of tensors, without parameters and with optional further tops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from amct.caffe.engine.blob import Shape


class TensorOperator(Layer):
    """Subclasses define ``shapes`` and ``compute`` for all possible tops; those the net does not have are dropped."""

    allows_in_place = False

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes of the tops that the net has."""
        return self.shapes(bottoms)[: len(self.top_blobs)]

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The tops' shapes; by default that of the first bottom."""
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results of ``compute`` for the tops that the net has."""
        return self.compute(bottoms)[: len(self.top_blobs)]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Compute all tops as new float32 tensors."""
        raise NotImplementedError
