"""Post-training quantization of Caffe models: read the JSON config back, and turn a full config into a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, StrictBool, StrictStr

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
from amct.config.plan import LayerPlan, Plan, reasons_not_quantized, settings_of
from amct.config.precedence import Level, Origin
from amct.config.problems import ProblemList
from amct.config.ptq.caffe import GLOBAL_KEYS, activation_prefixes
from amct.config.ptq.caffe_types import (
    CAFFE_TYPES,
    FUSIBLE_TYPES,
    illegal_activation_bits,
    illegal_weight_bits,
    unsupported_weight,
)
from amct.config.registry import CAFFE_WEIGHT, activation_algorithms
from amct.config.settings import BatchNormUpdate, CheckedSettings, Version, WeightRounding, WeightScale
from amct.config.text.simple_config import quantizable_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from amct.config.json.reader import JsonNode
    from amct.config.settings import WeightSettings
    from amct.config.text.algorithm_blocks import AlgorithmBlock

LAYER_KEYS = ("quant_enable", "activation_quant_params", "weight_quant_params")


@dataclass(frozen=True, kw_only=True)
class _Globals(CheckedSettings):
    version: Version = 1
    batch_num: Annotated[int, Field(strict=True, ge=1)] = 1
    activation_offset: StrictBool = True
    joint_quant: StrictBool = False  # accepted and ignored, never written
    do_fusion: StrictBool = True
    skip_fusion_layers: tuple[StrictStr, ...] = ()
    update_bn: StrictBool = False
    weight_rounding: WeightRounding = "error_cancelling"
    weight_scale: WeightScale = "full_range"


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
    nodes = {key: node for key, node in root.value.items() if key in GLOBAL_KEYS}
    written, settings = _read_globals(nodes, model, problems)
    reader = _LayerReader(settings, problems)
    read = {}
    for name, node in root.value.items():
        layer = None if name in GLOBAL_KEYS else find_layer(name, node, model, CAFFE_TYPES, GLOBAL_KEYS, problems)
        if layer is not None:
            read[name] = reader.read(layer, node)
    problems.raise_all()
    return FullConfig(
        source=source,
        fields=written,
        layers=tuple(read[layer.name] for layer in model if layer.name in read),
        origins={key: Origin(Level.FILE, node.key_position) for key, node in nodes.items()},
        warnings=problems.warnings,
    )


def _read_globals(
    nodes: Mapping[str, JsonNode], model: LayerList, problems: ProblemList
) -> tuple[dict[str, Any], _Globals]:
    """The global fields as they are written, and as settings."""
    update_node = nodes.get("bn_update_config")
    plain = {key: node for key, node in nodes.items() if key != "bn_update_config"}
    settings = check_members(_Globals, plain, problems) or _Globals()
    update: BatchNormUpdate | None = BatchNormUpdate()
    if update_node is not None and is_object(update_node, "bn_update_config", problems):
        known = known_members(
            update_node, [item.name for item in fields(BatchNormUpdate)], "bn_update_config", problems
        )
        update = check_members(BatchNormUpdate, known, problems, block="bn_update_config")
    check_skip_fusion(nodes.get("skip_fusion_layers"), model, FUSIBLE_TYPES, problems)
    written: dict[str, Any] = {
        "version": settings.version,
        "batch_num": settings.batch_num,
        "activation_offset": settings.activation_offset,
        "do_fusion": settings.do_fusion,
        "skip_fusion_layers": list(settings.skip_fusion_layers),
    }
    if "update_bn" in nodes or update_node is not None:
        written["update_bn"] = settings.update_bn
        values = update or BatchNormUpdate()
        written["bn_update_config"] = {item.name: getattr(values, item.name) for item in fields(values)}
    written |= {key: getattr(settings, key) for key in ("weight_rounding", "weight_scale") if key in nodes}
    return written, settings


class _LayerReader:
    """Reads and checks the JSON block of one layer after the other."""

    def __init__(self, fields: _Globals, problems: ProblemList) -> None:
        self.fields = fields
        self.problems = problems

    def read(self, layer: LayerInfo, node: JsonNode) -> LayerBlock:
        problems, name = self.problems, layer.name
        origins = {"": Origin(Level.FILE, node.key_position)}
        members: Mapping[str, JsonNode] = {}
        if is_object(node, name, problems):
            members = known_members(node, LAYER_KEYS, name, problems)
        origins |= {key: Origin(Level.FILE, member.key_position) for key, member in members.items()}
        implied: dict[str, Any] = {}
        data: dict[str, Any] = {
            "quant_enable": read_bool(members, "quant_enable", True, name, problems),
            "activation_quant_params": self.activation(layer, members, origins, implied),
        }
        weight = self.weight(layer, members.get("weight_quant_params"))
        if weight is not None:
            origins |= weight.origins("weight_quant_params", "wts_algo")
            channel_wise = weight.given.get("channel_wise", CAFFE_TYPES[layer.type].channel_wise)
            data["weight_quant_params"] = weight.to_json("wts_algo", channel_wise=channel_wise)
        elif CAFFE_TYPES[layer.type].weights:
            implied |= {f"weight_quant_params.{key}": value for key, value in default_weight(layer.type).items()}
        return LayerBlock(name=name, type=layer.type, data=data, origins=origins, implied=implied)

    def activation(
        self,
        layer: LayerInfo,
        members: Mapping[str, JsonNode],
        origins: dict[str, Origin],
        implied: dict[str, Any],
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The activation blocks, one for each input: the object for one input, a list for several."""
        blocks = self.activation_blocks(layer, members.get("activation_quant_params"))
        written = []
        for prefix, block in zip(activation_prefixes(layer.inputs), blocks, strict=True):
            if block is None:
                algorithm = activation_algorithms("caffe")[0]
                written.append({key: algorithm.default_of(key) for key in algorithm.keys if key != "with_offset"})
            else:
                written.append(block.to_json("act_algo"))
                origins.update(block.origins(prefix, "act_algo"))
            if block is None or "with_offset" not in block.given:
                implied[f"{prefix}.with_offset"] = self.fields.activation_offset
        return written if layer.inputs > 1 else written[0]

    def activation_blocks(self, layer: LayerInfo, node: JsonNode | None) -> list[AlgorithmBlock | None]:
        what = f"{layer.name}.activation_quant_params"
        if node is None:
            return [None] * layer.inputs
        if not node.is_list:
            return [self.activation_block(node, what)] * layer.inputs
        if len(node.value) not in (1, layer.inputs):
            self.problems.add(
                f"{what} has {len(node.value)} entries, but the layer has {layer.inputs} inputs."
                " Give one entry for each, or one for all.",
                node.position,
            )
            return [None] * layer.inputs
        blocks = [self.activation_block(item, f"{what}[{index}]") for index, item in enumerate(node.value)]
        return blocks if len(blocks) == layer.inputs else blocks * layer.inputs

    def activation_block(self, node: JsonNode, what: str) -> AlgorithmBlock | None:
        block = read_algorithm_block(node, activation_algorithms("caffe"), "act_algo", what, self.problems)
        for key, message in illegal_activation_bits(block.given) if block else ():
            self.problems.add(f"{what}: {message}", node.value[key].position)
        return block

    def weight(self, layer: LayerInfo, node: JsonNode | None) -> AlgorithmBlock | None:
        what = f"{layer.name}.weight_quant_params"
        block = read_algorithm_block(node, CAFFE_WEIGHT, "wts_algo", what, self.problems) if node else None
        if node is None or block is None:
            return None
        algorithm = block.algorithm.name
        for key, message in illegal_weight_bits(block.given, algorithm):
            self.problems.add(f"{what}: {message}", block.positions[key])
        for key, message in unsupported_weight(f'layer "{layer.name}"', layer, block.given, algorithm):
            self.problems.add(message, block.positions.get(key, node.key_position))
        if CAFFE_TYPES[layer.type].weights:
            return block
        if not layer.average_pooling:
            self.problems.warn(f"{what} is ignored: {layer.type} has no weights to quantize", node.key_position)
        return None


