"""The simple config (``.cfg``) of post-training quantization, and the blocks and lists of names of every simple config.

An override replaces the block of ``common_config`` as a whole and inherits nothing from it. The order is
layer > type > common > built-in default. ``Choice`` records the block that applies with its origin, so that every
effective setting can be traced to its line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from amct.config.checks import shorten
from amct.config.full_config import DEFAULT, Level, Origin

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from amct.config.checks import ProblemList
    from amct.config.layers import LayerInfo, LayerList
    from amct.errors import Position
    from amct.numerics.settings import (
        ActivationSettings,
        PruneSettings,
        RetrainActivationSettings,
        RetrainWeightSettings,
        WeightSettings,
    )
    from amct.schema import TextMessage


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

    def all(self) -> Iterable[Choice]:
        """Every block of the file once: common, types, layers."""
        yield self.common
        yield from self.by_type.values()
        yield from self.by_layer.values()


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


@dataclass(frozen=True, kw_only=True)
class SimpleConfig:
    """Global fields, lists of names and blocks of a simple config, or the equivalent function arguments.

    ``extra`` has the global fields of a single dialect, as written in the JSON.
    """

    source: str
    batch_num: int = 1
    activation_offset: bool = True
    do_fusion: bool = True
    skip_layers: tuple[Named, ...] = ()
    skip_layer_types: tuple[Named, ...] = ()
    skip_fusion_layers: tuple[Named, ...] = ()
    blocks: Blocks = field(default_factory=Blocks)
    extra: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)

    @cached_property
    def _skips(self) -> SkipList:
        return SkipList(self.skip_layers, self.skip_layer_types)

    def skipped(self, layer: LayerInfo) -> Origin | None:
        """The entry that switches off a layer or its type; None if it is on."""
        return self._skips.find(layer)

    def fields(self, keys: Collection[str]) -> dict[str, Any]:
        """The global fields of the JSON, in the order of ``keys``."""
        values = {
            "version": 1,
            "batch_num": self.batch_num,
            "activation_offset": self.activation_offset,
            "do_fusion": self.do_fusion,
            "skip_fusion_layers": [named.name for named in self.skip_fusion_layers],
            **self.extra,
        }
        return {key: values[key] for key in keys if key in values}


def read_simple_config(message: TextMessage, source: str, problems: ProblemList) -> SimpleConfig:
    """Read the common parts of a parsed ``.cfg``; repeated names are reported."""
    scalars: dict[str, Any] = {
        name: message.get(name) for name in ("batch_num", "activation_offset", "do_fusion") if message.has(name)
    }
    lists: dict[str, Any] = {
        name: without_repeats(read_names(message, name), name, problems)
        for name in ("skip_layers", "skip_layer_types", "skip_fusion_layers")
    }
    origins = {name: Origin(Level.GLOBAL, message.where(name)) for name in scalars}
    if lists["skip_fusion_layers"]:
        origins["skip_fusion_layers"] = Origin(Level.GLOBAL, message.where("skip_fusion_layers", 0))
    return SimpleConfig(source=source, blocks=_read_blocks(message, problems), origins=origins, **scalars, **lists)


def _read_blocks(message: TextMessage, problems: ProblemList) -> Blocks:
    by_type, by_layer = message.all("override_layer_types"), message.all("override_layer_configs")
    return Blocks(
        common=read_common(message, "common_config"),
        by_type=read_overrides(by_type, "layer_type", "calibration_config", problems),
        by_layer=read_overrides(by_layer, "layer_name", "calibration_config", problems),
    )


def check_simple_config(
    config: SimpleConfig,
    layers: LayerList,
    types: Collection[str],
    fusible_types: Collection[str],
    problems: ProblemList,
) -> None:
    """Report unknown names, types that cannot be quantized, and a config without a layer to quantize."""
    if config.batch_num < 1:
        position = config.origins.get("batch_num", DEFAULT).position
        problems.add(f"batch_num must be at least 1, got {config.batch_num}", position)
    check_layer_names(config.skip_layers, "skip_layers", layers, types, problems)
    check_type_names(config.skip_layer_types, "skip_layer_types", types, problems)
    check_layer_names(
        config.skip_fusion_layers, "skip_fusion_layers", layers, fusible_types, problems, verb="fused with BatchNorm"
    )
    check_layer_names(named(config.blocks.by_layer), "override_layer_configs", layers, types, problems)
    check_type_names(named(config.blocks.by_type), "override_layer_types", types, problems)
    _check_something_left(config, layers, types, problems)


def _check_something_left(
    config: SimpleConfig, layers: LayerList, types: Collection[str], problems: ProblemList
) -> None:
    quantizable = layers.quantizable(types)
    if not quantizable:
        problems.add(layers.why_none_quantizable(types))
    elif all(config.skipped(layer) for layer in quantizable):
        first = config.skipped(quantizable[0])
        problems.add(
            f"skip_layers and skip_layer_types switch off every layer that can be quantized ({len(quantizable)})."
            " Leave at least one.",
            first.position if first else None,
        )
