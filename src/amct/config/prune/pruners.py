"""Pruning: the two methods, their blocks in a simple config, and a config expanded for the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct.config.blocks import AlgorithmBlock, check_block, read_algorithm
from amct.config.dialect import label
from amct.config.full_config import Level, Origin
from amct.config.layers import FILTER_PRUNE_TYPES, SELECTIVE_PRUNE_TYPES, LayerInfo, LayerList
from amct.config.qat.dialect import LAYER_OVERRIDES, PRUNE_BLOCK, TYPE_OVERRIDES, RetrainSimple, part
from amct.config.registry import FILTER_PRUNE, SELECTIVE_PRUNE
from amct.config.simple_config import Choice, check_layer_names, check_type_names, named

if TYPE_CHECKING:
    from amct.config.checks import ProblemList
    from amct.config.registry import Algorithm

NAME_KEY = "algo"


@dataclass(frozen=True, kw_only=True)
class PruneMethod:
    """One pruning method.

    Attributes:
        prune_type: Its name in AMCT's configs.
        field: The field of ``PruneConfig`` that chooses it.
        oneof: The oneof of that field's message that chooses the algorithm.
        algorithms: Its algorithms.
        types: The layer types that can be pruned by themselves.
        done: The participle of the method in messages.
        depthwise: Whether a depthwise convolution can be pruned by itself.
    """

    prune_type: str
    field: str
    oneof: str
    algorithms: tuple[Algorithm, ...]
    types: tuple[str, ...]
    done: str
    depthwise: bool

    def refusal(self, layer: LayerInfo) -> str | None:
        """Why this method cannot prune such a layer; None when it can."""
        if layer.type not in self.types:
            return f"{layer.type} cannot be {self.done}"
        if layer.depthwise and not self.depthwise:
            return f"a depthwise convolution cannot be {self.done}, it follows the layer before it"
        return None


FILTER = PruneMethod(
    prune_type="filter_prune",
    field="filter_pruner",
    oneof="filter_prune_algo",
    algorithms=FILTER_PRUNE,
    types=FILTER_PRUNE_TYPES,
    done="pruned by filters",
    depthwise=False,
)
SELECTIVE = PruneMethod(
    prune_type="selective_prune",
    field="n_out_of_m_pruner",
    oneof="n_out_of_m_prune_algo",
    algorithms=SELECTIVE_PRUNE,
    types=SELECTIVE_PRUNE_TYPES,
    done="pruned 4 to 2",
    depthwise=True,
)
METHODS = (FILTER, SELECTIVE)


@dataclass(frozen=True, kw_only=True)
class Pruner:
    """The method of a ``prune_config`` and the settings of its algorithm."""

    method: PruneMethod
    block: AlgorithmBlock


def read_pruner(choice: Choice) -> Pruner | None:
    """The pruner of a ``prune_config``; None when it names none (see ``check_pruner``)."""
    block = choice.block
    chosen = block.which("pruner") if block is not None else None
    if block is None or chosen is None:
        return None
    method = next(item for item in METHODS if item.field == chosen)
    inner = block.get(chosen)
    if inner.which(method.oneof) is None:
        return None
    return Pruner(method=method, block=read_algorithm(Choice(inner, choice.origin), method.oneof, method.algorithms))


def check_pruner(choice: Choice, problems: ProblemList) -> None:
    """Report a ``prune_config`` that names no pruner or no algorithm, and values out of range."""
    pruner, block = read_pruner(choice), choice.block
    if pruner is not None:
        check_block(pruner.block, NAME_KEY, problems)
    elif block is not None:
        chosen = block.which("pruner")
        if chosen is None:
            fields = " or ".join(method.field for method in METHODS)
            problems.add(f"prune_config names no pruner. Put {fields} into it.", choice.origin.position)
        else:
            method = next(item for item in METHODS if item.field == chosen)
            message = f"{chosen} names no algorithm. Put {method.algorithms[0].message} into it."
            problems.add(message, block.where(chosen))


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
