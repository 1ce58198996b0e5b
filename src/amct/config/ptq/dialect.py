"""Post-training quantization: from a simple or full config to a plan, for both dialects."""

from __future__ import annotations

from abc import abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from amct.config import registry
from amct.config.blocks import AlgorithmBlock, check_skip_fusion
from amct.config.checks import ProblemList, show
from amct.config.dialect import QuantBlock, QuantDialect, label, warn_of_refused
from amct.config.layers import MIGRATION_RANGE, LayerInfo, LayerList
from amct.config.plan import FORCE_FP16, NO_CONFIG, LayerPlan, Plan, reasons_not_quantized, settings_of
from amct.config.simple_config import (
    DEFAULT,
    FUSION_SKIPS,
    FullConfig,
    LayerBlock,
    Level,
    Named,
    Origin,
    SimpleConfig,
    check_batch_num,
    check_layer_names,
    read_simple_config,
    without_repeats,
)
from amct.numerics.settings import BatchNormUpdate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from amct.config.json_reader import JsonNode
    from amct.config.simple_config import Choice, SkipList
    from amct.errors import Position
    from amct.numerics.settings import WeightRounding, WeightScale, WeightSettings
    from amct.schema import ExtraField, TextMessage

    Note = Callable[[str, Position | None], None]
    Offset = tuple[bool, Origin]

_LayerT = TypeVar("_LayerT", LayerInfo, LayerBlock)

BALANCE_KEY = "dmq_balancer_param"
ROUNDING_KEYS = frozenset({"weight_rounding", "weight_scale", "bias_correction"})
"""Global fields of our own: written only where they are given."""
OWN_ROUNDING = MappingProxyType({"weight_rounding": "error_cancelling", "bias_correction": True})
"""What quantizing in one call takes where the config does not say; AMCT's functions take AMCT's rounding."""
DATA_KEY = "activation_quant_params"
WEIGHT_KEY = "weight_quant_params"
UNPACKABLE = "4-bit weights need one group and an even number of input channels"


