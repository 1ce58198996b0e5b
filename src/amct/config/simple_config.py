"""Configs as users write them: the simple config (``.cfg``), and the full config that it is expanded to (JSON).

``FullConfig`` is the step between a simple config and a plan. It is created by expanding a simple config for a model or
by reading a JSON file; ``to_json`` writes it with AMCT's keys in AMCT's order, and every value knows its origin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from amct.config.checks import shorten
from amct.config.layers import LayerInfo

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from amct.config.checks import ProblemList
    from amct.config.layers import LayerList
    from amct.errors import Position, Problem
    from amct.numerics.settings import (
        ActivationSettings,
        PruneSettings,
        RetrainActivationSettings,
        RetrainWeightSettings,
        WeightSettings,
    )
    from amct.schema import TextMessage


class Level(Enum):
    """The kind of origin of a setting; the value is its text in messages."""

    LAYER = "override of this layer"
    TYPE = "override of this layer type"
    COMMON = "common block"
    GLOBAL = "global field"
    ARGUMENT = "argument of the call"
    FILE = "config file"  # a full JSON config, where every layer has its own block
    RULE = "rule of the layer type"
    DEFAULT = "built-in default"


@dataclass(frozen=True)
class Origin:
    """The level and position of the origin of a setting."""

    level: Level
    position: Position | None = None

    def __str__(self) -> str:
        return f"{self.level.value} ({self.position})" if self.position else self.level.value


DEFAULT = Origin(Level.DEFAULT)


@dataclass(frozen=True, kw_only=True)
class LayerBlock:
    """The JSON block of one layer.

    Attributes:
        name: The layer.
        type: Its type name.
        data: The block as it is written.
        origins: The origin of each value, by its dotted key (``activation_quant_params.num_bits``); an empty key is for
            the whole block, a key that ends in a dot for a part with another origin.
        implied: Effective values that are not written, by their dotted keys.
    """

    name: str
    type: str
    data: dict[str, Any]
    origins: dict[str, Origin] = field(default_factory=dict)
    implied: dict[str, Any] = field(default_factory=dict)

    def origin(self, key: str) -> Origin:
        """The origin of a value; the built-in default if it has none."""
        return self.origins.get(key, DEFAULT)

    def block_origin(self, key: str) -> Origin:
        """The block of the file that applies to a value, whether or not the block sets it."""
        own = self.origins.get(f"{key.partition('.')[0]}.")
        return own or self.origin("")


@dataclass(frozen=True, kw_only=True)
class FullConfig:
    """A whole JSON config: global fields, then layers, both in the order they are written."""

    source: str
    fields: Mapping[str, Any]
    layers: tuple[LayerBlock, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data, in the order it is written."""
        return {**self.fields, **{layer.name: layer.data for layer in self.layers}}

    def to_json(self) -> str:
        """The text of the config file."""
        return format_json(self.to_dict())


@dataclass(frozen=True)
class ExplainedSetting:
    """One effective setting and its origin.

    Attributes:
        layer: The layer, empty for global fields.
        type: Its type.
        key: The dotted key in the JSON.
        value: The effective value.
        origin: The origin of the value.
        block: The block that applies to the layer as a whole. A value that it does not set is a built-in default,
            even if a block of lower precedence sets it.
    """

    layer: str
    type: str
    key: str
    value: Any
    origin: Origin
    block: Origin


def explain(config: FullConfig) -> tuple[ExplainedSetting, ...]:
    """Every effective setting of a config, in file order, with the file and line it comes from."""
    rows = []
    for key, value in _leaves(config.fields):
        origin = config.origins.get(key, DEFAULT)
        rows.append(ExplainedSetting("", "", key, value, origin, origin))
    for layer in config.layers:
        values = [*_leaves(layer.data), *layer.implied.items()]
        rows += [
            ExplainedSetting(layer.name, layer.type, key, value, layer.origin(key), layer.block_origin(key))
            for key, value in values
        ]
    return tuple(rows)


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not an object, by its dotted key; objects in a list are numbered."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for index, item in enumerate(value):
                yield from _leaves(item, f"{prefix}{key}[{index}].")
        else:
            yield f"{prefix}{key}", value


