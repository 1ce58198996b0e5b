"""Post-training quantization of Caffe models: the full config of a model, from a ``.cfg`` or from a few arguments.

The JSON has the guide's keys in the guide's order; layers stand in the order of the model. Reading such a JSON back and
turning it into a plan is in ``caffe_json``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from amct.config.checks import check_settings
from amct.config.full_config import FullConfig, LayerBlock
from amct.config.layers import LayerInfo, LayerList
from amct.config.precedence import DEFAULT, Blocks, Choice, Level, Origin
from amct.config.problems import ProblemList
from amct.config.ptq.caffe_types import (
    CAFFE_TYPES,
    FUSIBLE_TYPES,
    illegal_activation_bits,
    illegal_weight_bits,
    is_per_tensor,
    unsupported_weight,
)
from amct.config.registry import CAFFE_WEIGHT, activation_algorithms, extra_fields
from amct.config.settings import BatchNormUpdate
from amct.config.text.algorithm_blocks import AlgorithmBlock, check_block, read_algorithm
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
    from amct.schema import TextMessage

GLOBAL_KEYS = (
    "version", "batch_num", "activation_offset", "joint_quant", "do_fusion", "skip_fusion_layers", "update_bn",
    "bn_update_config", "weight_rounding", "weight_scale",
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
    root = descriptor("AMCTCaffeProto.AMCTConfig", schema="caffe_config", extra=extra_fields("caffe"))
    message = parse_text(text, root, source)
    simple = _with_update(read_simple_config(message, source, problems), message, problems)
    return expand(simple, LayerList(layers), problems)


def default_config(layers: Iterable[LayerInfo], *, batch_num: int = 1, activation_offset: bool = True) -> FullConfig:
    """The full config of a model without a simple config.

    Raises:
        ConfigError: The model has no layer that can be quantized, or ``batch_num`` is below 1.
    """
    argument = Origin(Level.ARGUMENT)
    simple = SimpleConfig(
        source="create_quant_config",
        batch_num=batch_num,
        activation_offset=activation_offset,
        origins={"batch_num": argument, "activation_offset": argument},
    )
    return expand(simple, LayerList(layers), ProblemList())


def _with_update(simple: SimpleConfig, message: TextMessage, problems: ProblemList) -> SimpleConfig:
    """Add the global fields of refreshing BatchNorm statistics, which are written only when the file has them."""
    if not message.has("update_bn") and not message.has("bn_update_config"):
        return simple
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    if message.has("update_bn"):
        origins["update_bn"] = Origin(Level.GLOBAL, message.where("update_bn"))
    block: TextMessage | None = message.get("bn_update_config")
    if block is not None:
        values = {item.name: block.get(item.name) for item in fields(BatchNormUpdate) if block.has(item.name)}
        for name in values:
            origins[f"bn_update_config.{name}"] = Origin(Level.GLOBAL, block.where(name))
        check_settings(
            BatchNormUpdate, values, lambda path: block.where(str(path[0])), problems, block="bn_update_config"
        )
        if not message.get("update_bn", False):
            where = message.where("bn_update_config")
            problems.warn("bn_update_config has no effect while update_bn is not true", where)
    settings = {item.name: values.get(item.name, item.default) for item in fields(BatchNormUpdate)}
    extra = {"update_bn": message.get("update_bn", False), "bn_update_config": settings}
    return replace(simple, extra=extra, origins={**simple.origins, **origins})


@dataclass(frozen=True, kw_only=True)
class _Block:
    """One ``CalibrationConfig``: what it sets of activations and weights."""

    activation: AlgorithmBlock
    weight: AlgorithmBlock


def _read_block(choice: Choice) -> _Block:
    return _Block(
        activation=read_algorithm(choice, "acts_quant_algo", activation_algorithms("caffe")),
        weight=read_algorithm(choice, "wts_quant_algo", CAFFE_WEIGHT),
    )


def _check_blocks(blocks: Blocks, layers: LayerList, problems: ProblemList) -> None:
    """Report what is wrong with a block by itself, and with an override for the layer or type it is for."""
    for choice in blocks.all():
        block = _read_block(choice)
        check_block(block.activation, "act_algo", problems)
        check_block(block.weight, "wts_algo", problems)
        for key, message in illegal_activation_bits(block.activation.given):
            problems.add(message, block.activation.positions[key])
        for key, message in illegal_weight_bits(block.weight.given, block.weight.algorithm.name):
            problems.add(message, block.weight.positions[key])
    for layer_type, choice in blocks.by_type.items():
        if layer_type in CAFFE_TYPES:
            average = any(layer.average_pooling for layer in layers if layer.type == layer_type)
            layer = LayerInfo(name="", type=layer_type, average_pooling=average)
            _check_override(choice, f"type {layer_type}", layer, problems)
    for name, choice in blocks.by_layer.items():
        found = layers.find(name)
        if found is not None and found.type in CAFFE_TYPES:
            _check_override(choice, f'layer "{name}"', found, problems)


def _check_override(choice: Choice, who: str, layer: LayerInfo, problems: ProblemList) -> None:
    block = _read_block(choice).weight
    for key, message in unsupported_weight(who, layer, block.given, block.algorithm.name):
        problems.add(message, block.positions.get(key, block.position))
    capability = CAFFE_TYPES[layer.type]
    if block.position is not None and not capability.weights and not layer.average_pooling:
        message = f"{who}: {block.algorithm.name} has no effect, {layer.type} has no weights to quantize"
        problems.warn(message, block.position)
    if not capability.on_by_default:
        message = (
            f"{who}: {layer.type} is not quantized by default, so the override acts only after quant_enable is set to"
            " true in the JSON config"
        )
        problems.warn(message, choice.origin.position)


def expand(simple: SimpleConfig, layers: LayerList, problems: ProblemList) -> FullConfig:
    """The full config of a model from a simple config or what stands for one.

    Raises:
        ConfigError: It does not fit the model or asks for what cannot be done; all mistakes are listed.
    """
    check_simple_config(simple, layers, tuple(CAFFE_TYPES), FUSIBLE_TYPES, problems)
    _check_blocks(simple.blocks, layers, problems)
    quantizable = quantizable_layers(layers, CAFFE_TYPES)
    for layer in quantizable:
        if layer.name in GLOBAL_KEYS:
            problems.add(f'the layer "{layer.name}" has the name of a global field of the config. Rename the layer.')
    problems.raise_all()
    adjustments = Adjustments()
    expander = _LayerExpander(simple, adjustments)
    expanded = tuple(expander.expand(layer) for layer in quantizable)
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

    def expand(self, layer: LayerInfo) -> LayerBlock:
        choice = self.simple.blocks.choose(layer)
        block = _read_block(choice)
        enabled, why = self.enabled(layer)
        origins = {"": choice.origin, "quant_enable": why}
        activation, implied = self.activation(layer, block.activation, origins)
        data: dict[str, Any] = {"quant_enable": enabled, "activation_quant_params": activation}
        weight = self.weight(layer, block.weight, origins)
        if weight is not None:
            data["weight_quant_params"] = weight
        return LayerBlock(name=layer.name, type=layer.type, data=data, origins=origins, implied=implied)

    def enabled(self, layer: LayerInfo) -> tuple[bool, Origin]:
        skipped = self.simple.skipped(layer)
        if skipped is not None:
            return False, skipped
        if not CAFFE_TYPES[layer.type].on_by_default:
            return False, Origin(Level.RULE)
        return True, DEFAULT

    def note(self, layer: LayerInfo, what: str, position: Position | None) -> None:
        """Note an adjustment, unless the layer is switched off."""
        if self.enabled(layer)[0]:
            self.adjustments.note(layer.name, what, position)

    def activation(
        self, layer: LayerInfo, block: AlgorithmBlock, origins: dict[str, Origin]
    ) -> tuple[dict[str, Any] | list[dict[str, Any]], dict[str, Any]]:
        """The block as it is written, one object or one per input, and what holds without being written."""
        implied: dict[str, Any] = {}
        offset = self.simple.origins.get("activation_offset", DEFAULT)
        for prefix in activation_prefixes(layer.inputs):
            origins.update(block.origins(prefix, "act_algo"))
            if "with_offset" not in block.given:
                origins[f"{prefix}.with_offset"] = offset
                implied[f"{prefix}.with_offset"] = self.simple.activation_offset
        written = [block.to_json("act_algo") for _ in range(layer.inputs)]
        return (written if layer.inputs > 1 else written[0]), implied

    def weight(self, layer: LayerInfo, block: AlgorithmBlock, origins: dict[str, Origin]) -> dict[str, Any] | None:
        capability = CAFFE_TYPES[layer.type]
        channel_wise = block.given.get("channel_wise", capability.channel_wise)
        asked_at = block.positions.get("channel_wise")
        if adjusted := channel_wise and is_per_tensor(layer):
            channel_wise = False
            self.note(layer, "channel_wise does not apply to these layers, they are quantized per tensor", asked_at)
        if not capability.weights:
            return None
        if block.algorithm.name == "snq_quantize" and not capability.snq:
            self.note(layer, "snq_quantize does not apply to these layers, arq_quantize is used", block.position)
            block = AlgorithmBlock(algorithm=CAFFE_WEIGHT[0], given={}, positions={}, origin=block.origin)
        origins.update(block.origins("weight_quant_params", "wts_algo"))
        if adjusted:
            origins["weight_quant_params.channel_wise"] = Origin(Level.RULE, asked_at)
        return block.to_json("wts_algo", channel_wise=channel_wise)


def activation_prefixes(inputs: int) -> list[str]:
    """The dotted keys of the activation blocks of a layer, one for each input."""
    if inputs == 1:
        return ["activation_quant_params"]
    return [f"activation_quant_params[{index}]" for index in range(inputs)]
