"""Pruning: a simple config, checked against a model and expanded for its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.config.dialect import label
from amct.config.layers import LayerInfo, LayerList
from amct.config.precedence import Level, Origin
from amct.config.prune.pruners import METHODS, NAME_KEY, Pruner, check_pruner, read_pruner
from amct.config.ptq.pytorch_types import SELECTIVE_PRUNE_TYPES
from amct.config.qat.simple import LAYER_OVERRIDES, PRUNE_BLOCK, TYPE_OVERRIDES, RetrainSimple, part
from amct.config.text.names import check_layer_names, check_type_names, named

if TYPE_CHECKING:
    from amct.config.precedence import Choice
    from amct.config.problems import ProblemList
    from amct.config.prune.pruners import PruneMethod

PRUNE_SWITCH_KEY = "regular_prune_enable"
PRUNE_KEY = "regular_prune_config"
PRUNE_TYPE_KEY = "prune_type"
SKIP_LAYERS = "regular_prune_skip_layers"


class PruneExpander:
    """Fills in the pruning part of the full config, layer by layer."""

    def __init__(self, simple: RetrainSimple, problems: ProblemList) -> None:
        self.simple, self.problems = simple, problems
        self.blocks = simple.blocks((PRUNE_BLOCK,))
        self.skips = simple.skips("regular_prune_")

    def methods(self) -> tuple[PruneMethod, ...]:
        """The pruning methods that the config uses; both when it uses none."""
        pruners = [read_pruner(part(choice, PRUNE_BLOCK)) for choice in self.blocks.all()]
        used = {pruner.method.prune_type for pruner in pruners if pruner is not None}
        return tuple(method for method in METHODS if method.prune_type in used) or METHODS

    def check(self, layers: LayerList) -> None:
        """Report names, types and values that are wrong."""
        problems = self.problems
        for choice in self.blocks.all():
            check_pruner(part(choice, PRUNE_BLOCK), problems)
        self._check_skips(layers)
        overridden = named(self.blocks.by_layer)
        check_layer_names(overridden, LAYER_OVERRIDES, layers, SELECTIVE_PRUNE_TYPES, problems, verb="pruned")
        check_type_names(named(self.blocks.by_type), TYPE_OVERRIDES, SELECTIVE_PRUNE_TYPES, problems, verb="pruned")
        for name, choice in self.blocks.by_layer.items():
            layer = layers.find(name)
            if layer is not None and layer.type in SELECTIVE_PRUNE_TYPES:
                _check_override(choice, layer, problems)
        for layer_type, choice in self.blocks.by_type.items():
            if layer_type in SELECTIVE_PRUNE_TYPES:
                _check_override(choice, LayerInfo(name="", type=layer_type), problems)

    def _check_skips(self, layers: LayerList) -> None:
        methods = self.methods()
        types = [name for name in SELECTIVE_PRUNE_TYPES if any(name in method.types for method in methods)]
        self.simple.check_skips("regular_prune_", layers, types, self.problems, verb="pruned")
        for item in self.simple.names.get(SKIP_LAYERS, ()):
            layer = layers.find(item.name)
            if layer is None or layer.type not in types:
                continue
            reasons = [method.refusal(layer) for method in methods]
            if all(reasons):
                message = f'{SKIP_LAYERS}: the layer "{item.name}" needs no skipping: {reasons[0]}. Remove it.'
                self.problems.add(message, item.position)

    def expand(self, layer: LayerInfo) -> tuple[dict[str, Any], dict[str, Origin]] | None:
        """The JSON keys of a layer and the origin of each value; None when no pruner of the config can prune it."""
        choice = self.blocks.choose(layer)
        pruner = read_pruner(part(choice, PRUNE_BLOCK))
        if pruner is None or pruner.method.refusal(layer) is not None or layer.prune_refusal is not None:
            return None
        skipped = self.skips.find(layer)
        if skipped is not None and choice.origin.level in (Level.LAYER, Level.TYPE):
            what = "not pruned although overridden: a skipped layer stays as it is"
            self.problems.adjust(layer.name, what, skipped.position)
        return _written(pruner, skipped, choice.origin)

    def warn_of_refused(self, layers: LayerList) -> None:
        """Warn of overrides without effect because the layer cannot be pruned."""
        for name, choice in self.blocks.by_layer.items():
            layer = layers.find(name)
            if layer is not None and layer.prune_refusal is not None:
                what = f'the override of "{name}" has no effect: the layer cannot be pruned ({layer.prune_refusal})'
                self.problems.warn(what, choice.origin.position)


def _check_override(choice: Choice, layer: LayerInfo, problems: ProblemList) -> None:
    pruner = read_pruner(part(choice, PRUNE_BLOCK))
    reason = pruner.method.refusal(layer) if pruner is not None else None
    if reason is not None and choice.block is not None:
        problems.add(f"{label(layer)}: {reason}", choice.block.where(PRUNE_BLOCK))


def _written(pruner: Pruner, skipped: Origin | None, origin: Origin) -> tuple[dict[str, Any], dict[str, Origin]]:
    block = pruner.block
    origins = {"": origin, f"{PRUNE_KEY}.": origin, **block.origins(PRUNE_KEY, NAME_KEY)}
    origins[f"{PRUNE_KEY}.{PRUNE_TYPE_KEY}"] = Origin(origin.level, block.position)
    if skipped is not None:
        origins[PRUNE_SWITCH_KEY] = skipped
    config = {PRUNE_TYPE_KEY: pruner.method.prune_type, **block.to_json(NAME_KEY)}
    return {PRUNE_SWITCH_KEY: skipped is None, PRUNE_KEY: config}, origins
