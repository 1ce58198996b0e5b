"""Reads the weights of a quantizable torch layer and replaces them by quantized ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from amct.model.kinds import KIND_OF_TORCH_TYPE
from amct.pipeline.weights import WeightPart
from amct.pytorch.capture.layer_types import quantizable_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def weight_parts(module: nn.Module) -> tuple[WeightPart, ...]:
    """The float weights of a layer of a quantizable type, named by attribute; none for average pooling."""
    kind = KIND_OF_TORCH_TYPE.get(quantizable_type(module) or "")
    if kind is None or not kind.has_weights:
        return ()
    return tuple(
        WeightPart(
            name=name,
            tensor=getattr(module, name).detach(),
            kind=kind.weight_kind,
            groups=1 if kind.is_recurrent else getattr(module, "groups", 1),
            gates=kind.gates,
            torch_gates=kind if kind.is_recurrent else None,
            balanced=name != "weight_hh_l0",
        )
        for name in (("weight_ih_l0", "weight_hh_l0") if kind.is_recurrent else ("weight",))
    )


def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set other weights, given by attribute, in a module of a copied model."""
    for attribute, weight in weights.items():
        setattr(module, attribute, nn.Parameter(weight, requires_grad=False))
