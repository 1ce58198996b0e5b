"""Post-training quantization of PyTorch models: read the JSON config back, and turn a full config into a plan."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from amct.config.checks import show
from amct.config.full_config import FullConfig, LayerBlock
from amct.config.json.blocks import (
    check_members,
    check_skip_fusion,
    find_layer,
    is_object,
    known_members,
    read_algorithm_block,
    read_bool,
    read_json_object,
)
from amct.config.layers import LayerInfo, LayerList
from amct.config.plan import FORCE_FP16, LayerPlan, Plan, reasons_not_quantized, settings_of
from amct.config.precedence import DEFAULT, Level, Origin
from amct.config.problems import ProblemList
from amct.config.ptq.pytorch import GLOBAL_KEYS, UNPACKABLE, default_weight
from amct.config.ptq.pytorch_types import FUSIBLE_TYPES, MIGRATION_RANGE, PTQ_TYPES, Asked, illegal_bits, unsupported
from amct.config.registry import PYTORCH_WEIGHT, activation_algorithms
from amct.config.settings import CheckedSettings, Version, WeightRounding, WeightScale
from amct.config.text.simple_config import quantizable_layers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from amct.config.json.reader import JsonNode
    from amct.config.settings import WeightSettings
    from amct.config.text.algorithm_blocks import AlgorithmBlock

LAYER_KEYS = ("quant_enable", "dmq_balancer_param", "activation_quant_params", "weight_quant_params")


@dataclass(frozen=True, kw_only=True)
class _Globals(CheckedSettings):
    version: Version = 1
    batch_num: Annotated[int, Field(strict=True, ge=1)] = 1
    activation_offset: StrictBool = True
    do_fusion: StrictBool = True
    fakequant_precision_mode: Literal["DEFAULT", "FORCE_FP16_QUANT"] = "DEFAULT"
    skip_fusion_layers: tuple[StrictStr, ...] = ()
    weight_rounding: WeightRounding = "nearest"
    weight_scale: WeightScale = "negative_side"


def read_config(data: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
    """Read a JSON config, written by a tool or edited by hand, and check it against a model.

    What the file leaves out takes its default; a layer it does not name is not quantized.

    Args:
        data: The content of the file.
        source: Its name, for positions.
        layers: The layers of the model, quantizable or not, in model order.

    Raises:
        ParseError: The file is not JSON.
        ConfigTypeError: A value has the wrong type; all mistakes are listed.
        ConfigError: Any other mistake; all are listed.
    """
    problems = ProblemList()
    root = read_json_object(data, source, problems)
    model = LayerList(layers)
    global_nodes = {key: node for key, node in root.value.items() if key in GLOBAL_KEYS}
    fields = check_members(_Globals, global_nodes, problems) or _Globals()
    check_skip_fusion(global_nodes.get("skip_fusion_layers"), model, FUSIBLE_TYPES, problems)
    reader = _LayerReader(fields, problems)
    expanded = []
    for name, node in root.value.items():
        layer = None if name in GLOBAL_KEYS else find_layer(name, node, model, PTQ_TYPES, GLOBAL_KEYS, problems)
        if layer is not None:
            expanded.append(reader.read(layer, node))
    problems.raise_all()
    return FullConfig(
        source=source,
        fields=_written(fields, global_nodes),
        layers=tuple(sorted(expanded, key=lambda layer: layer.name)),
        origins={key: Origin(Level.FILE, node.key_position) for key, node in global_nodes.items()},
        warnings=problems.warnings,
    )


def _written(fields: _Globals, given: Collection[str]) -> dict[str, Any]:
    """The global fields as they are written: the precision mode only when it is not the default."""
    optional = ("weight_rounding", "weight_scale")
    values: dict[str, Any] = {key: getattr(fields, key) for key in GLOBAL_KEYS if key in given or key not in optional}
    values["skip_fusion_layers"] = list(fields.skip_fusion_layers)
    if fields.fakequant_precision_mode == "DEFAULT":
        del values["fakequant_precision_mode"]
    return values


class _LayerReader:
    """Reads and checks the JSON block of one layer after the other."""

    def __init__(self, fields: _Globals, problems: ProblemList) -> None:
        self.fields = fields
        self.problems = problems

    def read(self, layer: LayerInfo, node: JsonNode) -> LayerBlock:
        problems, name = self.problems, layer.name
        origins = {"": Origin(Level.FILE, node.key_position)}
        data: dict[str, Any] = {}
        members: Mapping[str, JsonNode] = {}
        if is_object(node, name, problems):
            members = known_members(node, LAYER_KEYS, name, problems)
        origins |= {key: Origin(Level.FILE, member.key_position) for key, member in members.items()}
        data["quant_enable"] = read_bool(members, "quant_enable", True, name, problems)
        if "dmq_balancer_param" in members:
            data["dmq_balancer_param"] = self.strength(name, members["dmq_balancer_param"])
        activation = self.block(members, "activation_quant_params", layer)
        weight = self.block(members, "weight_quant_params", layer)
        self.check_abilities(layer, members, activation, weight)
        data["activation_quant_params"] = self.activation_json(layer, activation, origins)
        if weight is not None:
            origins |= weight.origins("weight_quant_params", "wts_algo")
            channel_wise = weight.given.get("channel_wise", PTQ_TYPES[layer.type].channel_wise)
            data["weight_quant_params"] = weight.to_json("wts_algo", channel_wise=channel_wise)
        implied = default_weight(layer.type) if weight is None and PTQ_TYPES[layer.type].weights else {}
        return LayerBlock(name=name, type=layer.type, data=data, origins=origins, implied=implied)

    def strength(self, name: str, node: JsonNode) -> float | None:
        value, (low, high) = node.value, MIGRATION_RANGE
        if not isinstance(value, float):
            self.problems.add_wrong_type(
                f"{name}.dmq_balancer_param must be a number with a decimal point, got {show(node.plain())}",
                node.position,
            )
            return None
        if not low <= value <= high:
            self.problems.add(
                f"{name}.dmq_balancer_param must be at least {low} and at most {high}, got {value}", node.position
            )
        return value

    def block(self, members: Mapping[str, JsonNode], key: str, layer: LayerInfo) -> AlgorithmBlock | None:
        if key not in members:
            return None
        weights = key == "weight_quant_params"
        return read_algorithm_block(
            members[key],
            PYTORCH_WEIGHT if weights else activation_algorithms("pytorch"),
            "wts_algo" if weights else "act_algo",
            f"{layer.name}.{key}",
            self.problems,
        )

    def check_abilities(
        self,
        layer: LayerInfo,
        members: Mapping[str, JsonNode],
        activation: AlgorithmBlock | None,
        weight: AlgorithmBlock | None,
    ) -> None:
        blocks = {"activation_quant_params": activation, "weight_quant_params": weight}
        asked = Asked(
            who=f'layer "{layer.name}"',
            type=layer.type,
            activation=activation.given if activation else {},
            weight=weight.given if weight else {},
            weight_algorithm=weight.algorithm.name if weight else None,
            balanced="dmq_balancer_param" in members,
            has_bias=layer.has_bias,
        )
        illegal = illegal_bits(asked.activation, asked.weight, asked.weight_algorithm)
        for key, message in (*((key, f"{asked.who}: {message}") for key, message in illegal), *unsupported(asked)):
            part, _, name = key.partition(".")
            block = blocks.get(part)
            position = block.positions.get(name) if block else None
            self.problems.add(message, position or members[part].key_position)

    def activation_json(
        self, layer: LayerInfo, block: AlgorithmBlock | None, origins: dict[str, Origin]
    ) -> dict[str, Any]:
        possible = PTQ_TYPES[layer.type].asymmetric
        asymmetric = self.fields.activation_offset and possible
        if block is None:
            algorithm = activation_algorithms("pytorch")[0]
            defaults = {key: algorithm.default_of(key) for key in algorithm.setting_keys("act_algo")}
            values = {**defaults, "act_algo": algorithm.name, "asymmetric": asymmetric}
            return {key: values[key] for key in algorithm.keys}
        origins |= block.origins("activation_quant_params", "act_algo")
        if "asymmetric" not in block.given:
            origins["activation_quant_params.asymmetric"] = DEFAULT if possible else Origin(Level.RULE)
        return block.to_json("act_algo", asymmetric=block.given.get("asymmetric", asymmetric))


def make_plan(config: FullConfig, layers: Iterable[LayerInfo]) -> Plan:
    """Turn a full config, expanded or read, into the plan for the model it was checked against."""
    model, problems = LayerList(layers), ProblemList()
    blocks = {layer.name: layer for layer in config.layers}
    skip_fusion = frozenset(config.fields["skip_fusion_layers"])
    plans: list[LayerPlan] = []
    for layer in quantizable_layers(model, PTQ_TYPES):
        if layer.name not in blocks:
            continue
        data = blocks[layer.name].data
        activation = settings_of(data["activation_quant_params"], activation_algorithms("pytorch"), "act_algo")
        plans.append(
            LayerPlan(
                name=layer.name,
                type=layer.type,
                enabled=data["quant_enable"],
                activations=(activation,) * layer.inputs,
                weight=_weight(layer, blocks[layer.name], problems),
                migration_strength=data.get("dmq_balancer_param"),
                force_fp16=config.fields.get("fakequant_precision_mode") == FORCE_FP16,
                skip_fusion=layer.name in skip_fusion,
                batch_num=config.fields["batch_num"],
                weight_rounding=config.fields.get("weight_rounding", _Globals.weight_rounding),
                weight_scale=config.fields.get("weight_scale", _Globals.weight_scale),
            )
        )
    return Plan(
        source=config.source,
        batch_num=config.fields["batch_num"],
        activation_offset=config.fields["activation_offset"],
        do_fusion=config.fields["do_fusion"],
        skip_fusion_layers=tuple(config.fields["skip_fusion_layers"]),
        force_fp16=config.fields.get("fakequant_precision_mode") == FORCE_FP16,
        layers=tuple(plans),
        not_quantized=MappingProxyType(reasons_not_quantized(model, PTQ_TYPES, blocks)),
        warnings=(*config.warnings, *problems.warnings),
    )


def _weight(layer: LayerInfo, block: LayerBlock, problems: ProblemList) -> WeightSettings | None:
    if not PTQ_TYPES[layer.type].weights:
        return None
    data = block.data.get("weight_quant_params")
    if data is None:
        data = {key.partition(".")[2]: value for key, value in default_weight(layer.type).items()}
    if data["num_bits"] == 4 and not layer.can_pack_int4:
        position = block.origin("weight_quant_params.num_bits").position
        problems.warn(f'{UNPACKABLE}: 8 bits are used for "{layer.name}"', position)
        data = {**data, "num_bits": 8}
    settings: WeightSettings = settings_of(data, PYTORCH_WEIGHT, "wts_algo")
    return settings
