"""The weights of a quantizable layer, whatever its type: how to reach them, round them and put them back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from amct.errors import AmctError, ArgumentTypeError, CalibrationError
from amct.model.kinds import KIND_OF_TORCH_TYPE, LayerKind
from amct.numerics.arq import WeightFactors, WeightKind, arq, fake_quantize_weight, reorder_gates
from amct.numerics.dmq import balance_weight
from amct.pytorch.capture.layer_types import quantizable_type

if TYPE_CHECKING:
    from torch import Tensor

_FLOATS = (torch.float32, torch.float16)


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """One weight of a layer: ``attribute`` holds it; a recurrent layer has two, for the input and for the state."""

    attribute: str
    kind: WeightKind
    groups: int = 1
    gates: int = 0

    def of(self, module: nn.Module) -> Tensor:
        """The weight itself."""
        weight = getattr(module, self.attribute)
        assert isinstance(weight, torch.Tensor)
        return weight.detach()

    def factors(self, weight: Tensor, *, bits: int, channel_wise: bool) -> WeightFactors:
        """ARQ's scales of the weight."""
        groups = self.gates or self.groups
        return arq(weight, kind=self.kind, bits=bits, channel_wise=channel_wise, groups=groups)

    def rounded(self, weight: Tensor, factors: WeightFactors, bits: int) -> Tensor:
        """The weight on the grid of its scales, in its own type."""
        return fake_quantize_weight(weight, factors, self.kind, bits, self.groups)

    def recorded(self, factors: WeightFactors, kind: LayerKind) -> tuple[float, ...]:
        """The scales in the order of the record: gates in ONNX's."""
        scale = factors.scale.reshape(-1)
        if kind.is_recurrent and scale.numel() > 1:
            scale = reorder_gates(scale, kind.onnx_gates)
        return tuple(float(value) for value in scale)


def weight_parts(module: nn.Module) -> tuple[WeightPart, ...]:
    """The weights of a layer of a quantizable type; none for average pooling."""
    if quantizable_type(module) is None:
        return ()
    kind = layer_kind(module)
    if kind.is_recurrent:
        names = ("weight_ih_l0", "weight_hh_l0")
        return tuple(WeightPart(attribute=name, kind=kind.weight_kind, gates=kind.gates) for name in names)
    if not kind.has_weights:
        return ()
    return (WeightPart(attribute="weight", kind=kind.weight_kind, groups=getattr(module, "groups", 1)),)


def layer_kind(module: nn.Module) -> LayerKind:
    """The kind of a layer of a quantizable type."""
    name = quantizable_type(module)
    assert name is not None
    return KIND_OF_TORCH_TYPE[name]


def channel_axis(module: nn.Module) -> int:
    """Where the input of a layer has its channels."""
    return layer_kind(module).channel_axis


def balanced_weight(module: nn.Module, part: WeightPart, balance: Tensor | None) -> Tensor:
    """A weight with DMQ's factors multiplied in; those of the state of a recurrent layer are not concerned."""
    weight = part.of(module)
    if balance is None or part.attribute == "weight_hh_l0":
        return weight
    return balance_weight(weight, balance.to(weight.device), part.kind, part.groups)


def put_weight(module: nn.Module, attribute: str, weight: Tensor) -> None:
    """Let a module of a copied model use another weight."""
    setattr(module, attribute, nn.Parameter(weight, requires_grad=False))


def check_weights(name: str, module: nn.Module) -> None:
    """Check that the weights of a layer can be quantized at all.

    Raises:
        ArgumentTypeError: they are neither float32 nor float16.
        CalibrationError: they hold NaN or infinity.
    """
    for part in weight_parts(module):
        weight = part.of(module)
        if weight.dtype not in _FLOATS:
            raise ArgumentTypeError(
                f'layer "{name}": only weights of float32 and float16 can be quantized, got '
                f"{str(weight.dtype).removeprefix('torch.')}; convert the model with model.float()"
            )
        if not bool(torch.isfinite(weight).all()):
            bad = int((~torch.isfinite(weight)).sum())
            raise CalibrationError(
                f'layer "{name}": {bad} of {weight.numel()} values of {part.attribute} are NaN or infinite; '
                "repair the model, or leave this layer in float"
            )


def named(layer: str, error: AmctError) -> CalibrationError:
    """An error of the maths, with the layer it is about."""
    return CalibrationError(f'layer "{layer}": {error}')
