"""What a PyTorch layer can be asked for: the rules a ``.cfg`` override and a JSON block are held to alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct.config.ptq.pytorch_types import ACTIVATION_BITS, ADA_BITS, ARQ_BITS, PTQ_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MIGRATION_RANGE = (0.2, 0.8)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a block asks for: only the values it sets itself.

    Attributes:
        who: What the messages call it: ``layer "fc"`` or ``type Linear``.
        type: The layer type.
        activation: The keys set of the activation block.
        weight: The keys set of the weight block.
        weight_algorithm: The name of the weight algorithm, None when the block names none.
        balanced: Whether DMQ is asked for.
        has_bias: Whether the layer has a bias.
        by_type: Whether the block is for all layers of the type.
    """

    who: str
    type: str
    activation: Mapping[str, Any]
    weight: Mapping[str, Any]
    weight_algorithm: str | None
    balanced: bool
    has_bias: bool = True
    by_type: bool = False


def illegal_bits(
    activation: Mapping[str, Any], weight: Mapping[str, Any], weight_algorithm: str | None
) -> Iterator[tuple[str, str]]:
    """Bit widths no layer can have: the dotted key and what is wrong."""
    if (bits := activation.get("num_bits", 8)) not in ACTIVATION_BITS:
        yield "activation_quant_params.num_bits", f"activations can have {_bits(ACTIVATION_BITS)} bits, got {bits}"
    allowed = ADA_BITS if weight_algorithm == "ada_quantize" else ARQ_BITS
    if (bits := weight.get("num_bits", 8)) not in allowed:
        yield "weight_quant_params.num_bits", f"weights can have {_bits(allowed)} bits, got {bits}"


def unsupported(asked: Asked) -> Iterator[tuple[str, str]]:
    """What was asked for exactly this layer or type and cannot be done: the dotted key and what is wrong."""
    capability = PTQ_TYPES[asked.type]
    if asked.weight_algorithm == "ada_quantize" and not capability.ada:
        allowed = _types("ada")
        yield "weight_quant_params", f"{asked.who}: ada_quantize is only for {allowed}. Use arq_quantize."
    if asked.weight.get("channel_wise") is True and not capability.channel_wise:
        yield (
            "weight_quant_params.channel_wise",
            f"{asked.who}: channel_wise must be false, {asked.type} has no channels of its own",
        )
    odd = asked.weight_algorithm != "ada_quantize" and asked.weight.get("num_bits") in (6, 7)
    if odd and not capability.odd_bits:
        yield (
            "weight_quant_params.num_bits",
            f"{asked.who}: weights of 6 or 7 bits are only for {_types('odd_bits')}, not for {asked.type}",
        )
    yield from _unsupported_activation(asked)


def _unsupported_activation(asked: Asked) -> Iterator[tuple[str, str]]:
    capability = PTQ_TYPES[asked.type]
    if asked.activation.get("asymmetric") is True and not capability.asymmetric:
        yield (
            "activation_quant_params.asymmetric",
            f"{asked.who}: asymmetric must be false, {asked.type} allows no offset",
        )
    if asked.activation.get("num_bits") == 16 and not can_int16(asked.type, has_bias=asked.has_bias):
        reason = "without a bias" if capability.int16 else f"of type {asked.type}"
        yield "activation_quant_params.num_bits", f"{asked.who}: INT16 activations are not possible {reason}"
    if asked.balanced and not (capability.dmq_by_type if asked.by_type else capability.dmq):
        yield "dmq_balancer_param", f"{asked.who}: dmq_balancer is not possible for {asked.type}"


def can_int16(layer_type: str, *, has_bias: bool) -> bool:
    """Whether a layer can have 16-bit activations."""
    capability = PTQ_TYPES[layer_type]
    return capability.int16 and (has_bias or not capability.int16_needs_bias)


def _types(ability: str) -> str:
    return ", ".join(name for name, capability in PTQ_TYPES.items() if getattr(capability, ability))


def _bits(allowed: frozenset[int]) -> str:
    return ", ".join(str(bits) for bits in sorted(allowed))
