"""The weight layout and group count of each Caffe layer type, in the terms of ``amct.numerics``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.model.kinds import KIND_OF_CAFFE_TYPE
from amct.numerics.weight_kind import WeightKind

if TYPE_CHECKING:
    import torch

    from amct.caffe.engine.messages import ProtoMessage


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """A weight and its layout; ``transposed``: an InnerProduct weight stored as ``[inputs, outputs]``."""

    weight: torch.Tensor
    kind: WeightKind
    groups: int = 1
    transposed: bool = False

    def rows_first(self) -> torch.Tensor:
        """The weight in the layout of its kind, with outputs first."""
        return self.weight.t().contiguous() if self.transposed else self.weight

    def restored(self, weight: torch.Tensor) -> torch.Tensor:
        """Convert a weight from the layout of its kind to that of the file."""
        return weight.t().contiguous() if self.transposed else weight


def layout_of(layer: ProtoMessage, weight: torch.Tensor) -> WeightLayout:
    """The layout of a weighted layer's first blob."""
    kind = KIND_OF_CAFFE_TYPE[layer.type].weight_kind
    if kind is WeightKind.LINEAR:
        return WeightLayout(weight=weight, kind=kind, transposed=bool(layer.inner_product_param.transpose))
    groups = layer.convolution_param.group
    if layer.type == "DepthwiseConv" and groups == 1:
        groups = weight.shape[0]
    return WeightLayout(weight=weight, kind=kind, groups=groups)
