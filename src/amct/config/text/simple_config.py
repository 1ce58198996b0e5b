"""The parts of a simple config (``.cfg``) of post-training quantization that PyTorch and Caffe share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from amct.config.precedence import DEFAULT, Blocks, Level, Origin, read_common, read_overrides
from amct.config.text.names import (
    Named,
    SkipList,
    check_layer_names,
    check_type_names,
    named,
    read_names,
    without_repeats,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from amct.config.layers import LayerInfo, LayerList
    from amct.config.problems import ProblemList
    from amct.schema import TextMessage


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
    for warning in message.warnings:
        problems.warn(warning.message, warning.position)
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
