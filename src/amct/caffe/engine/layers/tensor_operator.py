"""The base of layers that are one function of tensors and may leave a second result away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from amct.caffe.engine.blob import Shape


class TensorOperator(Layer):
    """A layer without parameters; subclasses define ``shapes`` and ``compute``, for all the tops they can have."""

    allows_in_place = False

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes of those tops the net has."""
        return self.shapes(bottoms)[: len(self.top_blobs)]

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The tops' shapes; the bottom's unless a subclass says otherwise."""
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """As ``compute`` says."""
        del parameters
        return self.compute(bottoms)[: len(self.top_blobs)]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tops, new float32 tensors."""
        raise NotImplementedError
