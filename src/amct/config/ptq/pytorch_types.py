"""What each PyTorch layer type can do, as a table, and the rules for what a config can ask of it.

The names are those of ``torch.nn``; a type that is not in the table is never quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ARQ_BITS = frozenset({4, 6, 7, 8})  # of weights, over all types; 6 and 7 need a type that says so
ADA_BITS = frozenset(range(2, 9))
ACTIVATION_BITS = frozenset({4, 8, 16})


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a layer type can do.

    Attributes:
        channel_wise: Weights can have a scale per output channel (and do so by default).
        asymmetric: Activations can have an offset.
        int16: Activations can have 16 bits.
        int16_needs_bias: ... but only in layers with a bias.
        ada: AdaRound can tune the weights.
        odd_bits: Weights can have 6 or 7 bits.
        dmq: DMQ can balance the layer.
        dmq_by_type: ... also when asked for by an override of the type.
        fusible: A BatchNorm that follows can be folded in.
        weights: The layer has weights (average pooling has a formal block for them in the JSON, but none).
    """

    channel_wise: bool = True
    asymmetric: bool = True
    int16: bool = True
    int16_needs_bias: bool = False
    ada: bool = False
    odd_bits: bool = False
    dmq: bool = True
    dmq_by_type: bool = True
    fusible: bool = False
    weights: bool = True


PTQ_TYPES: Mapping[str, Capability] = MappingProxyType(
    {
        "Conv1d": Capability(fusible=True),
        "Conv2d": Capability(ada=True, odd_bits=True, fusible=True),
        "Conv3d": Capability(asymmetric=False, int16=False, fusible=True),
        "Linear": Capability(channel_wise=False, int16_needs_bias=True, ada=True),
        "ConvTranspose1d": Capability(),
        "ConvTranspose2d": Capability(ada=True),
        "AvgPool2d": Capability(channel_wise=False, int16=False, dmq=False, dmq_by_type=False, weights=False),
        "LSTM": Capability(dmq_by_type=False),
        "GRU": Capability(dmq_by_type=False),
    }
)

FUSIBLE_TYPES = tuple(name for name, capability in PTQ_TYPES.items() if capability.fusible)
KV_CACHE_TYPES = ("Linear",)
QAT_TYPES: Mapping[str, Capability] = MappingProxyType(
    {name: capability for name, capability in PTQ_TYPES.items() if capability.weights}
)
FILTER_PRUNE_TYPES = ("Conv2d", "Linear")  # pruned by themselves; others only follow the layer before them
SELECTIVE_PRUNE_TYPES = ("Conv2d", "Linear", "ConvTranspose2d")

# -- rules for blocks of a .cfg, of a JSON config and of a QuantConfig -------------------------------------------------

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
