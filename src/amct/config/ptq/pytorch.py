"""The configs of post-training quantization of PyTorch models.

The JSON has AMCT's keys in AMCT's order: global fields, then the layers sorted by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from amct.config.dialect import MODE_KEY
from amct.config.layers import ACTIVATION_BITS, ADA_BITS, ARQ_BITS, MIGRATION_RANGE, PTQ_TYPES, can_int16
from amct.config.ptq.dialect import BALANCE_KEY, DATA_KEY, ROUNDING_KEYS, UNPACKABLE, WEIGHT_KEY, PtqDialect
from amct.config.registry import PYTORCH_WEIGHT
from amct.config.simple_config import LayerConfig, Level, Origin
from amct.numerics.settings import AtLeastOne, CheckedSettings, Names, Switch, Version, WeightRounding, WeightScale

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from amct.config.blocks import AlgorithmBlock
    from amct.config.dialect import QuantBlock
    from amct.config.layers import LayerInfo
    from amct.config.ptq.dialect import Note, Offset
    from amct.config.simple_config import Choice, LayerBlock, SimpleConfig


@dataclass(frozen=True, kw_only=True)
class _PytorchGlobals(CheckedSettings):
    version: Version = 1
    batch_num: AtLeastOne = 1
    activation_offset: Switch = True
    do_fusion: Switch = True
    fakequant_precision_mode: Literal["DEFAULT", "FORCE_FP16_QUANT"] = "DEFAULT"
    skip_fusion_layers: Names = ()
    weight_rounding: WeightRounding = "nearest"
    weight_scale: WeightScale = "negative_side"
    bias_correction: Switch = False


class PyTorchPtq(PtqDialect):
    """The layer types of torch.nn, with AdaRound, DMQ and activations of 4, 8 or 16 bits."""

    name = "pytorch"
    message = "AMCTPytorchProto.AMCTConfig"
    schema = "pytorch"
    types = PTQ_TYPES
    weight = PYTORCH_WEIGHT
    globals = _PytorchGlobals
    optional_globals = frozenset({MODE_KEY, *ROUNDING_KEYS})
    part_name = "module"
    more_layer_keys = (BALANCE_KEY,)
    activation_bits = ACTIVATION_BITS
    balances = True
    sorted_by_name = True
    float_fusible = ("ConvTranspose3d",)
    weight_rounding = "nearest"
    weight_scale = "negative_side"

    def read_choice(self, choice: Choice) -> QuantBlock:
        """The algorithms of a block and its strength of balancing."""
        strength, position, block = None, None, choice.block
        if isinstance(choice.entry, LayerConfig) and choice.entry.migration_strength is not None:
            strength, position = choice.entry.migration_strength, choice.origin.position
        elif block is not None and block.has("dmq_balancer"):
            balancer = block.get("dmq_balancer")
            strength = balancer.get("migration_strength", 0.5)
            position = balancer.where("migration_strength")
        return replace(super().read_choice(choice), strength=strength, strength_position=position)

    def illegal(self, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """Bit widths and strengths that no layer can have."""
        if (bits := block.activation.given.get("num_bits", 8)) not in ACTIVATION_BITS:
            yield f"{DATA_KEY}.num_bits", f"activations can have {_bits(ACTIVATION_BITS)} bits, got {bits}"
        allowed = ADA_BITS if _is_ada(block.weight) else ARQ_BITS
        if (bits := block.weight.given.get("num_bits", 8)) not in allowed:
            yield f"{WEIGHT_KEY}.num_bits", f"weights can have {_bits(allowed)} bits, got {bits}"
        low, high = MIGRATION_RANGE
        if block.strength is not None and not low <= block.strength <= high:
            yield BALANCE_KEY, f"migration_strength must be at least {low} and at most {high}, got {block.strength}"

    def unsupported(self, layer: LayerInfo, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """Algorithms, bit widths and offsets that this layer or type cannot have."""
        capability, weight = self.types[layer.type], block.weight.given
        if _is_ada(block.weight) and not capability.ada:
            yield WEIGHT_KEY, f"ada_quantize is only for {_types('ada')}. Use arq_quantize."
        if weight.get("channel_wise") is True and not capability.channel_wise:
            yield (
                f"{WEIGHT_KEY}.channel_wise",
                f"channel_wise must be false, {layer.type} has one scale for all weights",
            )
        if weight.get("num_bits") in (6, 7) and not (capability.odd_bits or _is_ada(block.weight)):
            what = f"weights of 6 or 7 bits are only for {_types('odd_bits')}, not for {layer.type}"
            yield f"{WEIGHT_KEY}.num_bits", what
        yield from self._unsupported_activation(layer, block)

    def _unsupported_activation(self, layer: LayerInfo, block: QuantBlock) -> Iterator[tuple[str, str]]:
        capability, activation = self.types[layer.type], block.activation.given
        if activation.get("asymmetric") is True and not capability.asymmetric:
            yield f"{DATA_KEY}.asymmetric", f"asymmetric must be false, {layer.type} allows no offset"
        if activation.get("num_bits") == 16 and not can_int16(layer):
            reason = "without a bias" if capability.int16 else f"of type {layer.type}"
            yield f"{DATA_KEY}.num_bits", f"INT16 activations are not possible {reason}"
        if block.strength_position is not None and not (capability.dmq if layer.name else capability.dmq_by_type):
            yield BALANCE_KEY, f"dmq_balancer is not possible for {layer.type}"

    def has_weight_block(self, layer: LayerInfo) -> bool:  # noqa: ARG002  as in the base class
        """Every layer; that of average pooling is a form without effect."""
        return True

    def is_per_tensor(self, layer: LayerInfo) -> bool:
        """Whether a layer can only be quantized with one scale for all channels."""
        return not self.types[layer.type].channel_wise

    def fitted_bits(self, layer: LayerInfo, block: QuantBlock, note: Note) -> dict[str, Any]:
        """8 bits where 16-bit activations, 4-bit weights, or weights of 6 or 7 bits are not possible."""
        changed: dict[str, Any] = {}
        if block.activation.value("num_bits") == 16 and not can_int16(layer):
            changed[f"{DATA_KEY}.num_bits"] = 8
            what = "INT16 is not possible, 8 bits are used for these layers"
            note(what, block.activation.positions.get("num_bits"))
        bits, capability = block.weight.value("num_bits"), self.types[layer.type]
        odd = bits in (6, 7) and not (capability.odd_bits or _is_ada(block.weight))  # AMCT documents no warning
        unpackable = bits == 4 and not (capability.weights and layer.can_pack_int4)
        if odd or unpackable:
            changed[f"{WEIGHT_KEY}.num_bits"] = 8
        if unpackable and capability.weights:
            note(f"{UNPACKABLE}, 8 bits are used for these layers", block.weight.positions["num_bits"])
        return changed

    def fitted_weight(self, layer: LayerInfo, block: AlgorithmBlock, note: Note) -> AlgorithmBlock | None:  # noqa: ARG002  as in the base class
        """No block for a layer that AdaRound cannot tune: it is quantized with ARQ."""
        return block if self.types[layer.type].ada or not _is_ada(block) else None

    def offset(self, simple: SimpleConfig, block: AlgorithmBlock) -> Offset:
        """That of the common block if it has the same algorithm, else ``activation_offset``."""
        common = self.read_choice(simple.blocks.common).activation
        if common.algorithm is block.algorithm and "asymmetric" in common.given:
            return common.given["asymmetric"], common.origin_of("asymmetric")
        return super().offset(simple, block)

    def write_inputs(
        self, target: LayerBlock, inputs: Sequence[AlgorithmBlock], offset: Offset, changed: Mapping[str, Any]
    ) -> None:
        """One block for all inputs, with ``asymmetric`` always written."""
        block = inputs[0]
        if not self.types[target.type].asymmetric:
            offset = False, Origin(Level.RULE)
        elif "asymmetric" in block.given:
            offset = block.given["asymmetric"], block.origin_of("asymmetric")
        target.data[DATA_KEY] = block.write(DATA_KEY, "act_algo", target.origins, changed, asymmetric=offset[0])
        target.origins[f"{DATA_KEY}.asymmetric"] = offset[1]


def _is_ada(block: AlgorithmBlock) -> bool:
    return block.algorithm.name == "ada_quantize"


def _types(ability: str) -> str:
    return ", ".join(name for name, capability in PTQ_TYPES.items() if getattr(capability, ability))


def _bits(allowed: Iterable[int]) -> str:
    return ", ".join(map(str, allowed))


PYTORCH = PyTorchPtq()
