"""From a config to chains with the channels that AMCT removes: which layers, how many channels, which ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from amct.config.layers import SELECTIVE_PRUNE_TYPES, LayerInfo, LayerList
from amct.errors import ModelError
from amct.model import Skip
from amct.numerics.pruning.channels import balanced_l2_scores, lowest_channels, remaining_channels
from amct.numerics.settings import FilterPruneSettings
from amct.pytorch.capture.program_reader import read_program
from amct.pytorch.pruning.amct_reach import Chain, ChainFinder
from amct.record import PruneNode, PruneRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.config.plan import PrunePlan
    from amct.pytorch.capture.program_reader import Program
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.pruning.amct_reach import Link


def captured(traced: Traced) -> Program:
    """The program of a traced model.

    Raises:
        ModelError: The model could not be captured.
    """
    if traced.program is None:
        raise ModelError(
            f"{type(traced.model).__name__} cannot be pruned, because it cannot be captured as a program: "
            f"{traced.failure}. Express this by operations on tensors"
        )
    return read_program(traced.program)


def prunable_layers(traced: Traced) -> LayerList:
    """The layers of a model in the form that configs need, with what matters for pruning."""
    program = captured(traced)
    calls: dict[str, list[int]] = {}
    for operation in program.operations:
        weight, given = operation.operand(1), operation.operand(0)
        if weight is not None and weight.parameter and given is not None:
            calls.setdefault(weight.parameter.rpartition(".")[0], []).append(len(given.shape or ()))
    modules = dict(traced.model.named_modules(remove_duplicate=False))
    return LayerList(_prunable(layer, modules.get(layer.name), calls) for layer in traced.config_layers())


def _prunable(layer: LayerInfo, module: nn.Module | None, calls: Mapping[str, Sequence[int]]) -> LayerInfo:
    if not isinstance(module, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d)):
        return layer
    ranks = calls.get(layer.name, ())
    refusal = None
    if not ranks:
        refusal = "it is not called in forward"
    elif len(ranks) > 1:
        refusal = f"it is called {len(ranks)} times in one forward"
    elif not isinstance(module, nn.Linear) and ranks[0] != 4:
        refusal = "its input has no batch dimension"
    depthwise = isinstance(module, nn.Conv2d) and module.groups == module.in_channels
    return replace(layer, depthwise=depthwise, prune_refusal=refusal)


def find_chains(traced: Traced, plan: PrunePlan) -> list[Chain]:
    """The chains of the layers that a plan prunes, with those that ended."""
    modules = dict(traced.model.named_modules(remove_duplicate=False))
    return ChainFinder(captured(traced), modules, {layer.name for layer in plan.filters}).find()


def chain_skips(
    chains: Sequence[Chain], plan: PrunePlan, records: Sequence[PruneRecord], types: Mapping[str, str]
) -> tuple[Skip, ...]:
    """Every layer of a type that can be pruned and keeps its channels, with the reason.

    Args:
        chains: All chains.
        plan: What the config asks for.
        records: The chains that are pruned.
        types: The type of every module.
    """
    pruned = {node.name for record in records for node in record.producers if node.prune_index}
    reasons = {name: reason for name, reason in plan.not_pruned.items() if types.get(name) in SELECTIVE_PRUNE_TYPES}
    for chain in chains:
        for link in chain.producers:
            if link.name not in pruned:
                reasons[link.name] = chain.ended or f"the ratio leaves all of its {chain.size} channels"
    sparse = {layer.name for layer in plan.selective}
    return tuple(Skip(name, reason) for name, reason in reasons.items() if name not in sparse)


def removed_count(chain: Chain, plan: PrunePlan) -> int:
    """How many channels of a chain its plan removes."""
    layers = {layer.name: layer.settings for layer in plan.filters}
    settings = (layers[link.name] for link in chain.producers)
    filters = [each for each in settings if isinstance(each, FilterPruneSettings)]
    remain = remaining_channels(
        chain.size,
        min(each.prune_ratio for each in filters),
        ascend=any(each.ascend_optimized for each in filters),
        groups=chain.prune_group,
    )
    return max(chain.size - remain, 0)


def chosen_chains(traced: Traced, plan: PrunePlan, chains: Sequence[Chain]) -> list[PruneRecord]:
    """The chains of a record, with the channels that the plan removes; one that loses none has no ``prune_index``."""
    found = []
    for chain in chains:
        if chain.ended is not None:
            continue
        modules = [traced.model.get_submodule(link.name) for link in chain.producers]
        weights = [module.weight for module in modules if isinstance(module, (nn.Conv2d, nn.Linear))]
        remain = chain.size - removed_count(chain, plan)
        removed = lowest_channels(balanced_l2_scores(weights), remain, chain.prune_group)
        found.append(
            PruneRecord(
                producers=tuple(_node(link, removed, chain.prune_group) for link in chain.producers),
                consumers=tuple(_node(link, removed, chain.prune_group) for link in chain.consumers),
            )
        )
    return found


def _node(link: Link, removed: Sequence[int], prune_group: int) -> PruneNode:
    more: dict[str, int] = {}
    if link.group > 1:
        more["group"] = link.group
    if prune_group > 1:
        more["prune_group"] = prune_group
    shifted = [index + link.begin for index in removed]
    return PruneNode.channels(link.name, link.type, link.begin, link.end, shifted, **more)