def default_weight(layer_type: str) -> dict[str, Any]:
    """The weight block of a layer whose config names none."""
    return {"wts_algo": "arq_quantize", "channel_wise": CAFFE_TYPES[layer_type].channel_wise, "num_bits": 8}


def make_plan(config: FullConfig, layers: Iterable[LayerInfo]) -> Plan:
    """Turn a full config, expanded or read, into the plan for the model it was checked against."""
    model = LayerList(layers)
    blocks = {layer.name: layer for layer in config.layers}
    offset = config.fields["activation_offset"]
    skip_fusion = frozenset(config.fields["skip_fusion_layers"])
    plans = []
    for layer in quantizable_layers(model, CAFFE_TYPES):
        if layer.name not in blocks:
            continue
        data = blocks[layer.name].data
        activations = data["activation_quant_params"]
        plans.append(
            LayerPlan(
                name=layer.name,
                type=layer.type,
                enabled=data["quant_enable"],
                activations=tuple(
                    settings_of(item, activation_algorithms("caffe"), "act_algo", asymmetric=offset)
                    for item in (activations if isinstance(activations, list) else [activations])
                ),
                weight=_weight(layer, data),
                skip_fusion=layer.name in skip_fusion,
                batch_num=config.fields["batch_num"],
                weight_rounding=config.fields.get("weight_rounding", _Globals.weight_rounding),
                weight_scale=config.fields.get("weight_scale", _Globals.weight_scale),
            )
        )
    update = BatchNormUpdate(**config.fields["bn_update_config"]) if config.fields.get("update_bn") else None
    return Plan(
        source=config.source,
        batch_num=config.fields["batch_num"],
        activation_offset=offset,
        do_fusion=config.fields["do_fusion"],
        skip_fusion_layers=tuple(config.fields["skip_fusion_layers"]),
        layers=tuple(plans),
        not_quantized=MappingProxyType(reasons_not_quantized(model, CAFFE_TYPES, blocks)),
        warnings=config.warnings,
        update_bn=update,
    )


def _weight(layer: LayerInfo, data: Mapping[str, Any]) -> WeightSettings | None:
    if not CAFFE_TYPES[layer.type].weights:
        return None
    block = data.get("weight_quant_params", default_weight(layer.type))
    settings: WeightSettings = settings_of(block, CAFFE_WEIGHT, "wts_algo")
    return settings
