"""Quantization-aware training: read the JSON config back, and turn a full config into a plan, for both dialects."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from amct.config.full_config import FullConfig, LayerBlock
from amct.config.json.blocks import find_layer, is_object, known_members, read_algorithm_block, read_bool
from amct.config.layers import LayerInfo, LayerList
from amct.config.plan import FORCE_FP16, reasons_not_quantized, settings_of
from amct.config.precedence import Level, Origin
from amct.config.qat.dialect import DATA_KEY, LAYER_KEYS, NAME_KEY, SWITCH_KEY, WEIGHT_KEY, QuantBlock
from amct.config.qat.plan import RetrainLayerPlan, RetrainPlan
from amct.config.text.simple_config import Adjustments, quantizable_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from amct.config.json.reader import JsonNode
    from amct.config.problems import ProblemList
    from amct.config.qat.dialect import QatDialect
    from amct.config.text.algorithm_blocks import AlgorithmBlock
    from amct.errors import Position


def read_layers(
    root: JsonNode, layers: LayerList, dialect: QatDialect, problems: ProblemList
) -> tuple[LayerBlock, ...]:
    """The layers of a JSON config, in model order; a config without a layer to quantize is reported."""
    adjustments = Adjustments()
    reader = _LayerReader(dialect, adjustments, problems)
    read = {}
    for name, node in root.value.items():
        if name in dialect.global_keys:
            continue
        layer = find_layer(name, node, layers, dialect.types, dialect.global_keys, problems, switch_key=SWITCH_KEY)
        if layer is not None:
            read[name] = reader.read(layer, node)
    if not problems and not any(config.data[SWITCH_KEY] for config in read.values()):
        problems.add(f"no layer is switched on. Set {SWITCH_KEY} to true for at least one.", root.position)
    adjustments.report(problems)
    return tuple(read[layer.name] for layer in layers if layer.name in read)


class _LayerReader:
    """Reads and checks the JSON block of one layer after the other."""

    def __init__(self, dialect: QatDialect, adjustments: Adjustments, problems: ProblemList) -> None:
        self.dialect = dialect
        self.adjustments = adjustments
        self.problems = problems
        self.first: dict[str, Position | None] = {}

    def read(self, layer: LayerInfo, node: JsonNode) -> LayerBlock:
        name, problems = layer.name, self.problems
        origins = {"": Origin(Level.FILE, node.key_position)}
        members: Mapping[str, JsonNode] = {}
        if is_object(node, name, problems):
            members = known_members(node, LAYER_KEYS, name, problems)
        origins |= {key: Origin(Level.FILE, member.key_position) for key, member in members.items()}
        enabled = read_bool(members, SWITCH_KEY, True, name, problems)
        block = QuantBlock(activation=self.block(members, DATA_KEY, name), weight=self.block(members, WEIGHT_KEY, name))
        self.check(layer, block)
        origins |= block.activation.origins(DATA_KEY, NAME_KEY)
        origins |= block.weight.origins(WEIGHT_KEY, NAME_KEY)
        changed = self.dialect.fit(layer, block, self.noting(layer, block, enabled=enabled))
        for key in changed:
            origins[f"{WEIGHT_KEY}.{key}"] = Origin(Level.RULE, block.weight.positions.get(key))
        channel_wise = block.weight.given.get("channel_wise", self.dialect.types[layer.type])
        data = {
            SWITCH_KEY: enabled,
            DATA_KEY: block.activation.to_json(NAME_KEY),
            WEIGHT_KEY: block.weight.to_json(NAME_KEY, channel_wise=channel_wise, **changed),
        }
        return LayerBlock(name=name, type=layer.type, data=data, origins=origins)

    def noting(self, layer: LayerInfo, block: QuantBlock, *, enabled: bool) -> Callable[[str, str], None]:
        """A function that notes an adjustment; layers alike share one warning, at the place of the first."""

        def note(key: str, what: str) -> None:
            if enabled:
                self.adjustments.note(layer.name, what, self.first.setdefault(what, block.position(key)))

        return note

    def block(self, members: Mapping[str, JsonNode], key: str, name: str) -> AlgorithmBlock:
        default = self.dialect.default_block(key)
        if key not in members:
            return default
        algorithms = self.dialect.weight if key == WEIGHT_KEY else self.dialect.activation
        return read_algorithm_block(members[key], algorithms, NAME_KEY, f"{name}.{key}", self.problems) or default

    def check(self, layer: LayerInfo, block: QuantBlock) -> None:
        who = f'layer "{layer.name}"'
        for key, message in self.dialect.illegal(block):
            self.problems.add(f"{who}: {message}", block.position(key))
        for key, message in self.dialect.unsupported(who, layer, block):
            self.problems.add(message, block.position(key))


def make_retrain_plan(config: FullConfig, layers: Iterable[LayerInfo], dialect: QatDialect) -> RetrainPlan:
    """Turn a full config, expanded or read, into the plan for the model it was checked against."""
    model = LayerList(layers)
    blocks = {layer.name: layer for layer in config.layers if SWITCH_KEY in layer.data}
    batch_num = config.fields.get("batch_num", 1)
    force_fp16 = config.fields.get("fakequant_precision_mode") == FORCE_FP16
    plans = []
    for layer in quantizable_layers(model, dialect.types):
        if layer.name not in blocks:
            continue
        data = blocks[layer.name].data
        plans.append(
            RetrainLayerPlan(
                name=layer.name,
                type=layer.type,
                enabled=data[SWITCH_KEY],
                activation=settings_of(data[DATA_KEY], dialect.activation, NAME_KEY),
                weight=settings_of(data[WEIGHT_KEY], dialect.weight, NAME_KEY),
                force_fp16=force_fp16,
                batch_num=batch_num,
            )
        )
    return RetrainPlan(
        source=config.source,
        batch_num=batch_num,
        force_fp16=force_fp16,
        layers=tuple(plans),
        not_quantized=MappingProxyType(reasons_not_quantized(model, dialect.types, blocks, switch_key=SWITCH_KEY)),
        warnings=config.warnings,
    )
