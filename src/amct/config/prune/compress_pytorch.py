"""Pruning, and pruning combined with quantization-aware training (PyTorch): from a simple config to a plan.

AMCT has no file between the two; the full config has the keys of AMCT's in-memory config, so that it can be explained
like any other. A ``prune_config`` anywhere in the file switches pruning on, a data or weight block anywhere switches
quantization on.

An override of pruning does not switch a skipped layer on again, one of quantization does. An override without a
quantization block does not change the quantization of its layers, one without a ``prune_config`` their pruning.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from amct.config.checks import ProblemList
from amct.config.dialect import warn_of_refused
from amct.config.full_config import FullConfig, LayerBlock
from amct.config.layers import QAT_TYPES, SELECTIVE_PRUNE_TYPES, LayerInfo, LayerList
from amct.config.plan import CompressionPlan, PruneLayerPlan, PrunePlan, settings_of
from amct.config.prune.pruners import METHODS, NAME_KEY, PRUNE_KEY, PRUNE_SWITCH_KEY, PRUNE_TYPE_KEY, PruneExpander
from amct.config.qat.dialect import (
    PRUNE_BLOCK,
    QUANT_BLOCKS,
    SWITCH_KEY,
    QatExpander,
    RetrainSimple,
    read_retrain_simple,
    sets,
)
from amct.config.qat.pytorch import PYTORCH_QAT
from amct.config.simple_config import named
from amct.schema import descriptor, parse_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amct.config.simple_config import Named


def expand_config(text: str | bytes, source: str, layers: Iterable[LayerInfo], *, quantize: bool = True) -> FullConfig:
    """Expand a simple config for a model.

    Args:
        text: The content of the ``.cfg``.
        source: Its file name, for positions.
        layers: The layers of the model, in model order.
        quantize: Whether blocks of quantization count; pruning alone accepts and ignores them.

    Raises:
        ParseError: The text is not a simple config of retraining.
        ConfigError: It asks for nothing, does not fit the model or asks for what cannot be done; all mistakes are
            listed.
    """
    problems = ProblemList()
    message = parse_text(text, descriptor(PYTORCH_QAT.message, schema="pytorch"), source)
    simple = read_retrain_simple(message, source, problems)
    return _Compression(simple, LayerList(layers), problems, quantize=quantize).expand()


class _Compression:
    """One simple config and the model it is expanded for."""

    def __init__(self, simple: RetrainSimple, layers: LayerList, problems: ProblemList, *, quantize: bool) -> None:
        self.simple, self.layers, self.problems, self.quantize = simple, layers, problems, quantize
        self.prunes = simple.asks_for((PRUNE_BLOCK,))
        self.quantizes = quantize and simple.asks_for(QUANT_BLOCKS)
        self.pruner = PruneExpander(simple, problems)
        overrides_only = simple.blocks(QUANT_BLOCKS).common.block is None
        self.quantizer = QatExpander(simple, PYTORCH_QAT, problems, overrides_only=overrides_only)

    def expand(self) -> FullConfig:
        self.check()
        self.problems.raise_all()
        expanded = [config for config in map(self.layer, self.layers) if config.data]
        self.check_something_left(expanded)
        self.problems.raise_all()
        if self.quantizes:
            warn_of_refused(self.quantizer.blocks, self.layers, self.problems)
            self.warn_of_prune_only_overrides()
        self.pruner.warn_of_refused(self.layers)
        fields = PYTORCH_QAT.simple_globals(self.simple)
        return FullConfig(
            source=self.simple.source,
            fields=fields if self.quantizes else {"version": fields["version"]},
            layers=tuple(expanded),
            origins=self.simple.origins,
            warnings=self.problems.warnings,
        )

    def layer(self, layer: LayerInfo) -> LayerBlock:
        """The full config of one layer; without data when the layer is neither quantized nor pruned."""
        block = LayerBlock(name=layer.name, type=layer.type, data={})
        if self.quantizes and layer.type in QAT_TYPES and layer.refusal is None:
            block = self.quantizer.expand(layer)
        if self.prunes and (pruned := self.pruner.expand(layer)) is not None:
            data, origins = {**block.data, **pruned[0]}, {**pruned[1], **block.origins}
            block = LayerBlock(name=layer.name, type=layer.type, data=data, origins=origins)
        return block

    def check(self) -> None:
        if not self.prunes and not self.quantizes:
            needed = (PRUNE_BLOCK, *(QUANT_BLOCKS if self.quantize else ()))
            position = self.simple.message.position if self.simple.message else None
            self.problems.add(f"the config asks for nothing to be done. Add {' or '.join(needed)}.", position)
        compressible = tuple(QAT_TYPES)  # every type that can be pruned is among them
        self.simple.check_skips("", self.layers, compressible, self.problems, verb="compressed")
        if self.quantize:
            self.simple.check_skips("quant_", self.layers, compressible, self.problems)
        self.pruner.check(self.layers)
        if self.quantizes:
            PYTORCH_QAT.check_quantization(self.simple, self.layers, self.problems)

    def check_something_left(self, expanded: Sequence[LayerBlock]) -> None:
        """Report a config without a layer to compress; warn when only pruning or only quantization has none."""
        left = {
            "prune": any(config.data.get(PRUNE_SWITCH_KEY) for config in expanded),
            "quantize": any(config.data.get(SWITCH_KEY) for config in expanded),
        }
        asked = {"prune": self.prunes, "quantize": self.quantizes}
        empty = [what for what in asked if asked[what] and not left[what]]
        for what in empty:
            message = f"there is no layer left to {what}. Look at the skip lists and the types of overrides."
            position = self.simple.message.where(PRUNE_BLOCK) if what == "prune" and self.simple.message else None
            (self.problems.warn if any(left.values()) else self.problems.add)(message, position)

    def warn_of_prune_only_overrides(self) -> None:
        """Warn of a difference from AMCT, which resets the quantization of such layers to the defaults."""
        found: list[Named] = []
        for choices in (self.simple.by_type, self.simple.by_layer):
            for item in named(choices):
                block = choices[item.name].block
                assert block is not None
                if sets(block, PRUNE_BLOCK) and not any(sets(block, name) for name in QUANT_BLOCKS):
                    found.append(item)
        if found:
            names = ", ".join(item.name for item in found)
            what = "overrides with prune_config alone leave quantization as it is (AMCT resets it to the defaults)"
            self.problems.warn(f"{what}: {names}", found[0].position)


def make_plan(config: FullConfig, layers: Iterable[LayerInfo]) -> CompressionPlan:
    """Turn an expanded config into the plan for the model it was expanded for."""
    model = LayerList(layers)
    prunes = any(PRUNE_KEY in layer.data for layer in config.layers)
    quantizes = any(SWITCH_KEY in layer.data for layer in config.layers)
    return CompressionPlan(
        source=config.source,
        prune=_prune_plan(config, model) if prunes else None,
        quant=PYTORCH_QAT.make_plan(config, model) if quantizes else None,
        warnings=config.warnings,
    )


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
