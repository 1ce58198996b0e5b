"""Quantization-aware training: from a simple or full config to a plan, for both dialects.

Its simple config (``.cfg``) differs from the one of post-training quantization in three ways. Data, weight and prune
blocks stand side by side in the file and in each override. There are three pairs of skip lists: for everything, for
quantization, for pruning. A name that is repeated in a skip list gives only a warning.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from amct.config.checks import ProblemList
from amct.config.dialect import MODE_KEY, QuantBlock, QuantDialect, label, warn_of_refused
from amct.config.layers import CAFFE_RETRAIN_TYPES, QAT_TYPES, LayerInfo, LayerList, can_int16
from amct.config.plan import FORCE_FP16, RetrainLayerPlan, RetrainPlan, reasons_not_quantized, settings_of
from amct.config.registry import CAFFE_RETRAIN_ACTIVATION, CAFFE_RETRAIN_WEIGHT, RETRAIN_ACTIVATION, RETRAIN_WEIGHT
from amct.config.simple_config import (
    DEFAULT,
    NO_BLOCK,
    Blocks,
    Choice,
    FullConfig,
    LayerBlock,
    Level,
    Origin,
    SimpleConfig,
    read_simple_config,
    sets,
)
from amct.numerics.settings import AtLeastOne, CheckedSettings, Version, bits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from amct.config.blocks import AlgorithmBlock
    from amct.config.json_reader import JsonNode
    from amct.config.layers import LayerInfo
    from amct.config.registry import Algorithm
    from amct.errors import Position
    from amct.schema import TextMessage

DATA_BLOCK = "retrain_data_quant_config"
WEIGHT_BLOCK = "retrain_weight_quant_config"
PRUNE_BLOCK = "prune_config"
QUANT_BLOCKS = (DATA_BLOCK, WEIGHT_BLOCK)
_ENTRIES = {DATA_BLOCK: "activations", WEIGHT_BLOCK: "weights", PRUNE_BLOCK: "prune"}


def blocks_with(blocks: Blocks, names: tuple[str, ...]) -> Blocks:
    """The part of a config that has certain blocks."""
    first = next((name for name in names if has(blocks.common, name)), None)
    common = NO_BLOCK
    if first is not None:
        common = replace(blocks.common, origin=Origin(Level.COMMON, where(blocks.common, first)))
    return Blocks(
        common=common,
        by_type={name: choice for name, choice in blocks.by_type.items() if _has_any(choice, names)},
        by_layer={name: choice for name, choice in blocks.by_layer.items() if _has_any(choice, names)},
    )


def asks_for(blocks: Blocks, names: tuple[str, ...]) -> bool:
    """Whether the config has one of these blocks, globally or in an override."""
    return any(has(choice, name) for choice in blocks.all() for name in names)


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
    return any(has(choice, name) for name in fields) or (fields != (PRUNE_BLOCK,) and not has(choice, PRUNE_BLOCK))


def part(choice: Choice, name: str) -> Choice:
    """One block of what applies to a layer; an override without it inherits nothing."""
    if not has(choice, name):
        return Choice(None, choice.origin)
    block = choice.block.get(name) if choice.block is not None else None
    return Choice(block, Origin(choice.origin.level, where(choice, name)), choice.entry)


NAME_KEY, SWITCH_KEY = "algo", "retrain_enable"
DATA_KEY, WEIGHT_KEY = "retrain_data_config", "retrain_weight_config"


class QatDialect(QuantDialect):
    """The configs of quantization-aware training of one framework.

    Attributes:
        activations: The activation algorithms.
        quant_blocks: The fields of the simple config with the blocks of data and weights.
        skip_wins: Whether a layer that is skipped and has an override stays float.
    """

    activations: ClassVar[tuple[Algorithm, ...]]
    quant_blocks: ClassVar[tuple[str, str]] = QUANT_BLOCKS
    skip_wins: ClassVar[bool] = False
    switch_key, data_key, weight_key = SWITCH_KEY, DATA_KEY, WEIGHT_KEY
    name_keys = (NAME_KEY, NAME_KEY)
    oneofs = ("RetrainDataAlgorithm", "RetrainWeightAlgorithm")

    @property
    def activation(self) -> tuple[Algorithm, ...]:
        """The activation algorithms, the default first."""
        return self.activations

    def unsupported(self, layer: LayerInfo, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """Scales per channel where this layer or type cannot have them."""
        if block.weight.given.get("channel_wise") is True and not self.types[layer.type].channel_wise:
            yield (
                f"{self.weight_key}.channel_wise",
                f"channel_wise must be false, {layer.type} has one scale for all weights",
            )

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
        return self.expand(SimpleConfig(source="create_quant_retrain_config"), LayerList(layers), ProblemList())

    def expand_message(self, message: TextMessage, source: str, layers: LayerList, problems: ProblemList) -> FullConfig:
        """Expand a parsed simple config."""
        return self.expand(read_simple_config(message, source, problems, retraining=True), layers, problems)

    def expand(self, simple: SimpleConfig, layers: LayerList, problems: ProblemList) -> FullConfig:
        """The full config of a model from a simple config without pruning.

        Raises:
            ConfigError: The config does not fit the model or asks for what cannot be done; all mistakes are listed.
        """
        self.check_skips(simple, layers, problems)
        self.check_blocks(blocks_with(simple.blocks, self.quant_blocks), layers, problems)
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
        return simple.expanded(self.simple_globals(simple), expanded, problems)

    def check_skips(self, simple: SimpleConfig, layers: LayerList, problems: ProblemList) -> None:
        """Report names in the skip lists that are unknown or cannot be quantized."""
        for kind in ("", "quant_"):
            simple.check_skips(kind, layers, tuple(self.types), problems)

    def read_choice(self, choice: Choice) -> QuantBlock:
        """The algorithms of the message that applies to a layer."""
        return self.read(*(part(choice, name) for name in self.quant_blocks))

    # -- full config ---------------------------------------------------------------------------------------------------

    def read_layers(
        self, root: JsonNode, model: LayerList, written: Mapping[str, Any], problems: ProblemList
    ) -> tuple[LayerBlock, ...]:
        """The layers of a JSON config, in model order; a config without a layer to quantize is reported."""
        read = super().read_layers(root, model, written, problems)
        if not problems and not any(layer.data[self.switch_key] for layer in read):
            problems.add(f"no layer is switched on. Set {self.switch_key} to true for at least one.", root.position)
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
        activation, weight = (
            self.read_block(key, members.get(key), f"{layer.name}.{key}", problems)
            for key in (self.data_key, self.weight_key)
        )
        block = QuantBlock(activation=activation, weight=weight)
        for key, message in (*self.illegal(block), *self.unsupported(layer, block)):
            problems.add(f"{label(layer)}: {message}", block.position(key))

        def note(key: str, what: str) -> None:
            if target.data[self.switch_key]:
                problems.adjust(layer.name, what, block.position(key), anywhere=True)

        self.write(block, self.fit(layer, block, note), target)

    def write(self, block: QuantBlock, changed: Mapping[str, Any], target: LayerBlock) -> None:
        """Add the blocks of a layer; ``changed`` has weight settings, by dotted key, that a rule replaces."""
        weight, origins, capability = block.weight, target.origins, self.types[target.type]
        target.data[self.data_key] = block.activation.write(self.data_key, NAME_KEY, origins, {})
        if not capability.weights:
            return
        channel_wise = weight.given.get("channel_wise", capability.channel_wise)
        target.data[self.weight_key] = weight.write(
            self.weight_key, NAME_KEY, origins, changed, channel_wise=channel_wise
        )

    # -- plan ----------------------------------------------------------------------------------------------------------

    def make_plan(self, config: FullConfig, layers: Iterable[LayerInfo]) -> RetrainPlan:
        """Turn a full config, expanded or read, into the plan for the model it was checked against."""
        model = LayerList(layers)
        blocks = {layer.name: layer for layer in config.layers if self.switch_key in layer.data}
        common: dict[str, Any] = {
            "batch_num": config.fields.get("batch_num", 1),
            "force_fp16": config.fields.get("fakequant_precision_mode") == FORCE_FP16,
        }
        plans = tuple(
            RetrainLayerPlan(
                name=layer.name,
                type=layer.type,
                enabled=data[self.switch_key],
                activation=settings_of(data[self.data_key], self.activation, NAME_KEY),
                weight=settings_of(data.get(self.weight_key, {}), self.weight, NAME_KEY),
                quantizes_weights=self.weight_key in data,
                **common,
            )
            for layer in model.quantizable(self.types)
            if layer.name in blocks and (data := blocks[layer.name].data)
        )
        return RetrainPlan(
            source=config.source,
            layers=plans,
            not_quantized=MappingProxyType(
                reasons_not_quantized(model, self.types, blocks, switch_key=self.switch_key)
            ),
            warnings=config.warnings,
            **common,
        )


class QatExpander:
    """Fills in the quantization part of the full config, layer by layer."""

    def __init__(
        self, simple: SimpleConfig, dialect: QatDialect, problems: ProblemList, *, overrides_only: bool = False
    ) -> None:
        self.dialect = dialect
        self.problems = problems
        self.blocks = blocks_with(simple.blocks, dialect.quant_blocks)
        self.skips = simple.skips("quant_")
        self.overrides_only = overrides_only

    def enabled(self, layer: LayerInfo) -> tuple[bool, Origin]:
        """Whether a layer is quantized and why; an override switches a skipped layer on again."""
        override = self.blocks.by_layer.get(layer.name) or self.blocks.by_type.get(layer.type)
        skipped = self.skips.find(layer)
        if override is not None and not (skipped is not None and self.dialect.skip_wins):
            return True, override.origin
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
        if enabled:
            self._warn_of_resets(layer, choice)
        changed: dict[str, Any] = {}
        capability = self.dialect.types[layer.type]
        if block.weight.given.get("channel_wise") and capability.weights and not capability.channel_wise:
            key = f"{self.dialect.weight_key}.channel_wise"
            changed[key] = False
            note(key, "channel_wise does not apply to these layers, they are quantized per tensor")
        changed |= self.dialect.fit(layer, block, note)
        origins = {"": choice.origin, self.dialect.switch_key: why}
        target = LayerBlock(name=layer.name, type=layer.type, data={self.dialect.switch_key: enabled}, origins=origins)
        self.dialect.write(block, changed, target)
        return target

    def _warn_of_resets(self, layer: LayerInfo, choice: Choice) -> None:
        """Warn where an override in a file lacks a block, because it inherits nothing from the common one."""
        if choice.origin.level not in (Level.LAYER, Level.TYPE) or choice.block is None:
            return
        blocks = self.dialect.quant_blocks
        names = blocks if self.dialect.types[layer.type].weights else blocks[:1]
        missing = [name for name in names if not has(choice, name)]
        inherited = [name for name in missing if has(self.blocks.common, name)]
        if inherited or len(missing) == len(names):
            lacks = f"the override has no {' and no '.join(missing)}"
            what = f"{lacks}: built-in defaults apply{' instead of the global block' if inherited else ''}"
            self.problems.adjust(layer.name, what, choice.origin.position)


# -- The configs of quantization-aware training of PyTorch models ------------------------------------------------------
#
# The JSON has AMCT's keys in AMCT's order: version, precision mode, number of batches, then the layers in model order.


PRUNE_FIELDS = (PRUNE_BLOCK, "regular_prune_skip_layers", "regular_prune_skip_types")
MANDATORY = ("version", "batch_num")


@dataclass(frozen=True, kw_only=True)
class _TorchGlobals(CheckedSettings):
    version: Version = 1
    fakequant_precision_mode: Literal["DEFAULT", "FORCE_FP16_QUANT"] = "DEFAULT"
    batch_num: AtLeastOne = 1


class PyTorchQat(QatDialect):
    """The QAT types of torch.nn; bit widths are integer types, and only some pairs of them are possible."""

    message = "AMCTPytorchProto.AMCTRetrainConfig"
    schema = "pytorch"
    types = QAT_TYPES
    activations = RETRAIN_ACTIVATION
    weight = RETRAIN_WEIGHT
    globals = _TorchGlobals
    optional_globals = frozenset({MODE_KEY})
    part_name = "module"

    def expand(self, simple: SimpleConfig, layers: LayerList, problems: ProblemList) -> FullConfig:
        """The full config of a model; every field about pruning is reported."""
        what = "is about pruning, which quantization-aware training does not do. Remove it, or compress the model."
        for choice in simple.blocks.all():
            for name in PRUNE_FIELDS if choice is simple.blocks.common else PRUNE_FIELDS[:1]:
                if choice.block is not None and sets(choice.block, name):
                    problems.add(f"{name} {what}", choice.block.where(name, 0))
        return super().expand(simple, layers, problems)

    def illegal(self, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """16-bit activations with 4-bit weights."""
        if _types(block) == ("INT16", "INT4"):
            key = WEIGHT_KEY if "dst_type" in block.weight.given else DATA_KEY
            yield (
                f"{key}.dst_type",
                "INT16 activations cannot go with INT4 weights. Pairs that can: A8W8, A16W8, A8W4, A4W4.",
            )

    def fit(self, layer: LayerInfo, block: QuantBlock, note: Callable[[str, str], None]) -> dict[str, Any]:
        """4-bit weights that cannot be packed become 8-bit; unusual combinations only give a warning."""
        activation, weight = _types(block)
        changed = {}
        if weight == "INT4" and not layer.can_pack_int4:
            weight = changed[f"{WEIGHT_KEY}.dst_type"] = "INT8"
            what = "4-bit weights need one group and an even number of input channels, INT8 is used for these layers"
            note(f"{WEIGHT_KEY}.dst_type", what)
        if (activation, weight) == ("INT4", "INT8"):
            what = "AMCT does not train INT4 activations with INT8 weights, here they are trained"
            note(f"{DATA_KEY}.dst_type", what)
        if activation == "INT16" and not can_int16(layer):
            what = "INT16 activations can be trained, but not deployed to a chip, for these layers"
            note(f"{DATA_KEY}.dst_type", what)
        return changed

    def global_nodes(
        self, nodes: Mapping[str, JsonNode], root: JsonNode, model: LayerList, problems: ProblemList
    ) -> Mapping[str, JsonNode]:
        """Report missing mandatory fields."""
        for key in MANDATORY:
            if key not in nodes:
                problems.add(f'the key "{key}" is missing. Add "{key}":1.', root.position)
        return super().global_nodes(nodes, root, model, problems)


def _types(block: QuantBlock) -> tuple[str, str]:
    return block.activation.value("dst_type"), block.weight.value("dst_type")


PYTORCH_QAT = PyTorchQat()


# -- The configs of quantization-aware training of Caffe models --------------------------------------------------------
#
# The JSON has the guide's keys in the guide's order, layers in the order of the net. Two keys go beyond the guide and
# are written only when given: ``batch_num`` (the simple config has it) and ``fixed_clip`` (false: given clips are
# trained).


DST_TYPES = {DATA_KEY: ("INT8", "INT16"), WEIGHT_KEY: ("INT8",)}


@dataclass(frozen=True, kw_only=True)
class _CaffeGlobals(CheckedSettings):
    version: Version = 1
    batch_num: AtLeastOne = 1


class CaffeQat(QatDialect):
    """The QAT types of Caffe; a bit width is a number, and the simple config can also give it by ``dst_type``."""

    message = "AMCTCaffeProto.AMCTRetrainConfig"
    schema = "caffe_config"
    types = CAFFE_RETRAIN_TYPES
    activations = CAFFE_RETRAIN_ACTIVATION
    weight = CAFFE_RETRAIN_WEIGHT
    globals = _CaffeGlobals
    optional_globals = frozenset({"batch_num"})
    part_name = "layer"

    def read_choice(self, choice: Choice) -> QuantBlock:
        """The algorithms of a message; ``dst_type`` gives ``num_bits`` where that is not given."""
        block = super().read_choice(choice)
        return QuantBlock(
            activation=_with_dst_type(block.activation, part(choice, DATA_BLOCK), DATA_KEY),
            weight=_with_dst_type(block.weight, part(choice, WEIGHT_BLOCK), WEIGHT_KEY),
        )

    def illegal(self, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """A ``dst_type`` that Caffe does not have, or that contradicts ``num_bits``."""
        for key, half in ((DATA_KEY, block.activation), (WEIGHT_KEY, block.weight)):
            dst_type = half.given.get("dst_type")
            if dst_type is None:
                continue
            if dst_type not in DST_TYPES[key]:
                yield (
                    f"{key}.dst_type",
                    f"{half.algorithm.message}.dst_type must be {' or '.join(DST_TYPES[key])}, got {dst_type}",
                )
            elif bits_of(dst_type) != half.value("num_bits"):
                yield (
                    f"{key}.num_bits",
                    f"num_bits {half.value('num_bits')} contradicts dst_type {dst_type}. Keep one of them.",
                )

    def fit(self, layer: LayerInfo, block: QuantBlock, note: Callable[[str, str], None]) -> dict[str, Any]:  # noqa: ARG002  a dialect's signature
        """Nothing changes: every layer can have every bit width."""
        return {}


def _with_dst_type(block: AlgorithmBlock, choice: Choice, key: str) -> AlgorithmBlock:
    if choice.block is None or block.position is None:
        return block
    message = choice.block.get(block.algorithm.message)
    if not message.has("dst_type"):
        return block
    dst_type, position = message.get("dst_type"), message.where("dst_type")
    given, positions = {**block.given, "dst_type": dst_type}, {**block.positions, "dst_type": position}
    if dst_type in DST_TYPES[key] and "num_bits" not in given:
        given["num_bits"], positions["num_bits"] = bits_of(dst_type), position
    return replace(block, given=given, positions=positions)


CAFFE_QAT = CaffeQat()
