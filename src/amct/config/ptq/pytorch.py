"""Post-training quantization of PyTorch models: the full config of a model, from a ``.cfg`` or from a few arguments.

The JSON has AMCT's keys in AMCT's order: global fields, then the layers sorted by name. Reading such a JSON back and
turning it into a plan is in ``pytorch_json``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from amct.config.full_config import FullConfig, LayerBlock
from amct.config.layers import LayerInfo, LayerList
from amct.config.precedence import DEFAULT, Blocks, Choice, Level, Origin
from amct.config.problems import ProblemList
from amct.config.ptq.pytorch_types import (
    FUSIBLE_TYPES,
    MIGRATION_RANGE,
    PTQ_TYPES,
    Asked,
    can_int16,
    illegal_bits,
    unsupported,
)
from amct.config.registry import PYTORCH_WEIGHT, activation_algorithms, extra_fields
from amct.config.text.algorithm_blocks import AlgorithmBlock, check_block, read_algorithm
from amct.config.text.names import Named, without_repeats
from amct.config.text.simple_config import (
    Adjustments,
    SimpleConfig,
    check_simple_config,
    quantizable_layers,
    read_simple_config,
    warn_of_refused,
)
from amct.schema import descriptor, parse_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amct.errors import Position

GLOBAL_KEYS = (
    "version", "batch_num", "activation_offset", "do_fusion", "fakequant_precision_mode", "skip_fusion_layers",
    "weight_rounding", "weight_scale",
)  # fmt: skip


def expand_config(text: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
    """Expand a simple config for a model.

    Args:
        text: The content of the ``.cfg``.
        source: Its file name, for positions.
        layers: The layers of the model, quantizable or not, in model order.

    Raises:
        ParseError: The text is not a simple config of post-training quantization.
        ConfigError: It does not fit the model or asks for what cannot be done; all mistakes are listed.
    """
    problems = ProblemList()
    root = descriptor("AMCTPytorchProto.AMCTConfig", schema="pytorch", extra=extra_fields("pytorch"))
    message = parse_text(text, root, source)
    simple = read_simple_config(message, source, problems)
    mode = "fakequant_precision_mode"
    if message.has(mode):
        origin = Origin(Level.GLOBAL, message.where(mode))
        simple = replace(simple, extra={mode: message.get(mode)}, origins={**simple.origins, mode: origin})
    return expand(simple, LayerList(layers), problems)


def default_config(
    layers: Iterable[LayerInfo],
    *,
    batch_num: int = 1,
    activation_offset: bool = True,
    skip_layers: Iterable[str] = (),
) -> FullConfig:
    """The full config of a model without a simple config.

    Raises:
        ConfigError: A layer to skip is unknown, repeated or cannot be quantized, nothing is left to quantize, or
            ``batch_num`` is below 1.
    """
    problems = ProblemList()
    skipped = without_repeats([Named(name) for name in skip_layers], "skip_layers", problems)
    argument = Origin(Level.ARGUMENT)
    simple = SimpleConfig(
        source="create_quant_config",
        batch_num=batch_num,
        activation_offset=activation_offset,
        skip_layers=skipped,
        origins={"batch_num": argument, "activation_offset": argument},
    )
    return expand(simple, LayerList(layers), problems)


@dataclass(frozen=True, kw_only=True)
class _Block:
    """One ``CalibrationConfig``: what it sets of activations, weights and balancing."""

    activation: AlgorithmBlock
    weight: AlgorithmBlock
    strength: float | None
    strength_position: Position | None

    def position(self, key: str) -> Position | None:
        """Where the value behind a dotted key of the JSON stands, or the nearest thing to it."""
        part, _, name = key.partition(".")
        if part == "dmq_balancer_param":
            return self.strength_position
        block = self.weight if part == "weight_quant_params" else self.activation
        return block.positions.get(name, block.position)


def _read_block(choice: Choice) -> _Block:
    strength, position, block = None, None, choice.block
    if choice.entry is not None:
        strength, position = choice.entry.migration_strength, choice.origin.position
    elif block is not None and block.has("dmq_balancer"):
        balancer = block.get("dmq_balancer")
        strength = balancer.get("migration_strength", 0.5)
        position = balancer.where("migration_strength")
    return _Block(
        activation=read_algorithm(choice, "acts_quant_algo", activation_algorithms("pytorch")),
        weight=read_algorithm(choice, "wts_quant_algo", PYTORCH_WEIGHT),
        strength=strength,
        strength_position=position,
    )


def _check_blocks(blocks: Blocks, layers: LayerList, problems: ProblemList) -> None:
    """Report what is wrong with a block by itself, and with an override for the layer or type it is for."""
    for choice in blocks.all():
        _check_values(_read_block(choice), problems)
    for layer_type, choice in blocks.by_type.items():
        if layer_type in PTQ_TYPES:
            _check_override(choice, LayerInfo(name="", type=layer_type), problems)
    for name, choice in blocks.by_layer.items():
        layer = layers.find(name)
        if layer is not None and layer.type in PTQ_TYPES:
            _check_override(choice, layer, problems)


def _check_values(block: _Block, problems: ProblemList) -> None:
    check_block(block.activation, "act_algo", problems)
    check_block(block.weight, "wts_algo", problems)
    for key, message in illegal_bits(block.activation.given, block.weight.given, block.weight.algorithm.name):
        problems.add(message, block.position(key))
    low, high = MIGRATION_RANGE
    if block.strength is not None and not low <= block.strength <= high:
        problems.add(
            f"migration_strength must be at least {low} and at most {high}, got {block.strength}",
            block.strength_position,
        )


def _check_override(choice: Choice, layer: LayerInfo, problems: ProblemList) -> None:
    block = _read_block(choice)
    by_type = choice.origin.level is Level.TYPE
    asked = Asked(
        who=f"type {layer.type}" if by_type else f'layer "{layer.name}"',
        type=layer.type,
        activation=block.activation.given,
        weight=block.weight.given,
        weight_algorithm=block.weight.algorithm.name,
        balanced=block.strength is not None,
        has_bias=layer.has_bias,
        by_type=by_type,
    )
    for key, message in unsupported(asked):
        problems.add(message, block.position(key))


def expand(simple: SimpleConfig, layers: LayerList, problems: ProblemList) -> FullConfig:
    """The full config of a model from a simple config or what stands for one.

    Raises:
        ConfigError: It does not fit the model or asks for what cannot be done; all mistakes are listed.
    """
    check_simple_config(simple, layers, tuple(PTQ_TYPES), FUSIBLE_TYPES, problems)
    _check_blocks(simple.blocks, layers, problems)
    quantizable = quantizable_layers(layers, PTQ_TYPES)
    for layer in quantizable:
        if layer.name in GLOBAL_KEYS:
            problems.add(f'the layer "{layer.name}" has the name of a global field of the config. Rename the module.')
    problems.raise_all()
    adjustments = Adjustments()
    expander = _LayerExpander(simple, adjustments)
    expanded = tuple(expander.expand(layer) for layer in sorted(quantizable, key=lambda layer: layer.name))
    adjustments.report(problems)
    warn_of_refused(simple, layers, problems)
    return FullConfig(
        source=simple.source,
        fields=simple.fields(GLOBAL_KEYS),
        layers=expanded,
        origins=simple.origins,
        warnings=problems.warnings,
    )


class _LayerExpander:
    """Fills in the JSON block of one layer after the other."""

    def __init__(self, simple: SimpleConfig, adjustments: Adjustments) -> None:
        self.simple = simple
        self.adjustments = adjustments
        self.common = _read_block(simple.blocks.common)

    def expand(self, layer: LayerInfo) -> LayerBlock:
        skipped = self.simple.skipped(layer)
        choice = self.simple.blocks.choose(layer)
        block = _read_block(choice)
        origins = {"": choice.origin, "quant_enable": skipped or DEFAULT}
        data: dict[str, Any] = {"quant_enable": skipped is None}
        implied: dict[str, Any] = {}
        if (strength := self.strength(layer, block)) is not None:
            data["dmq_balancer_param"] = strength
            origins["dmq_balancer_param"] = Origin(choice.origin.level, block.strength_position)
        data["activation_quant_params"] = self.activation(layer, block.activation, origins)
        weight = self.weight(layer, block.weight, origins)
        if weight is not None:
            data["weight_quant_params"] = weight
        elif PTQ_TYPES[layer.type].weights:
            implied = default_weight(layer.type)
        return LayerBlock(name=layer.name, type=layer.type, data=data, origins=origins, implied=implied)

    def note(self, layer: LayerInfo, what: str, position: Position | None) -> None:
        """Note an adjustment, unless the layer is switched off."""
        if self.simple.skipped(layer) is None:
            self.adjustments.note(layer.name, what, position)

    def strength(self, layer: LayerInfo, block: _Block) -> float | None:
        if block.strength is not None and not PTQ_TYPES[layer.type].dmq:
            self.note(layer, "dmq_balancer does not apply to these layers", block.strength_position)
            return None
        return block.strength

    def activation(self, layer: LayerInfo, block: AlgorithmBlock, origins: dict[str, Origin]) -> dict[str, Any]:
        bits, origin = block.value("num_bits"), block.origin_of("num_bits")
        if bits == 16 and not can_int16(layer.type, has_bias=layer.has_bias):
            bits, origin = 8, Origin(Level.RULE, origin.position)
            self.note(layer, "INT16 is not possible, 8 bits are used for these layers", origin.position)
        asymmetric, asymmetric_origin = self.asymmetric(layer, block)
        origins.update(block.origins("activation_quant_params", "act_algo"))
        origins["activation_quant_params.num_bits"] = origin
        origins["activation_quant_params.asymmetric"] = asymmetric_origin
        return block.to_json("act_algo", num_bits=bits, asymmetric=asymmetric)

    def asymmetric(self, layer: LayerInfo, block: AlgorithmBlock) -> tuple[bool, Origin]:
        """Layer or type first, then the common block if it has the same algorithm, then ``activation_offset``."""
        if not PTQ_TYPES[layer.type].asymmetric:
            return False, Origin(Level.RULE)
        common = self.common.activation
        for candidate in (block, common):
            if candidate.algorithm is block.algorithm and "asymmetric" in candidate.given:
                return candidate.given["asymmetric"], candidate.origin_of("asymmetric")
        return self.simple.activation_offset, self.simple.origins.get("activation_offset", DEFAULT)

    def weight(self, layer: LayerInfo, block: AlgorithmBlock, origins: dict[str, Origin]) -> dict[str, Any] | None:
        capability = PTQ_TYPES[layer.type]
        if block.algorithm.name == "ada_quantize" and not capability.ada:
            return None  # from the common block: the layer falls back to ARQ
        origins.update(block.origins("weight_quant_params", "wts_algo"))
        channel_wise = block.given.get("channel_wise", capability.channel_wise)
        if channel_wise and not capability.channel_wise:
            channel_wise = False
            origins["weight_quant_params.channel_wise"] = Origin(Level.RULE, block.positions["channel_wise"])
            what = "channel_wise does not apply to these layers, they are quantized per tensor"
            self.note(layer, what, block.positions["channel_wise"])
        bits = self.weight_bits(layer, block)
        if bits != block.value("num_bits"):
            origins["weight_quant_params.num_bits"] = Origin(Level.RULE, block.positions["num_bits"])
        return block.to_json("wts_algo", num_bits=bits, channel_wise=channel_wise)

    def weight_bits(self, layer: LayerInfo, block: AlgorithmBlock) -> int:
        bits: int = block.value("num_bits")
        capability = PTQ_TYPES[layer.type]
        if bits in (6, 7) and not capability.odd_bits and block.algorithm.name != "ada_quantize":
            return 8  # the documents promise this silently
        if bits == 4 and not (capability.weights and layer.can_pack_int4):
            if capability.weights:
                self.note(layer, f"{UNPACKABLE}, 8 bits are used for these layers", block.positions["num_bits"])
            return 8
        return bits


UNPACKABLE = "4-bit weights need one group and an even number of input channels"


def default_weight(layer_type: str) -> dict[str, Any]:
    """The weight settings of a layer whose block names none, by their dotted keys."""
    channel_wise = PTQ_TYPES[layer_type].channel_wise
    return {
        "weight_quant_params.num_bits": 8,
        "weight_quant_params.channel_wise": channel_wise,
        "weight_quant_params.wts_algo": "arq_quantize",
    }
