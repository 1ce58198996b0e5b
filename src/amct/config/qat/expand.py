"""Quantization-aware training: from a simple config to the full JSON config, for both dialects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.config.full_config import FullConfig, LayerBlock
from amct.config.layers import LayerInfo, LayerList
from amct.config.precedence import DEFAULT, Level, Origin
from amct.config.qat.dialect import DATA_KEY, NAME_KEY, SWITCH_KEY, WEIGHT_KEY
from amct.config.qat.simple import LAYER_OVERRIDES, QUANT_BLOCKS, TYPE_OVERRIDES, RetrainSimple
from amct.config.text.names import Named, check_layer_names, check_type_names
from amct.config.text.simple_config import Adjustments, quantizable_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from amct.config.precedence import Choice
    from amct.config.problems import ProblemList
    from amct.config.qat.dialect import QatDialect, QuantBlock

VERSION = 1


def expand_quantization(
    simple: RetrainSimple, layers: LayerList, dialect: QatDialect, fields: Mapping[str, Any], problems: ProblemList
) -> FullConfig:
    """The full config of a model from a simple config that speaks of quantization only.

    Raises:
        ConfigError: The config does not fit the model or asks for what cannot be done; all mistakes are listed.
    """
    for name in ("skip_layers", "quant_skip_layers"):
        check_layer_names(simple.names.get(name, ()), name, layers, tuple(dialect.types), problems)
    for name in ("skip_layer_types", "quant_skip_types"):
        check_type_names(simple.names.get(name, ()), name, tuple(dialect.types), problems)
    check_quantization(simple, layers, dialect, problems)
    adjustments = Adjustments()
    expander = QatExpander(simple, dialect, adjustments)
    check_something_left(expander, layers, problems)
    problems.raise_all()
    expanded = []
    for layer in quantizable_layers(layers, dialect.types):
        data, origins = expander.expand(layer)
        expanded.append(LayerBlock(name=layer.name, type=layer.type, data=data, origins=origins))
    adjustments.report(problems)
    warn_of_refused(expander, layers, problems)
    return FullConfig(
        source=simple.source,
        fields=fields,
        layers=tuple(expanded),
        origins=simple.origins,
        warnings=problems.warnings,
    )


def check_quantization(simple: RetrainSimple, layers: LayerList, dialect: QatDialect, problems: ProblemList) -> None:
    """Report overrides of unknown names, values that are wrong, and what a layer or type cannot do."""
    blocks = simple.blocks(QUANT_BLOCKS)
    check_layer_names(named(blocks.by_layer), LAYER_OVERRIDES, layers, tuple(dialect.types), problems)
    check_type_names(named(blocks.by_type), TYPE_OVERRIDES, tuple(dialect.types), problems)
    for choice in blocks.all():
        dialect.check(dialect.read(choice), problems)
    for layer_type, choice in blocks.by_type.items():
        if layer_type in dialect.types:
            _check_override(choice, f"type {layer_type}", LayerInfo(name="", type=layer_type), dialect, problems)
    for name, choice in blocks.by_layer.items():
        layer = layers.find(name)
        if layer is not None and layer.type in dialect.types:
            _check_override(choice, f'layer "{name}"', layer, dialect, problems)
    check_reserved_names(quantizable_layers(layers, dialect.types), dialect, problems)


def _check_override(choice: Choice, who: str, layer: LayerInfo, dialect: QatDialect, problems: ProblemList) -> None:
    block = dialect.read(choice)
    for key, message in dialect.unsupported(who, layer, block):
        problems.add(message, block.position(key))


def check_reserved_names(layers: Iterable[LayerInfo], dialect: QatDialect, problems: ProblemList) -> None:
    """Report layers that are called like a global field of the JSON."""
    for layer in layers:
        if layer.name in dialect.global_keys:
            problems.add(
                f'the layer "{layer.name}" has the name of a global field of the config.'
                f" Rename the {dialect.part_name}."
            )


def named(choices: Mapping[str, Choice]) -> tuple[Named, ...]:
    """The names of overrides, with their places."""
    return tuple(Named(name, choice.origin.position) for name, choice in choices.items())


def check_something_left(expander: QatExpander, layers: LayerList, problems: ProblemList) -> None:
    """Report a model without a layer to quantize, and a config that switches off all of them."""
    types = expander.dialect.types
    quantizable = quantizable_layers(layers, types)
    if not quantizable:
        problems.add(f"the model has no layer that can be quantized. Types that can: {', '.join(types)}.")
    elif not any(expander.enabled(layer)[0] for layer in quantizable):
        problems.add(
            f"every layer that can be quantized ({len(quantizable)}) is switched off. Leave at least one.",
            expander.enabled(quantizable[0])[1].position,
        )


def warn_of_refused(expander: QatExpander, layers: LayerList, problems: ProblemList) -> None:
    """Warn of overrides that cannot act because the layer cannot be quantized."""
    for name, choice in expander.blocks.by_layer.items():
        layer = layers.find(name)
        if layer is not None and layer.refusal is not None:
            problems.warn(
                f'the override of "{name}" has no effect: the layer cannot be quantized ({layer.refusal})',
                choice.origin.position,
            )


class QatExpander:
    """Fills in the quantization part of one layer after the other."""

    def __init__(
        self, simple: RetrainSimple, dialect: QatDialect, adjustments: Adjustments, *, overrides_only: bool = False
    ) -> None:
        self.dialect = dialect
        self.adjustments = adjustments
        self.blocks = simple.blocks(QUANT_BLOCKS)
        self.skips = simple.skips("quant")
        self.overrides_only = overrides_only

    def override(self, layer: LayerInfo) -> Choice | None:
        """The override of a layer or of its type."""
        return self.blocks.by_layer.get(layer.name) or self.blocks.by_type.get(layer.type)

    def enabled(self, layer: LayerInfo) -> tuple[bool, Origin]:
        """Whether a layer is quantized and why; an override switches a skipped layer on again."""
        override = self.override(layer)
        if override is not None:
            return True, override.origin
        skipped = self.skips.find(layer)
        if skipped is not None:
            return False, skipped
        return not self.overrides_only, DEFAULT

    def expand(self, layer: LayerInfo) -> tuple[dict[str, Any], dict[str, Origin]]:
        """The JSON keys of a layer and the origin of each value."""
        choice = self.blocks.choose(layer)
        block = self.dialect.read(choice)
        enabled, why = self.enabled(layer)
        note = self.noting(layer, block, enabled=enabled)
        skipped = self.skips.find(layer)
        if enabled and skipped is not None:
            what = "quantized although skipped, because an override speaks of these layers"
            self.adjustments.note(layer.name, what, why.position)
        origins = {
            "": choice.origin,
            SWITCH_KEY: why,
            **block.activation.origins(DATA_KEY, NAME_KEY),
            **block.weight.origins(WEIGHT_KEY, NAME_KEY),
        }
        changed = self.changed(layer, block, note)
        for key in changed.keys() & block.weight.given.keys():
            if changed[key] != block.weight.given[key]:
                origins[f"{WEIGHT_KEY}.{key}"] = Origin(Level.RULE, block.weight.positions[key])
        data = {
            SWITCH_KEY: enabled,
            DATA_KEY: block.activation.to_json(NAME_KEY),
            WEIGHT_KEY: block.weight.to_json(NAME_KEY, **changed),
        }
        return data, origins

    def noting(self, layer: LayerInfo, block: QuantBlock, *, enabled: bool) -> Callable[[str, str], None]:
        """A function that notes an adjustment; of a layer that is switched off nobody needs to hear."""

        def note(key: str, what: str) -> None:
            if enabled:
                self.adjustments.note(layer.name, what, block.position(key))

        return note

    def changed(self, layer: LayerInfo, block: QuantBlock, note: Callable[[str, str], None]) -> dict[str, Any]:
        """The weight settings that are not as the block has them."""
        possible = self.dialect.types[layer.type]
        channel_wise = block.weight.given.get("channel_wise", possible)
        if channel_wise and not possible:
            channel_wise = False
            what = "channel_wise does not apply to these layers, they are quantized per tensor"
            note(f"{WEIGHT_KEY}.channel_wise", what)
        return {"channel_wise": channel_wise, **self.dialect.fit(layer, block, note)}
