"""The weights of a quantizable torch layer: where they are, and how rounded ones are put back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from amct.numerics.arq import WeightKind
from amct.ptq.weights import GATES, WeightPart
from amct.pytorch.capture.layer_types import quantizable_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_KINDS = {
    "Conv1d": WeightKind.CONV,
    "Conv2d": WeightKind.CONV,
    "Conv3d": WeightKind.CONV,
    "ConvTranspose1d": WeightKind.CONV_TRANSPOSE,
    "ConvTranspose2d": WeightKind.CONV_TRANSPOSE,
    "Linear": WeightKind.LINEAR,
    "LSTM": WeightKind.RNN,
    "GRU": WeightKind.RNN,
}


def weight_parts(module: nn.Module) -> tuple[WeightPart, ...]:
    """The float weights of a layer of a quantizable type, named by attribute; none for average pooling."""
    kind = quantizable_type(module)
    if kind not in _KINDS:
        return ()
    gates = GATES.get(kind, 0)
    return tuple(
        WeightPart(
            name=name,
            tensor=_tensor(module, name),
            kind=_KINDS[kind],
            groups=1 if gates else getattr(module, "groups", 1),
            gates=gates,
            torch_gates=kind if gates else None,
            balanced=name != "weight_hh_l0",
        )
        for name in (("weight_ih_l0", "weight_hh_l0") if gates else ("weight",))
    )


def _tensor(module: nn.Module, attribute: str) -> Tensor:
    weight = getattr(module, attribute)
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def channel_axis(module: nn.Module) -> int:
    """The axis of a layer's input that holds the channels."""
    return -1 if isinstance(module, (nn.Linear, nn.RNNBase)) else 1


def can_pack(module: nn.Module) -> bool:
    """Whether two 4-bit weights can share a byte along the input channels."""
    inputs = getattr(module, "in_channels", getattr(module, "in_features", None))
    return getattr(module, "groups", 1) == 1 and isinstance(inputs, int) and inputs % 2 == 0


def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Let a module of a copied model use other weights, given by attribute."""
    for attribute, weight in weights.items():
        setattr(module, attribute, nn.Parameter(weight, requires_grad=False))
