"""Quantization-aware training: from a simple or full config to a plan, for both dialects.

Its simple config (``.cfg``) differs from the one of post-training quantization in three ways. Data, weight and prune
blocks stand side by side in the file and in each override. There are three pairs of skip lists: for everything, for
quantization, for pruning. A name that is repeated in a skip list gives only a warning.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from amct.config.checks import ProblemList
from amct.config.dialect import QuantBlock, QuantDialect, label, warn_of_refused
from amct.config.full_config import DEFAULT, FullConfig, LayerBlock, Level, Origin
from amct.config.layers import LayerInfo, LayerList
from amct.config.plan import FORCE_FP16, RetrainLayerPlan, RetrainPlan, reasons_not_quantized, settings_of
from amct.config.simple_config import (
    NO_BLOCK,
    Blocks,
    Choice,
    Named,
    SkipList,
    check_layer_names,
    check_type_names,
    named,
    read_names,
    read_overrides,
    without_repeats,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from amct.config.json_reader import JsonNode
    from amct.config.registry import Algorithm
    from amct.errors import Position
    from amct.schema import TextMessage

DATA_BLOCK = "retrain_data_quant_config"
WEIGHT_BLOCK = "retrain_weight_quant_config"
PRUNE_BLOCK = "prune_config"
QUANT_BLOCKS = (DATA_BLOCK, WEIGHT_BLOCK)
LAYER_OVERRIDES = "override_layer_configs"
TYPE_OVERRIDES = "override_layer_types"
SKIP_FIELDS = (
    "skip_layers", "skip_layer_types", "quant_skip_layers", "quant_skip_types", "regular_prune_skip_layers",
    "regular_prune_skip_types",
)  # fmt: skip
SCALARS = ("batch_num", "fakequant_precision_mode")


_ENTRIES = {DATA_BLOCK: "activations", WEIGHT_BLOCK: "weights", PRUNE_BLOCK: "prune"}


@dataclass(frozen=True, kw_only=True)
class RetrainSimple:
    """The content of a simple config; all defaults when there is none.

    Attributes:
        source: The file, or the function that was called without one.
        whole: The parsed file, or the Python object; neither when there is none.
        batch_num: How many batches determine the initial clips.
        precision_mode: ``FORCE_FP16_QUANT`` or None.
        names: The skip lists by their field names, each name once.
        by_type: The overrides by layer type, with any blocks.
        by_layer: The overrides by layer name.
        origins: The origins of the global fields.
    """

    source: str
    whole: Choice = NO_BLOCK
    batch_num: int = 1
    precision_mode: str | None = None
    names: Mapping[str, tuple[Named, ...]] = field(default_factory=dict)
    by_type: Mapping[str, Choice] = field(default_factory=dict)
    by_layer: Mapping[str, Choice] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def skips(self, kind: str) -> SkipList:
        """The union of the lists for everything and the lists of one kind (``quant_`` or ``regular_prune_``)."""
        (all_layers, all_types), (layers, types) = _skip_fields(""), _skip_fields(kind)
        return SkipList(
            (*self.names.get(all_layers, ()), *self.names.get(layers, ())),
            (*self.names.get(all_types, ()), *self.names.get(types, ())),
        )

    def check_skips(
        self, kind: str, layers: LayerList, types: Sequence[str], problems: ProblemList, *, verb: str = "quantized"
    ) -> None:
        """Report names in the skip lists of one kind ("" for everything) that are unknown or cannot be ``verb``."""
        by_layer, by_type = _skip_fields(kind)
        check_layer_names(self.names.get(by_layer, ()), by_layer, layers, types, problems, verb=verb)
        check_type_names(self.names.get(by_type, ()), by_type, types, problems, verb=verb)

    def blocks(self, fields: tuple[str, ...]) -> Blocks:
        """The blocks that have certain fields."""
        return Blocks(
            common=self._common(fields),
            by_type={name: choice for name, choice in self.by_type.items() if _has_any(choice, fields)},
            by_layer={name: choice for name, choice in self.by_layer.items() if _has_any(choice, fields)},
        )

    def _common(self, fields: tuple[str, ...]) -> Choice:
        first = next((name for name in fields if has(self.whole, name)), None)
        if first is None:
            return NO_BLOCK
        return replace(self.whole, origin=Origin(Level.COMMON, where(self.whole, first)))

    def asks_for(self, fields: tuple[str, ...]) -> bool:
        """Whether the file has one of these blocks, globally or in an override."""
        return any(has(choice, name) for choice in (self.whole, *self.overrides()) for name in fields)

    def overrides(self) -> Iterable[Choice]:
        """Every override, types first."""
        yield from self.by_type.values()
        yield from self.by_layer.values()


def _skip_fields(kind: str) -> tuple[str, str]:
    return f"{kind}skip_layers", f"{kind}skip_types" if kind else "skip_layer_types"


def sets(message: TextMessage, name: str) -> bool:
    """Whether a message sets a field; one that its dialect does not have is never set."""
    return name in message.descriptor.fields_by_name and message.has(name)


def has(choice: Choice, name: str) -> bool:
    """Whether the whole config, or an override, has a block."""
    if choice.entry is not None:
        return getattr(choice.entry, _ENTRIES[name]) is not None
    return choice.block is not None and sets(choice.block, name)


def where(choice: Choice, name: str) -> Position | None:
    """The position of a block, or of what should have it."""
    return choice.block.where(name) if choice.block is not None else choice.origin.position


def _has_any(choice: Choice, fields: tuple[str, ...]) -> bool:
    """Whether an override has one of these blocks; one without any block asks for quantization with defaults."""
    return any(has(choice, name) for name in fields) or (fields == QUANT_BLOCKS and not has(choice, PRUNE_BLOCK))


def part(choice: Choice, name: str) -> Choice:
    """One block of what applies to a layer; an override without it inherits nothing."""
    if not has(choice, name):
        return Choice(None, choice.origin)
    block = choice.block.get(name) if choice.block is not None else None
    return Choice(block, Origin(choice.origin.level, where(choice, name)), choice.entry)


def read_retrain_simple(message: TextMessage, source: str, problems: ProblemList) -> RetrainSimple:
    """Read a parsed ``.cfg``; a repeated override is reported, a repeated name in a skip list gives a warning."""
    names = {
        name: without_repeats(read_names(message, name), name, problems, only_warn=True)
        for name in SKIP_FIELDS
        if sets(message, name)
    }
    batch_num = message.get("batch_num", 1)
    if batch_num < 1:
        problems.add(f"batch_num must be at least 1, got {batch_num}", message.where("batch_num"))
    return RetrainSimple(
        source=source,
        whole=Choice(message, Origin(Level.COMMON, message.position)),
        batch_num=batch_num,
        precision_mode=message.get("fakequant_precision_mode") if sets(message, "fakequant_precision_mode") else None,
        names=names,
        by_type=read_overrides(message.all(TYPE_OVERRIDES), "layer_type", None, problems),
        by_layer=read_overrides(message.all(LAYER_OVERRIDES), "layer_name", None, problems),
        origins={name: Origin(Level.GLOBAL, message.where(name)) for name in SCALARS if sets(message, name)},
    )


VERSION = 1
NAME_KEY = "algo"
SWITCH_KEY = "retrain_enable"
DATA_KEY = "retrain_data_config"
WEIGHT_KEY = "retrain_weight_config"


class QatDialect(QuantDialect):
    """The configs of quantization-aware training of one framework; ``activations`` are the activation algorithms."""

    activations: ClassVar[tuple[Algorithm, ...]]
    switch_key = SWITCH_KEY
    data_key = DATA_KEY
    weight_key = WEIGHT_KEY
    name_keys = (NAME_KEY, NAME_KEY)
    oneofs = ("RetrainDataAlgorithm", "RetrainWeightAlgorithm")

    @property
    def activation(self) -> tuple[Algorithm, ...]:
        """The activation algorithms, the default first."""
        return self.activations

    def unsupported(self, layer: LayerInfo, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """Scales per channel where this layer or type cannot have them."""
        if block.weight.given.get("channel_wise") is True and not self.types[layer.type].channel_wise:
            yield f"{WEIGHT_KEY}.channel_wise", f"channel_wise must be false, {layer.type} has no channels of its own"

    @abstractmethod
    def fit(self, layer: LayerInfo, block: QuantBlock, note: Callable[[str, str], None]) -> dict[str, Any]:
        """By dotted key, weight settings that a layer must have instead of those of the block.

        Args:
            layer: The layer.
            block: Its settings in the config.
            note: Takes the dotted key of a setting and a warning about it.
        """

    # -- simple config -------------------------------------------------------------------------------------------------

    def default_config(self, layers: Iterable[LayerInfo]) -> FullConfig:
        """The full config of a model without a simple config: every layer that can be quantized, with defaults.

        Raises:
            ConfigError: The model has no layer that can be quantized.
        """
        return self.expand(RetrainSimple(source="create_quant_retrain_config"), LayerList(layers), ProblemList())

    def expand_message(self, message: TextMessage, source: str, layers: LayerList, problems: ProblemList) -> FullConfig:
        """Expand a parsed simple config."""
        return self.expand(read_retrain_simple(message, source, problems), layers, problems)

    def expand(self, simple: RetrainSimple, layers: LayerList, problems: ProblemList) -> FullConfig:
        """The full config of a model from a simple config without pruning.

        Raises:
            ConfigError: The config does not fit the model or asks for what cannot be done; all mistakes are listed.
        """
        for kind in ("", "quant_"):
            simple.check_skips(kind, layers, tuple(self.types), problems)
        self.check_quantization(simple, layers, problems)
        expander = QatExpander(simple, self, problems)
        quantizable = layers.quantizable(self.types)
        if not quantizable:
            problems.add(layers.why_none_quantizable(tuple(self.types)))
        elif not any(expander.enabled(layer)[0] for layer in quantizable):
            problems.add(
                f"every layer that can be quantized ({len(quantizable)}) is switched off. Leave at least one.",
                expander.enabled(quantizable[0])[1].position,
            )
        problems.raise_all()
        expanded = tuple(expander.expand(layer) for layer in quantizable)
        warn_of_refused(expander.blocks, layers, problems)
        return FullConfig(
            source=simple.source,
            fields=self.simple_globals(simple),
            layers=expanded,
            origins=simple.origins,
            warnings=problems.warnings,
        )

    def simple_globals(self, simple: RetrainSimple) -> dict[str, Any]:
        """The global fields of a simple config as the full config has them."""
        values = {"version": VERSION, "fakequant_precision_mode": simple.precision_mode, "batch_num": simple.batch_num}
        return {
            key: values[key] for key in self.global_keys if key not in self.optional_globals or key in simple.origins
        }

    def read_choice(self, choice: Choice) -> QuantBlock:
        """The algorithms of the message that applies to a layer."""
        return self.read(part(choice, DATA_BLOCK), part(choice, WEIGHT_BLOCK))

    def check_quantization(self, simple: RetrainSimple, layers: LayerList, problems: ProblemList) -> None:
        """Report overrides of unknown names, values that are wrong, and what a layer or type cannot do."""
        blocks = simple.blocks(QUANT_BLOCKS)
        check_layer_names(named(blocks.by_layer), LAYER_OVERRIDES, layers, tuple(self.types), problems)
        check_type_names(named(blocks.by_type), TYPE_OVERRIDES, tuple(self.types), problems)
        self.check_blocks(blocks, layers, problems)

    # -- full config ---------------------------------------------------------------------------------------------------

    def read_layers(
        self, root: JsonNode, model: LayerList, written: Mapping[str, Any], problems: ProblemList
    ) -> tuple[LayerBlock, ...]:
        """The layers of a JSON config, in model order; a config without a layer to quantize is reported."""
        read = super().read_layers(root, model, written, problems)
        if not problems and not any(layer.data[SWITCH_KEY] for layer in read):
            problems.add(f"no layer is switched on. Set {SWITCH_KEY} to true for at least one.", root.position)
        return read

    def read_members(
        self,
        layer: LayerInfo,
        members: Mapping[str, JsonNode],
        written: Mapping[str, Any],  # noqa: ARG002  no global field matters here
        target: LayerBlock,
        problems: ProblemList,
    ) -> None:
        """Read and check the JSON block of a layer; ``target`` takes it as it is written."""
        if WEIGHT_KEY in members and not self.types[layer.type].weights:
            what = f"{layer.name}.{WEIGHT_KEY} is ignored: {layer.type} has no weights to quantize"
            problems.warn(what, members[WEIGHT_KEY].key_position)
        activation, weight = (
            self.read_block(key, members.get(key), f"{layer.name}.{key}", problems) for key in (DATA_KEY, WEIGHT_KEY)
        )
        block = QuantBlock(activation=activation, weight=weight)
        for key, message in (*self.illegal(block), *self.unsupported(layer, block)):
            problems.add(f"{label(layer)}: {message}", block.position(key))

        def note(key: str, what: str) -> None:
            if target.data[SWITCH_KEY]:
                problems.adjust(layer.name, what, block.position(key), anywhere=True)

        self.write(block, self.fit(layer, block, note), target)

    def write(self, block: QuantBlock, changed: Mapping[str, Any], target: LayerBlock) -> None:
        """Add the blocks of a layer; ``changed`` has weight settings, by dotted key, that a rule replaces."""
        weight, origins, capability = block.weight, target.origins, self.types[target.type]
        target.data[DATA_KEY] = block.activation.write(DATA_KEY, NAME_KEY, origins, {})
        if not capability.weights:
            return
        channel_wise = weight.given.get("channel_wise", capability.channel_wise)
        target.data[WEIGHT_KEY] = weight.write(WEIGHT_KEY, NAME_KEY, origins, changed, channel_wise=channel_wise)

    # -- plan ----------------------------------------------------------------------------------------------------------

    def make_plan(self, config: FullConfig, layers: Iterable[LayerInfo]) -> RetrainPlan:
        """Turn a full config, expanded or read, into the plan for the model it was checked against."""
        model = LayerList(layers)
        blocks = {layer.name: layer for layer in config.layers if SWITCH_KEY in layer.data}
        common: dict[str, Any] = {
            "batch_num": config.fields.get("batch_num", 1),
            "force_fp16": config.fields.get("fakequant_precision_mode") == FORCE_FP16,
        }
        plans = tuple(
            RetrainLayerPlan(
                name=layer.name,
                type=layer.type,
                enabled=data[SWITCH_KEY],
                activation=settings_of(data[DATA_KEY], self.activation, NAME_KEY),
                weight=settings_of(data.get(WEIGHT_KEY, {}), self.weight, NAME_KEY),
                quantizes_weights=WEIGHT_KEY in data,
                **common,
            )
            for layer in model.quantizable(self.types)
            if layer.name in blocks and (data := blocks[layer.name].data)
        )
        return RetrainPlan(
            source=config.source,
            layers=plans,
            not_quantized=MappingProxyType(reasons_not_quantized(model, self.types, blocks, switch_key=SWITCH_KEY)),
            warnings=config.warnings,
            **common,
        )


class QatExpander:
    """Fills in the quantization part of the full config, layer by layer."""

    def __init__(
        self, simple: RetrainSimple, dialect: QatDialect, problems: ProblemList, *, overrides_only: bool = False
    ) -> None:
        self.dialect = dialect
        self.problems = problems
        self.blocks = simple.blocks(QUANT_BLOCKS)
        self.skips = simple.skips("quant_")
        self.overrides_only = overrides_only

    def enabled(self, layer: LayerInfo) -> tuple[bool, Origin]:
        """Whether a layer is quantized and why; an override switches a skipped layer on again."""
        override = self.blocks.by_layer.get(layer.name) or self.blocks.by_type.get(layer.type)
        if override is not None:
            return True, override.origin
        skipped = self.skips.find(layer)
        if skipped is not None:
            return False, skipped
        if not self.dialect.types[layer.type].on_by_default:
            return False, Origin(Level.RULE)
        return not self.overrides_only, DEFAULT

    def expand(self, layer: LayerInfo) -> LayerBlock:
        """The JSON block of a layer."""
        choice = self.blocks.choose(layer)
        block = self.dialect.read_choice(choice)
        enabled, why = self.enabled(layer)

        def note(key: str, what: str) -> None:
            if enabled:
                self.problems.adjust(layer.name, what, block.position(key))

        if enabled and self.skips.find(layer) is not None:
            what = "quantized although skipped, because an override names these layers or their type"
            self.problems.adjust(layer.name, what, why.position)
        changed: dict[str, Any] = {}
        capability = self.dialect.types[layer.type]
        if block.weight.given.get("channel_wise") and capability.weights and not capability.channel_wise:
            key = f"{WEIGHT_KEY}.channel_wise"
            changed[key] = False
            note(key, "channel_wise does not apply to these layers, they are quantized per tensor")
        changed |= self.dialect.fit(layer, block, note)
        origins = {"": choice.origin, SWITCH_KEY: why}
        target = LayerBlock(name=layer.name, type=layer.type, data={SWITCH_KEY: enabled}, origins=origins)
        self.dialect.write(block, changed, target)
        return target
