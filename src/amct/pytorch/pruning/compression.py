"""Applies a plan of AMCT's config to a copy of a model, newly or as a record says."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.errors import ModelError, RecordError
from amct.model import Skip
from amct.numerics.settings import SelectivePruneSettings
from amct.pytorch.pruning.amct_chains import chain_skips, chosen_chains, find_chains, remaining_count
from amct.pytorch.pruning.compensation import compensate, measure_inputs
from amct.pytorch.pruning.cutting import cut_channels
from amct.pytorch.pruning.sparse import make_sparse, mask_records, put_masks, sparse_refusal
from amct.pytorch.user_model import copy_in_its_mode, copy_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from amct.config.plan import PrunePlan
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.pruning.amct_chains import Chain
    from amct.record import PruneRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Compressed:
    """A compressed copy of a model, its record, and the layers that stay as they are, with reasons."""

    model: nn.Module
    records: tuple[PruneRecord, ...]
    skips: tuple[Skip, ...]


def apply_plan(traced: Traced, plan: PrunePlan | None, batches: Iterable[Arguments] = ()) -> Compressed:
    """Remove channels and add masks; without a plan the model is only copied.

    With batches, the layers behind removed channels are fitted to make up for them.

    Raises:
        ModelError: The model cannot be copied, or does not run without the channels that were removed.
    """
    if plan is None:
        return Compressed(model=copy_in_its_mode(traced.model), records=(), skips=())
    chains = find_chains(traced, plan)
    records = chosen_chains(traced, plan, chains)
    model = copy_in_its_mode(traced.model)
    consumers = {node.name for record in records for node in record.consumers}
    compensate(model, records, measure_inputs(traced.model, consumers, batches))
    cut_channels(model, records)
    _check_runs(model, traced)
    refused = _make_sparse(model, plan)
    skips = (*chain_skips(chains, plan, records, traced.module_types), *refused)
    return Compressed(model=model, records=(*records, *mask_records(model)), skips=skips)


def restore_plan(traced: Traced, plan: PrunePlan | None, records: Sequence[PruneRecord], source: str) -> nn.Module:
    """Remove the channels and set the masks of a record.

    Raises:
        RecordError: The record does not fit the model and the config.
    """
    if plan is None:
        return copy_in_its_mode(traced.model)
    chains = [record for record in records if record.selective is None]
    _check_indices(chains, [chain for chain in find_chains(traced, plan) if chain.ended is None], plan, source)
    model = copy_in_its_mode(traced.model)
    cut_channels(model, chains, source)
    try:
        _check_runs(model, traced)
    except ModelError as error:
        raise RecordError(f"{source}: the model does not run without the channels of the record: {error}") from error
    _make_sparse(model, plan)
    put_masks(model, records, source)
    return model


def _check_indices(records: Sequence[PruneRecord], chains: Sequence[Chain], plan: PrunePlan, source: str) -> None:
    """Check that every chain of the config is in the record, with as many channels as its layers lose together."""
    by_name = {node.name: record for record in records for node in record.producers}
    for chain in chains:
        removed, first = chain.size - remaining_count(chain, plan), chain.producers[0].name
        found = by_name.get(first)
        if removed and (found is None or not found.node(first).prune_index):
            raise RecordError(
                f'{source}: it has no prune_index of layer "{first}", of whose {chain.size} channels the config '
                f"removes {removed}; give the record that create_prune_retrain_model wrote"
            )
    for record in records:
        for node in record.nodes:
            begins = node.begin or 0
            shifted = tuple(index - begins for index in node.prune_index)
            main = record.producers[0] if record.producers else node
            if shifted != tuple(index - (main.begin or 0) for index in main.prune_index):
                raise RecordError(f'{source}: prune_index of "{node.name}" differs from that of "{main.name}"')


def _make_sparse(model: nn.Module, plan: PrunePlan) -> tuple[Skip, ...]:
    found, refused = {}, []
    for layer in plan.selective:
        reason = sparse_refusal(model.get_submodule(layer.name))
        if reason is None:
            assert isinstance(layer.settings, SelectivePruneSettings)
            found[layer.name] = layer.settings.update_freq
        else:
            refused.append(Skip(layer.name, reason))
            logger.warning('"%s" is not made sparse: %s', layer.name, reason)
    make_sparse(model, found)
    return tuple(refused)


def _check_runs(model: nn.Module, traced: Traced) -> None:
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            copy_model(model, share_tensors=True)(*traced.inputs.args, **traced.inputs.kwargs)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} does not run without the channels that were removed: {error}"
        ) from error
