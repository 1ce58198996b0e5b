"""Functional calls on parameters (``F.linear``, nn.MultiheadAttention) in training: quantizers for their operands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from amct.model.kinds import KIND_OF_TORCH_TYPE
from amct.pipeline.weights import WeightPart
from amct.pytorch.layer_weights import weight_parts
from amct.pytorch.qat.layers import QuantizedLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from amct.pytorch.functional.layers import LayerSource


class QuantizedCall(QuantizedLayer):
    """The quantizers of a functional call; the parameter stays where the user has it.

    The module that holds the parameter is kept inside a tuple, so that it is not registered twice.
    """

    def __init__(self, holder: nn.Module, source: LayerSource) -> None:
        """Create it without quantizers."""
        super().__init__()
        self._holder = (holder,)
        self.source = source

    @property
    def weight(self) -> Tensor:
        """The output channels of the parameter that the call uses, in the layout of the torch.nn type."""
        attribute = self.source.parameter.rpartition(".")[2]
        return self.source.channels.of(getattr(self._holder[0], attribute))

    def part(self) -> WeightPart:
        """The weight as quantizers read it."""
        kind = KIND_OF_TORCH_TYPE[self.source.type]
        groups = dict(self.source.settings).get("groups", 1)
        return WeightPart(
            name="weight", tensor=self.weight.detach(), kind=kind.weight_kind, groups=groups, gates=kind.gates
        )

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The operands of the call on their grids."""
        return self.quantized_input(x), cast("Tensor", self.weight_quantizer(weight))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:  # noqa: ANN401  torch's protocol
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if not any(key.startswith(prefix) for key in state_dict):  # the state of a float model, loaded before
            self.weight_quantizer.restart(self.weight)


def trained_parts(layer: nn.Module) -> tuple[WeightPart, ...]:
    """The weights of a layer in training; a functional call has one."""
    return (layer.part(),) if isinstance(layer, QuantizedCall) else weight_parts(layer)
