"""Pruning, and pruning combined with quantization-aware training (PyTorch): from a simple config to a plan.

AMCT has no file between the two; the full config has the keys of AMCT's in-memory config, so that it can be explained
like any other. A ``prune_config`` anywhere in the file switches pruning on, a data or weight block anywhere switches
quantization on.

An override of pruning does not switch a skipped layer on again, one of quantization does. An override without a
quantization block does not change the quantization of its layers, one without a ``prune_config`` their pruning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amct.config.blocks import AlgorithmBlock, check_block, read_algorithm
from amct.config.checks import ProblemList
from amct.config.dialect import label, warn_of_refused
from amct.config.layers import FILTER_PRUNE_TYPES, QAT_TYPES, SELECTIVE_PRUNE_TYPES, LayerInfo, LayerList
from amct.config.plan import CompressionPlan, PruneLayerPlan, PrunePlan, settings_of
from amct.config.qat.dialect import (
    NAME_KEY,
    PRUNE_BLOCK,
    QUANT_BLOCKS,
    SWITCH_KEY,
    PyTorchQat,
    QatExpander,
    asks_for,
    blocks_with,
    has,
    part,
    where,
)
from amct.config.registry import FILTER_PRUNE, SELECTIVE_PRUNE
from amct.config.simple_config import (
    LAYER_OVERRIDES,
    TYPE_OVERRIDES,
    Blocks,
    Choice,
    FullConfig,
    LayerBlock,
    Level,
    Origin,
    RetrainEntry,
    SimpleConfig,
    check_layer_names,
    check_type_names,
    named,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from amct.config.registry import Algorithm
    from amct.numerics.settings import PruneSettings


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
        if layer.one_input_channel and not self.depthwise:
            return f"a convolution with one input channel cannot be {self.done}: AMCT takes it for a depthwise one"
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
    if isinstance(choice.entry, RetrainEntry):
        method = next(each for each in METHODS if type(choice.entry.prune) is each.algorithms[0].settings)
        return Pruner(method=method, block=read_algorithm(choice, method.oneof, method.algorithms))
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

    def __init__(self, simple: SimpleConfig, problems: ProblemList) -> None:
        self.simple, self.problems = simple, problems
        self.blocks = blocks_with(simple.blocks, (PRUNE_BLOCK,))
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
        for choice, layer in self.blocks.overridden(layers, SELECTIVE_PRUNE_TYPES):
            pruner = read_pruner(part(choice, PRUNE_BLOCK))
            reason = pruner.method.refusal(layer) if pruner is not None else None
            if reason is not None:
                problems.add(f"{label(layer)}: {reason}", where(choice, PRUNE_BLOCK))

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


def _written(pruner: Pruner, skipped: Origin | None, origin: Origin) -> tuple[dict[str, Any], dict[str, Origin]]:
    block = pruner.block
    origins = {"": origin, f"{PRUNE_KEY}.": origin, **block.origins(PRUNE_KEY, NAME_KEY)}
    origins[f"{PRUNE_KEY}.{PRUNE_TYPE_KEY}"] = Origin(origin.level, block.position)
    if skipped is not None:
        origins[PRUNE_SWITCH_KEY] = skipped
    config = {PRUNE_TYPE_KEY: pruner.method.prune_type, **block.to_json(NAME_KEY)}
    return {PRUNE_SWITCH_KEY: skipped is None, PRUNE_KEY: config}, origins


# -- the config --------------------------------------------------------------------------------------------------------


class CompressionDialect(PyTorchQat):
    """The configs of pruning alone, where blocks of quantization are accepted and ignored, or of both."""

    def __init__(self, *, quantizes: bool) -> None:
        self.quantizes = quantizes

    def expand(self, simple: SimpleConfig, layers: LayerList, problems: ProblemList) -> FullConfig:
        """The full config of a model from a simple config.

        Raises:
            ConfigError: It asks for nothing, does not fit the model or asks for what cannot be done; all mistakes are
                listed.
        """
        prunes = asks_for(simple.blocks, (PRUNE_BLOCK,))
        quantizes = self.quantizes and asks_for(simple.blocks, QUANT_BLOCKS)
        pruner = PruneExpander(simple, problems)
        overrides_only = not any(has(simple.blocks.common, name) for name in QUANT_BLOCKS)
        quantizer = QatExpander(simple, self, problems, overrides_only=overrides_only) if quantizes else None
        if not prunes and not quantizes:
            needed = (PRUNE_BLOCK, *(QUANT_BLOCKS if self.quantizes else ()))
            what = f"the config asks for nothing to be done. Add {' or '.join(needed)}."
            problems.add(what, simple.blocks.common.origin.position)
        compressible = tuple(QAT_TYPES)  # every type that can be pruned is among them
        simple.check_skips("", layers, compressible, problems, verb="compressed")
        if self.quantizes:
            simple.check_skips("quant_", layers, compressible, problems)
        pruner.check(layers)
        if quantizes:
            self.check_blocks(blocks_with(simple.blocks, QUANT_BLOCKS), layers, problems)
        problems.raise_all()
        expanded = [_expanded(layer, quantizer, pruner if prunes else None) for layer in layers]
        expanded = [config for config in expanded if config.data]
        asked = {"prune": (prunes, PRUNE_SWITCH_KEY), "quantize": (quantizes, SWITCH_KEY)}
        _check_something_left(asked, expanded, simple, problems)
        problems.raise_all()
        if quantizer is not None:
            warn_of_refused(quantizer.blocks, layers, problems)
            _warn_of_prune_only_overrides(simple, problems)
        warn_of_refused(pruner.blocks, layers, problems, verb="pruned")
        fields = self.simple_globals(simple)
        written = fields if quantizes else {"version": fields["version"]}
        return simple.expanded(written, tuple(expanded), problems)

    def compression_plan(self, config: FullConfig, layers: Iterable[LayerInfo]) -> CompressionPlan:
        """Turn an expanded config into the plan for the model it was expanded for."""
        model = LayerList(layers)
        prunes = any(PRUNE_KEY in layer.data for layer in config.layers)
        quantizes = any(SWITCH_KEY in layer.data for layer in config.layers)
        return CompressionPlan(
            source=config.source,
            prune=_prune_plan(config, model) if prunes else None,
            quant=replace(self.make_plan(config, model), warnings=()) if quantizes else None,
            warnings=config.warnings,
        )


def _expanded(layer: LayerInfo, quantizer: QatExpander | None, pruner: PruneExpander | None) -> LayerBlock:
    """The full config of one layer; without data when the layer is neither quantized nor pruned."""
    block = LayerBlock(name=layer.name, type=layer.type, data={})
    if quantizer is not None and layer.type in QAT_TYPES and layer.refusal is None:
        block = quantizer.expand(layer)
    if pruner is not None and (pruned := pruner.expand(layer)) is not None:
        data, origins = {**block.data, **pruned[0]}, {**pruned[1], **block.origins}
        block = LayerBlock(name=layer.name, type=layer.type, data=data, origins=origins)
    return block


def _check_something_left(
    asked: Mapping[str, tuple[bool, str]], expanded: Sequence[LayerBlock], simple: SimpleConfig, problems: ProblemList
) -> None:
    """Report a config without a layer to compress; warn when only pruning or only quantization has none."""
    left = {what: any(config.data.get(key) for config in expanded) for what, (_, key) in asked.items()}
    for what, (is_asked, _) in asked.items():
        if is_asked and not left[what]:
            message = f"there is no layer left to {what}. Look at the skip lists and the types of overrides."
            position = where(simple.blocks.common, PRUNE_BLOCK) if what == "prune" else None
            (problems.warn if any(left.values()) else problems.add)(message, position)


def _warn_of_prune_only_overrides(simple: SimpleConfig, problems: ProblemList) -> None:
    """Warn of a difference from AMCT, which resets the quantization of such layers to the defaults."""
    found = [
        item
        for choices in (simple.blocks.by_type, simple.blocks.by_layer)
        for item in named(choices)
        if has(choices[item.name], PRUNE_BLOCK) and not any(has(choices[item.name], name) for name in QUANT_BLOCKS)
    ]
    if found:
        names = ", ".join(item.name for item in found)
        what = "overrides with prune_config alone leave quantization as it is (AMCT resets it to the defaults)"
        problems.warn(f"{what}: {names}", found[0].position)


def _prune_plan(config: FullConfig, model: LayerList) -> PrunePlan:
    blocks = {layer.name: layer for layer in config.layers if PRUNE_KEY in layer.data}
    plans, reasons = [], {}
    for layer in model:
        if layer.name not in blocks:
            reasons[layer.name] = _why_not(layer)
            continue
        block = blocks[layer.name]
        enabled = block.data[PRUNE_SWITCH_KEY]
        if not enabled:
            reasons[layer.name] = f"switched off: {block.origin(PRUNE_SWITCH_KEY)}"
        data = dict(block.data[PRUNE_KEY])
        prune_type = data.pop(PRUNE_TYPE_KEY)
        method = next(item for item in METHODS if item.prune_type == prune_type)
        settings = settings_of(data, method.algorithms, NAME_KEY)
        plans.append(PruneLayerPlan(name=layer.name, type=layer.type, enabled=enabled, settings=settings))
    return PrunePlan(
        source=config.source,
        layers=tuple(plans),
        not_pruned=MappingProxyType(reasons),
        warnings=config.warnings,
    )


def _why_not(layer: LayerInfo) -> str:
    """Why a layer has no pruner of its own."""
    if layer.type not in SELECTIVE_PRUNE_TYPES:
        return f"{layer.type} cannot be pruned"
    if layer.prune_refusal is not None:
        return layer.prune_refusal
    reason = next((text for method in METHODS if (text := method.refusal(layer)) is not None), None)
    return f"{reason}, and the config has no other pruner for it" if reason else "the config has no pruner for it"


COMPRESSION = CompressionDialect(quantizes=True)
PRUNING = CompressionDialect(quantizes=False)


def uniform_pruning(settings: PruneSettings, source: str, layers: LayerList) -> PrunePlan:
    """The plan that prunes every layer that can be pruned in this way, all with the same settings."""
    whole = Choice(None, Origin(Level.COMMON), RetrainEntry(prune=settings))
    full = PRUNING.expand(SimpleConfig(source=source, blocks=Blocks(common=whole)), layers, ProblemList())
    plan = PRUNING.compression_plan(full, layers).prune
    assert plan is not None
    return plan