def format_json(data: Mapping[str, Any]) -> str:
    r"""The text of a config file in AMCT's layout, without a newline at the end; keys keep the order of ``data``.

    >>> format_json({"batch_num": 2, "skip_fusion_layers": []})
    '{\n    "batch_num":2,\n    "skip_fusion_layers":[]\n}'
    """
    return json.dumps(data, indent=4, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


# -- The simple config, with the blocks and lists of names of every dialect --------------------------------------------
#
# An override replaces the block of ``common_config`` as a whole and inherits nothing from it. The order is
# layer > type > common > built-in default. ``Choice`` records the block that applies with its origin, so that every
# effective setting can be traced to its line.


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Quantization settings of layers; missing ones take their defaults.

    Attributes:
        weights: ``ArqSettings``; ``AdaRoundSettings`` (PyTorch) or ``SnqSettings`` (Caffe).
        activations: ``IfmrSettings``, ``HfmgSettings`` (PyTorch, ONNX), or the settings of a registered algorithm.
        migration_strength: 0.2 to 0.8 balances the layer with DMQ before it is quantized (PyTorch, ONNX).
    """

    weights: WeightSettings | None = None
    activations: ActivationSettings | None = None
    migration_strength: float | None = None


@dataclass(frozen=True, kw_only=True)
class RetrainEntry:
    """What a config that is a Python object has in place of the blocks of a file; None: no such block."""

    activations: RetrainActivationSettings | None = None
    weights: RetrainWeightSettings | None = None
    prune: PruneSettings | None = None


@dataclass(frozen=True)
class Choice:
    """The block that applies to a layer, and its origin: from a file, from a Python object, or only defaults."""

    block: TextMessage | None
    origin: Origin
    entry: LayerConfig | RetrainEntry | None = None


NO_BLOCK = Choice(None, DEFAULT)
"""Only defaults apply."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """All blocks of a simple config."""

    common: Choice = NO_BLOCK
    by_type: Mapping[str, Choice] = field(default_factory=dict)
    by_layer: Mapping[str, Choice] = field(default_factory=dict)

    def choose(self, layer: LayerInfo) -> Choice:
        """The block of the layer, else of its type, else the common one, else none."""
        return self.by_layer.get(layer.name) or self.by_type.get(layer.type) or self.common

    def overridden(self, layers: LayerList, types: Collection[str]) -> Iterator[tuple[Choice, LayerInfo]]:
        """Each override of a type or layer that can be overridden, with the layer; a type is one without a name."""
        for layer_type, choice in self.by_type.items():
            if layer_type in types:
                average = any(layer.average_pooling for layer in layers if layer.type == layer_type)
                yield choice, LayerInfo(name="", type=layer_type, average_pooling=average)
        for name, choice in self.by_layer.items():
            layer = layers.find(name)
            if layer is not None and layer.type in types:
                yield choice, layer

    def overrides(self) -> Iterator[Choice]:
        """Every override, types first."""
        yield from self.by_type.values()
        yield from self.by_layer.values()

    def all(self) -> Iterator[Choice]:
        """Every block of the file once: common, types, layers."""
        yield self.common
        yield from self.overrides()


def read_common(message: TextMessage, name: str) -> Choice:
    """The common block of a simple config, such as its ``common_config``."""
    if not message.has(name):
        return NO_BLOCK
    return Choice(message.get(name), Origin(Level.COMMON, message.where(name)))


def read_overrides(
    entries: Iterable[TextMessage], key: str, block_field: str | None, problems: ProblemList
) -> dict[str, Choice]:
    """The overrides of a simple config by layer name or type; a repeated name is a mistake.

    Args:
        entries: The repeated override messages.
        key: ``layer_name`` or ``layer_type``.
        block_field: The field that holds the block; None: the entry itself is the block (retraining).
        problems: Collects the repeated names.
    """
    level = Level.LAYER if key == "layer_name" else Level.TYPE
    chosen: dict[str, Choice] = {}
    for entry in entries:
        name = entry.get(key)
        if name in chosen:
            first = chosen[name].origin.position
            where = f" (first in line {first.line})" if first else ""
            problems.add(f'{key} "{name}" is overridden more than once{where}. Keep one override.', entry.where(key))
        else:
            chosen[name] = Choice(entry.get(block_field) if block_field else entry, Origin(level, entry.position))
    return chosen


@dataclass(frozen=True)
class Named:
    """A name in a list, and its position (None for a function argument)."""

    name: str
    position: Position | None = None


class SkipList:
    """The layers and types that a config switches off, with the position of each."""

    def __init__(self, layers: Iterable[Named] = (), types: Iterable[Named] = ()) -> None:
        self._origins: dict[tuple[str, str], Origin] = {}
        for kind, names in (("layer", layers), ("type", types)):
            for named in names:
                level = Level.GLOBAL if named.position else Level.ARGUMENT
                self._origins.setdefault((kind, named.name), Origin(level, named.position))

    def find(self, layer: LayerInfo) -> Origin | None:
        """The entry that switches off a layer or its type; None if it is on."""
        return self._origins.get(("layer", layer.name)) or self._origins.get(("type", layer.type))


def named(choices: Mapping[str, Choice]) -> tuple[Named, ...]:
    """The names of overrides, with their positions."""
    return tuple(Named(name, choice.origin.position) for name, choice in choices.items())


def read_names(message: TextMessage, field: str) -> tuple[Named, ...]:
    """The names of a repeated string field, in file order."""
    return tuple(Named(name, message.where(field, index)) for index, name in enumerate(message.all(field)))


def without_repeats(
    names: Iterable[Named], field: str, problems: ProblemList, *, only_warn: bool = False
) -> tuple[Named, ...]:
    """Each name once; a repeated name is a mistake, or a warning with ``only_warn``."""
    kept: dict[str, Named] = {}
    for named in names:
        if named.name in kept:
            message = f'"{shorten(named.name)}" is repeated in {field}. Name it once.'
            (problems.warn if only_warn else problems.add)(message, named.position)
        kept.setdefault(named.name, named)
    return tuple(kept.values())


def check_layer_names(
    names: Iterable[Named],
    field: str,
    layers: LayerList,
    types: Collection[str],
    problems: ProblemList,
    *,
    verb: str = "quantized",
) -> None:
    """Report names that are not in the model and layers whose type cannot be ``verb``."""
    for named in names:
        layer = layers.find(named.name)
        if layer is None:
            problems.add_unknown(f"{field}: the layer", named.name, layers.names, named.position)
        elif layer.type not in types:
            problems.add(
                f'{field}: the layer "{layer.name}" is of type {layer.type}, which cannot be {verb}.{_listing(types)}',
                named.position,
            )


def check_type_names(
    names: Iterable[Named], field: str, types: Collection[str], problems: ProblemList, *, verb: str = "quantized"
) -> None:
    """Report layer types that cannot be ``verb``."""
    for named in names:
        if named.name not in types:
            hint = problems.nearest(named.name, types) or _listing(types)
            problems.add(f'{field}: the layer type "{shorten(named.name)}" cannot be {verb}.{hint}', named.position)


def _listing(types: Collection[str]) -> str:
    """The types that a user can choose from, if they are few enough to list."""
    return f" Types that can: {', '.join(types)}." if len(types) <= 12 else ""


LAYER_OVERRIDES = "override_layer_configs"
TYPE_OVERRIDES = "override_layer_types"
FUSION_SKIPS = "skip_fusion_layers"
_SCALARS = (
    "batch_num", "activation_offset", "do_fusion", "fakequant_precision_mode", "weight_rounding", "bias_correction",
)  # fmt: skip
_LISTS = (
    "skip_layers", "skip_layer_types", FUSION_SKIPS, "quant_skip_layers", "quant_skip_types",
    "regular_prune_skip_layers", "regular_prune_skip_types",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimpleConfig:
    """The content of a simple config, or of an equivalent Python object or function call; else all defaults.

    Attributes:
        source: The file, or the function that was called without one.
        fields: The global fields that it gives, as the JSON has them.
        origins: The origin of each of them.
        names: The lists of layer names and types, by field.
        blocks: What applies to which layer. In retraining the common block is the whole file: data, weight and prune
            blocks stand side by side there and in each override.
    """

    source: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    names: Mapping[str, tuple[Named, ...]] = field(default_factory=dict)
    blocks: Blocks = field(default_factory=Blocks)

    def skips(self, kind: str = "") -> SkipList:
        """The lists for everything, and those of one kind (``quant_`` or ``regular_prune_``)."""
        lists = dict.fromkeys((_skip_fields(""), _skip_fields(kind)))
        layers, types = (
            [name for key in keys for name in self.names.get(key, ())] for keys in zip(*lists, strict=True)
        )
        return SkipList(layers, types)

    def expanded(self, fields: Mapping[str, Any], layers: tuple[LayerBlock, ...], problems: ProblemList) -> FullConfig:
        """The full config that it makes with these global fields and layers."""
        return FullConfig(
            source=self.source, fields=fields, layers=layers, origins=self.origins, warnings=problems.warnings
        )

    def check_skips(
        self, kind: str, layers: LayerList, types: Collection[str], problems: ProblemList, *, verb: str = "quantized"
    ) -> None:
        """Report names in the skip lists of one kind ("" for everything) that are unknown or cannot be ``verb``."""
        by_layer, by_type = _skip_fields(kind)
        check_layer_names(self.names.get(by_layer, ()), by_layer, layers, types, problems, verb=verb)
        check_type_names(self.names.get(by_type, ()), by_type, types, problems, verb=verb)


def _skip_fields(kind: str) -> tuple[str, str]:
    return f"{kind}skip_layers", f"{kind}skip_types" if kind else "skip_layer_types"


def sets(message: TextMessage, name: str) -> bool:
    """Whether a message sets a field; one that its dialect does not have is never set."""
    return name in message.descriptor.fields_by_name and message.has(name)


def read_simple_config(
    message: TextMessage, source: str, problems: ProblemList, *, retraining: bool = False
) -> SimpleConfig:
    """Read a parsed ``.cfg``; repeated overrides and names are reported, in retraining such names with a warning."""
    fields: dict[str, Any] = {name: message.get(name) for name in _SCALARS if sets(message, name)}
    origins = {name: Origin(Level.GLOBAL, message.where(name)) for name in fields}
    check_batch_num(fields.get("batch_num", 1), origins.get("batch_num", DEFAULT), problems)
    names = {
        name: without_repeats(read_names(message, name), name, problems, only_warn=retraining)
        for name in _LISTS
        if sets(message, name)
    }
    if FUSION_SKIPS in names:
        fields[FUSION_SKIPS] = [named.name for named in names[FUSION_SKIPS]]
        origins[FUSION_SKIPS] = Origin(Level.GLOBAL, message.where(FUSION_SKIPS, 0))
    block = None if retraining else "calibration_config"
    whole = Choice(message, Origin(Level.COMMON, message.position))
    blocks = Blocks(
        common=whole if retraining else read_common(message, "common_config"),
        by_type=read_overrides(message.all(TYPE_OVERRIDES), "layer_type", block, problems),
        by_layer=read_overrides(message.all(LAYER_OVERRIDES), "layer_name", block, problems),
    )
    return SimpleConfig(source=source, fields=fields, origins=origins, names=names, blocks=blocks)


def check_batch_num(batch_num: int, origin: Origin, problems: ProblemList) -> None:
    """Report a number of batches below 1."""
    if batch_num < 1:
        problems.add(f"batch_num must be at least 1, got {batch_num}", origin.position)
