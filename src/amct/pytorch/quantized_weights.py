"""The weights of a folded model, quantized as the plan says, and their entries in the record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from amct.calibration.layer_records import recorded_bits, weight_record
from amct.config.settings import AdaRoundSettings, ArqSettings
from amct.errors import AmctError
from amct.pytorch.layer_weights import (
    WeightPart,
    balanced_weight,
    check_weights,
    layer_kind,
    named,
    put_weight,
    weight_parts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from amct.config.plan import LayerPlan
    from amct.numerics.arq import WeightFactors
    from amct.record import LayerRecord


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights:
    """The quantized weights of one layer.

    Attributes:
        rounded: By attribute of the module: the weight on its grid (balanced where DMQ balances the layer).
        factors: By attribute: its scales.
        bits: How many bits the integers have.
        balance: DMQ's factors, one per input channel; the layer's input is divided by them.
        learned: Whether the rounding was learned (AdaRound), so that it does not follow from weight and scale.
        can_pack: Whether two 4-bit weights can share a byte.
        notes: What was done otherwise than asked.
    """

    rounded: Mapping[str, Tensor]
    factors: Mapping[str, WeightFactors]
    bits: int = 8
    balance: Tensor | None = None
    learned: bool = False
    can_pack: bool = True
    notes: tuple[str, ...] = field(default=())

    def put_into(self, module: nn.Module) -> None:
        """Let a module of a copied model compute with these weights."""
        for attribute, weight in self.rounded.items():
            put_weight(module, attribute, weight.clone())

    @property
    def recorded_bits(self) -> int:
        """The bit width that the record has for them: the next that it knows."""
        return recorded_bits(self.bits, can_pack=self.can_pack)

    def record(self, module: nn.Module) -> LayerRecord:
        """The layer's entry in the record, still without its activations."""
        kind = layer_kind(module)
        scales = [part.recorded(self.factors[part.attribute], kind) for part in weight_parts(module)]
        balance = () if self.balance is None else tuple(float(value) for value in self.balance)
        return weight_record(
            scales[0] if scales else (),
            state=scales[1] if kind.is_recurrent else (),
            bits=self.recorded_bits,
            balance=balance,
        )


def arq_weights(layer: LayerPlan, module: nn.Module, balance: Tensor | None) -> LayerWeights:
    """Quantize the weights of one layer by their largest values.

    Raises:
        ArgumentTypeError: the weights are neither float32 nor float16.
        CalibrationError: the weights cannot be quantized; names the layer.
    """
    settings = layer.weight or ArqSettings()
    assert isinstance(settings, (ArqSettings, AdaRoundSettings))
    check_weights(layer.name, module)
    rounded: dict[str, Tensor] = {}
    factors: dict[str, WeightFactors] = {}
    for part in weight_parts(module):
        weight = balanced_weight(module, part, balance)
        try:
            factors[part.attribute] = part.factors(weight, bits=settings.num_bits, channel_wise=settings.channel_wise)
        except AmctError as error:
            raise named(layer.name, error) from error
        rounded[part.attribute] = part.rounded(weight, factors[part.attribute], settings.num_bits)
    return LayerWeights(
        rounded=rounded,
        factors=factors,
        bits=settings.num_bits,
        balance=balance,
        can_pack=_can_pack(module),
    )


def final_weight(weights: LayerWeights, part: WeightPart) -> Tensor:
    """A weight on its grid as the unbalanced model would hold it: for a file that balances by itself."""
    rounded = weights.rounded[part.attribute]
    if weights.balance is None:
        return rounded
    from amct.numerics.dmq import balance_weight

    return balance_weight(rounded, weights.balance.double().reciprocal(), part.kind, part.groups)


def _can_pack(module: nn.Module) -> bool:
    inputs = getattr(module, "in_channels", getattr(module, "in_features", None))
    return getattr(module, "groups", 1) == 1 and isinstance(inputs, int) and inputs % 2 == 0


def as_balance(factors: tuple[float, ...]) -> Tensor | None:
    """DMQ's factors of a record entry; None when it has none."""
    return torch.tensor(factors, dtype=torch.float32) if factors else None
