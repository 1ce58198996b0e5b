"""The weights of a quantizable torch layer: where they are, and how rounded ones are put back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from amct.model.kinds import KIND_OF_TORCH_TYPE
from amct.ptq.weights import WeightPart
from amct.pytorch.capture.layer_types import quantizable_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from amct.model.kinds import LayerKind


def weight_parts(module: nn.Module) -> tuple[WeightPart, ...]:
    """The float weights of a layer of a quantizable type, named by attribute; none for average pooling."""
    kind = layer_kind(module)
    if kind is None or not kind.has_weights:
        return ()
    return tuple(
        WeightPart(
            name=name,
            tensor=_tensor(module, name),
            kind=kind.weight_kind,
            groups=1 if kind.is_recurrent else getattr(module, "groups", 1),
            gates=kind.gates,
            torch_gates=kind if kind.is_recurrent else None,
            balanced=name != "weight_hh_l0",
        )
        for name in (("weight_ih_l0", "weight_hh_l0") if kind.is_recurrent else ("weight",))
    )


def layer_kind(module: nn.Module) -> LayerKind | None:
    """The kind of a layer of a quantizable type."""
    return KIND_OF_TORCH_TYPE.get(quantizable_type(module) or "")


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