class PtqDialect(QuantDialect):
    """The configs of post-training quantization of one framework.

    Attributes:
        name: Its name in the registry.
        activation_bits: The bits of activations that a ``QuantConfig`` can ask for.
        balances: Whether the dialect has DMQ and half-precision scales.
        sorted_by_name: Whether the layers are written in the order of their names, not of the model.
        float_fusible: The types that BatchNorm can be folded into but that are never quantized.
        weight_rounding: How uniform weights are rounded by default.
        weight_scale: What the largest absolute weight is divided by by default.
    """

    switch_key = "quant_enable"
    data_key = DATA_KEY
    weight_key = WEIGHT_KEY
    name_keys = ("act_algo", "wts_algo")
    oneofs = ("acts_quant_algo", "wts_quant_algo")
    name: ClassVar[registry.Dialect]
    activation_bits: ClassVar[Collection[int]]
    balances: ClassVar[bool]
    sorted_by_name: ClassVar[bool] = False
    float_fusible: ClassVar[tuple[str, ...]] = ()
    weight_rounding: ClassVar[WeightRounding]
    weight_scale: ClassVar[WeightScale]

    @property
    def activation(self) -> tuple[registry.Algorithm, ...]:
        """The registered activation algorithms, the default first."""
        return registry.activation_algorithms(self.name)

    def extra_fields(self) -> tuple[ExtraField, ...]:
        """The fields that registered activation algorithms add to the simple config."""
        return registry.extra_fields(self.name)

    @property
    def _fusible(self) -> tuple[str, ...]:
        quantized = (name for name, capability in self.types.items() if capability.fusible)
        return (*quantized, *self.float_fusible)

    # -- simple config -------------------------------------------------------------------------------------------------

    def default_config(
        self,
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
        fields = {"batch_num": batch_num, "activation_offset": activation_offset}
        check_batch_num(batch_num, DEFAULT, problems)
        simple = SimpleConfig(
            source=NO_CONFIG,
            fields=fields,
            origins={key: Origin(Level.ARGUMENT) for key in fields},
            names={"skip_layers": without_repeats([Named(name) for name in skip_layers], "skip_layers", problems)},
        )
        return self.expand(simple, LayerList(layers), problems)

    def expand_message(self, message: TextMessage, source: str, layers: LayerList, problems: ProblemList) -> FullConfig:
        """Expand a parsed simple config."""
        simple = self.with_own_fields(read_simple_config(message, source, problems), message, problems)
        return self.expand(simple, layers, problems)

    def with_own_fields(self, simple: SimpleConfig, message: TextMessage, problems: ProblemList) -> SimpleConfig:  # noqa: ARG002  for dialects with such fields
        """Add the global fields that only this dialect has."""
        return simple

    def read_choice(self, choice: Choice) -> QuantBlock:
        """The algorithms of a ``CalibrationConfig`` or of an entry of a ``QuantConfig``."""
        return self.read(choice, choice)

    def expand(self, simple: SimpleConfig, layers: LayerList, problems: ProblemList) -> FullConfig:
        """The full config of a model from a simple config or its equivalent.

        Raises:
            ConfigError: It does not fit the model or asks for what cannot be done; all mistakes are listed.
        """
        skips, quantizable = simple.skips(), layers.quantizable(self.types)
        simple.check_skips("", layers, self.types, problems)
        kept = simple.names.get(FUSION_SKIPS, ())
        check_layer_names(kept, FUSION_SKIPS, layers, self._fusible, problems, verb="fused with BatchNorm")
        if not quantizable:
            problems.add(layers.why_none_quantizable(self.types))
        elif all(skips.find(layer) for layer in quantizable):
            problems.add(
                "skip_layers and skip_layer_types switch off every layer that can be quantized "
                f"({len(quantizable)}). Leave at least one.",
                (skips.find(quantizable[0]) or DEFAULT).position,
            )
        self.check_blocks(simple.blocks, layers, problems)
        problems.raise_all()
        expanded = tuple(self._expand_layer(layer, simple, skips, problems) for layer in self._ordered(quantizable))
        warn_of_refused(simple.blocks, layers, problems)
        return simple.expanded(self.simple_globals(simple), expanded, problems)

    def _ordered(self, layers: Iterable[_LayerT]) -> tuple[_LayerT, ...]:
        return tuple(sorted(layers, key=lambda layer: layer.name) if self.sorted_by_name else layers)

    def _expand_layer(
        self, layer: LayerInfo, simple: SimpleConfig, skips: SkipList, problems: ProblemList
    ) -> LayerBlock:
        capability = self.types[layer.type]
        choice = simple.blocks.choose(layer)
        block = self.read_choice(choice)
        why = skips.find(layer) or (DEFAULT if capability.on_by_default else Origin(Level.RULE))
        enabled = why is DEFAULT
        target = LayerBlock(
            name=layer.name,
            type=layer.type,
            data={self.switch_key: enabled},
            origins={"": choice.origin, self.switch_key: why},
        )

        def note(what: str, position: Position | None) -> None:
            if enabled:
                problems.adjust(layer.name, what, position)

        if block.strength is not None and capability.dmq:
            target.data[BALANCE_KEY] = block.strength
            target.origins[BALANCE_KEY] = Origin(choice.origin.level, block.strength_position)
        elif block.strength is not None:
            note("dmq_balancer does not apply to these layers", block.strength_position)
        changed: dict[str, Any] = {}
        if block.weight.given.get("channel_wise") and self.is_per_tensor(layer):
            changed[f"{WEIGHT_KEY}.channel_wise"] = False
            what = "channel_wise does not apply to these layers, they are quantized per tensor"
            note(what, block.weight.positions["channel_wise"])
        changed |= self.fitted_bits(layer, block, note)
        inputs = [block.activation] * layer.inputs
        self.write_inputs(target, inputs, self.offset(simple, block.activation), changed)
        self._write_weight(self.fitted_weight(layer, block.weight, note), changed, target)
        return target

    @abstractmethod
    def is_per_tensor(self, layer: LayerInfo) -> bool:
        """Whether a layer can only be quantized with one scale for all channels."""

    def fitted_bits(self, layer: LayerInfo, block: QuantBlock, note: Note) -> dict[str, Any]:  # noqa: ARG002  for dialects with such rules
        """By dotted key, the bit widths that a layer must have instead of those of the block."""
        return {}

    @abstractmethod
    def fitted_weight(self, layer: LayerInfo, block: AlgorithmBlock, note: Note) -> AlgorithmBlock | None:
        """The weight block of a layer: the given one or, where that cannot be, another; None: it is not written."""

    def offset(self, simple: SimpleConfig, block: AlgorithmBlock) -> Offset:  # noqa: ARG002  for dialects where it matters
        """Whether activations have an offset where their block does not specify it, and the origin of that."""
        return simple.fields.get("activation_offset", True), simple.origins.get("activation_offset", DEFAULT)

    @abstractmethod
    def write_inputs(
        self, target: LayerBlock, inputs: Sequence[AlgorithmBlock], offset: Offset, changed: Mapping[str, Any]
    ) -> None:
        """Add the activation block of a layer as it is written, and the values that hold without it."""

    def _write_weight(self, block: AlgorithmBlock | None, changed: Mapping[str, Any], target: LayerBlock) -> None:
        capability = self.types[target.type]
        channel_wise = capability.channel_wise
        if block is not None:
            channel_wise = block.given.get("channel_wise", channel_wise)
            written = block.write(WEIGHT_KEY, "wts_algo", target.origins, changed, channel_wise=channel_wise)
            target.data[WEIGHT_KEY] = written
        elif capability.weights:
            default = self._default_weight(channel_wise)
            target.implied.update({f"{WEIGHT_KEY}.{key}": value for key, value in default.items()})

    def _default_weight(self, channel_wise: bool) -> dict[str, Any]:
        default = AlgorithmBlock(algorithm=self.weight[0])
        return default.to_json("wts_algo", channel_wise=channel_wise)

    # -- full config ---------------------------------------------------------------------------------------------------

    def global_nodes(
        self, nodes: Mapping[str, JsonNode], root: JsonNode, model: LayerList, problems: ProblemList
    ) -> Mapping[str, JsonNode]:
        """Check ``skip_fusion_layers`` against the model."""
        check_skip_fusion(nodes.get("skip_fusion_layers"), model, self._fusible, problems)
        return super().global_nodes(nodes, root, model, problems)

    def read_layers(
        self, root: JsonNode, model: LayerList, written: Mapping[str, Any], problems: ProblemList
    ) -> tuple[LayerBlock, ...]:
        """The layers of a JSON config in the order they are written."""
        return self._ordered(super().read_layers(root, model, written, problems))

    def read_members(
        self,
        layer: LayerInfo,
        members: Mapping[str, JsonNode],
        written: Mapping[str, Any],
        target: LayerBlock,
        problems: ProblemList,
    ) -> None:
        """Read and check the JSON block of a layer; ``target`` takes it as it is written."""
        inputs = self.read_inputs(layer, members.get(DATA_KEY), problems)
        weight_name = f"{layer.name}.{WEIGHT_KEY}"
        weight = self.read_block(WEIGHT_KEY, members.get(WEIGHT_KEY), weight_name, problems)
        balance = members.get(BALANCE_KEY)
        if balance is not None:
            target.data[BALANCE_KEY] = _read_strength(layer.name, balance, problems)
        position = balance.key_position if balance is not None else None
        for name, activation in inputs:
            block = QuantBlock(activation=activation, weight=weight, strength_position=position)
            for key, message in self.illegal(block):
                where = weight_name if key.startswith(WEIGHT_KEY) else name
                problems.add(f"{where}: {message}", block.position(key))
            for key, message in self.unsupported(layer, block):
                problems.add(f"{label(layer)}: {message}", block.position(key))
        offset = written["activation_offset"], DEFAULT
        self.write_inputs(target, [block for _, block in inputs], offset, {})
        given = weight if weight.position is not None and self.has_weight_block(layer) else None
        self._write_weight(given, {}, target)

    def read_inputs(
        self, layer: LayerInfo, node: JsonNode | None, problems: ProblemList
    ) -> list[tuple[str, AlgorithmBlock]]:
        """The activation blocks of a layer, each with its name for messages."""
        name = f"{layer.name}.{DATA_KEY}"
        return [(name, self.read_block(DATA_KEY, node, name, problems))]

    # -- plan ----------------------------------------------------------------------------------------------------------

    def make_plan(
        self, config: FullConfig, layers: Iterable[LayerInfo], rounding: Mapping[str, object] = MappingProxyType({})
    ) -> Plan:
        """Turn a full config, expanded or read, into the plan for the model it was checked against.

        ``rounding`` has what applies instead of AMCT's where the config says nothing of ``ROUNDING_KEYS``.
        """
        model, problems, fields = LayerList(layers), ProblemList(), {**rounding, **config.fields}
        blocks = {layer.name: layer for layer in config.layers}
        planned = [layer for layer in model.quantizable(self.types) if layer.name in blocks]
        return Plan(
            source=config.source,
            batch_num=fields["batch_num"],
            activation_offset=fields["activation_offset"],
            do_fusion=fields["do_fusion"],
            skip_fusion_layers=tuple(fields["skip_fusion_layers"]),
            force_fp16=fields.get("fakequant_precision_mode") == FORCE_FP16,
            layers=tuple(self._plan_layer(layer, blocks[layer.name], fields, problems) for layer in planned),
            not_quantized=MappingProxyType(reasons_not_quantized(model, self.types, blocks)),
            warnings=(*config.warnings, *problems.warnings),
            update_bn=BatchNormUpdate(**fields["bn_update_config"]) if fields.get("update_bn") else None,
        )

    def config_of(self, plan: Plan) -> dict[str, Any]:
        """The content of a JSON config that gives this plan."""
        values = {
            "batch_num": plan.batch_num,
            "activation_offset": plan.activation_offset,
            "do_fusion": plan.do_fusion,
            "skip_fusion_layers": plan.skip_fusion_layers,
        }
        optional = {
            "fakequant_precision_mode": FORCE_FP16 if plan.force_fp16 else None,
            "weight_scale": next((layer.weight_scale for layer in plan.layers), self.weight_scale),
        }
        values |= {
            key: value
            for key, value in optional.items()
            if value is not None and value != getattr(self, key, None) and key in self.global_keys
        }
        # One call and AMCT's functions have different defaults for these.
        values["weight_rounding"] = next((layer.weight_rounding for layer in plan.layers), self.weight_rounding)
        values["bias_correction"] = any(layer.bias_correction for layer in plan.layers)
        return {
            **self._written(self.globals(**values), values),
            **{layer.name: self._layer_config(layer) for layer in plan.layers},
        }

    def _layer_config(self, layer: LayerPlan) -> dict[str, Any]:
        inputs = [_block_of(settings, self.activation, "act_algo") for settings in layer.activations]
        found: dict[str, Any] = {self.switch_key: layer.enabled, DATA_KEY: inputs if len(inputs) > 1 else inputs[0]}
        if layer.weight is not None:
            found[WEIGHT_KEY] = _block_of(layer.weight, self.weight, "wts_algo")
        if layer.migration_strength is not None:
            found[BALANCE_KEY] = layer.migration_strength
        return found

    def _plan_layer(
        self, layer: LayerInfo, block: LayerBlock, fields: Mapping[str, Any], problems: ProblemList
    ) -> LayerPlan:
        inputs = block.data[DATA_KEY]
        return LayerPlan(
            name=layer.name,
            type=layer.type,
            enabled=block.data[self.switch_key],
            activations=tuple(
                settings_of(item, self.activation, "act_algo", asymmetric=fields["activation_offset"])
                for item in (inputs if isinstance(inputs, list) else [inputs] * layer.inputs)
            ),
            weight=self._plan_weight(layer, block, problems),
            migration_strength=block.data.get(BALANCE_KEY),
            force_fp16=fields.get("fakequant_precision_mode") == FORCE_FP16,
            skip_fusion=self._keeps_norm(layer, fields),
            batch_num=fields["batch_num"],
            weight_rounding=fields.get("weight_rounding", self.weight_rounding),
            weight_scale=fields.get("weight_scale", self.weight_scale),
            bias_correction=fields.get("bias_correction", False),
        )

    def _keeps_norm(self, layer: LayerInfo, fields: Mapping[str, Any]) -> bool:
        may_fold = fields["do_fusion"] and layer.name not in fields["skip_fusion_layers"]
        return self.types[layer.type].fusible and not may_fold

    def _plan_weight(self, layer: LayerInfo, block: LayerBlock, problems: ProblemList) -> WeightSettings | None:
        capability = self.types[layer.type]
        if not capability.weights:
            return None
        data = block.data.get(WEIGHT_KEY) or self._default_weight(capability.channel_wise)
        if data["num_bits"] == 4 and not layer.can_pack_int4:
            position = block.origin(f"{WEIGHT_KEY}.num_bits").position
            problems.warn(f'{UNPACKABLE}: 8 bits are used for "{layer.name}"', position)
            data = {**data, "num_bits": 8}
        settings: WeightSettings = settings_of(data, self.weight, "wts_algo")
        return settings


def _block_of(settings: Any, algorithms: Iterable[registry.Algorithm], name_key: str) -> dict[str, Any]:  # noqa: ANN401  settings of any algorithm
    """Settings as a JSON block."""
    algorithm = next(each for each in algorithms if each.settings is type(settings))
    found: dict[str, Any] = {}
    for key in algorithm.keys:
        value = algorithm.name if key == name_key else getattr(settings, algorithm.field_of(key))
        found[key] = list(value) if isinstance(value, tuple) else value
    return found


def _read_strength(name: str, node: JsonNode, problems: ProblemList) -> float | None:
    """The strength of DMQ balancing; a value of another type or out of range is reported."""
    value, (low, high) = node.value, MIGRATION_RANGE
    if not isinstance(value, float):
        problems.add_wrong_type(
            f"{name}.{BALANCE_KEY} must be a number with a decimal point, got {show(node.plain())}", node.position
        )
        return None
    if not low <= value <= high:
        problems.add(f"{name}.{BALANCE_KEY} must be at least {low} and at most {high}, got {value}", node.position)
    return value
