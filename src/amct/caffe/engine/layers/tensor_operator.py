"""The base of layers that are one function of tensors: torch itself says what shapes come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.errors import AmctError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape


class TensorOperator(Layer):
    """A layer without parameters; subclasses define ``compute``, which must not look at values."""

    allows_in_place = False

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """What comes out of tensors that have shapes but no memory."""
        try:
            results = self.compute([torch.empty(shape, device="meta") for shape in bottoms])
        except AmctError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise self.error(f"does not fit its bottoms {bottoms}: {reason}") from error
        return [tuple(result.shape) for result in results][: len(self.top_blobs)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """As ``compute`` says."""
        del parameters
        return self.compute(bottoms)[: len(self.top_blobs)]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tops, new float32 tensors; those the net has no use for may come too."""
        raise NotImplementedError
