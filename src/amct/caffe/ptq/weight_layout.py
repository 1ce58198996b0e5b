"""The layout of the weights of each Caffe layer type, in the terms of ``amct.numerics``, and the number of groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.numerics.arq import WeightKind

if TYPE_CHECKING:
    import torch

    from amct.caffe.engine.messages import ProtoMessage


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """A weight and its layout; ``transposed``: an InnerProduct weight that the file has as ``[inputs, outputs]``."""

    weight: torch.Tensor
    kind: WeightKind
    groups: int = 1
    transposed: bool = False

    def rows_first(self) -> torch.Tensor:
        """The weight in the layout of its kind: outputs first."""
        return self.weight.t().contiguous() if self.transposed else self.weight

    def restored(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight in the layout of its kind, in that of the file."""
        return weight.t().contiguous() if self.transposed else weight


def layout_of(layer: ProtoMessage, weight: torch.Tensor) -> WeightLayout:
    """The layout of a weighted layer's first blob."""
    if layer.type == "InnerProduct":
        return WeightLayout(weight=weight, kind=WeightKind.LINEAR, transposed=bool(layer.inner_product_param.transpose))
    options = layer.convolution_param
    if layer.type == "Deconvolution":
        return WeightLayout(weight=weight, kind=WeightKind.CONV_TRANSPOSE, groups=options.group)
    groups = options.group
    if layer.type == "DepthwiseConv" and groups == 1:
        groups = weight.shape[0]
    return WeightLayout(weight=weight, kind=WeightKind.CONV, groups=groups)
