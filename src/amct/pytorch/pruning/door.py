"""Pruning of a torch model in one call: ``prune`` removes channels, ``sparsify`` adds 2:4 masks."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from torch import nn

from amct.atomic import read_bytes
from amct.config.prune.dialect import PRUNING, uniform_pruning
from amct.errors import ArgumentError, ArgumentTypeError, ConfigError, RecordError
from amct.numerics.pruning import ASCEND_CHANNELS
from amct.numerics.settings import FilterPruneSettings, SelectivePruneSettings
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.inputs import IoOptions, torch_batches
from amct.pytorch.pruning.amct_chains import prunable_layers
from amct.pytorch.pruning.compensation import refresh_batch_norms
from amct.pytorch.pruning.compression import apply_plan
from amct.pytorch.pruning.cutting import channel_counts, cut_channels
from amct.pytorch.pruning.full_reach import Pruned, Wanted, prune_fully
from amct.pytorch.pruning.propagation import map_channels
from amct.pytorch.pruning.pruned_model import PrunedModel
from amct.pytorch.pruning.removal import Removal, cost_of
from amct.pytorch.pruning.saving import plain_copy
from amct.pytorch.qat.checkpoint import load_state
from amct.pytorch.user_model import copy_model
from amct.record import Record, read_record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amct.config.plan import PrunePlan
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.pruning.selection import ChannelCell

logger = logging.getLogger(__name__)

Reach = Literal["full", "amct"]
DEFAULT_RATIO = 0.3


def prune(  # noqa: PLR0913  a front door with its settings
    model: nn.Module,
    example: object,
    ratio: float | None = None,
    *,
    flops: float | None = None,
    align: int = 8,
    reach: Reach = "full",
    batches: object = None,
    config: str | os.PathLike[str] | None = None,
    io: IoOptions | None = None,
) -> PrunedModel:
    """Remove output channels of convolutions and linear layers, and all that depends on them.

    The channels with the smallest filters go; those that several layers make together (a residual stream) go in all of
    them. Train the model afterwards.

    Args:
        model: Any nn.Module; it is not changed.
        example: A tensor, or a tuple or dict of arguments, with which the model can be run.
        ratio: The fraction of channels that the layers lose, 0.3 unless something else is given.
        flops: In place of a ratio: the fraction of the multiply-accumulate operations that is left, at most.
        align: Each layer keeps a multiple of so many channels: kernels are fast with multiples of 8 or 16, slow with
            others. The next multiple above or below is taken so that the whole model has about the operations that
            the ratio gives. 1: every layer loses just the ratio.
        reach: "full" follows channels through all operations that are known, "amct" as far as AMCT does.
        batches: Data on which the layers behind removed channels are fitted to make up for them, and the statistics of
            batch norms are measured anew: a tensor, an iterable or a DataLoader. In distributed training every
            process must call this, each with its own data (else CalibrationError); all choose the same channels.
        config: A simple config (``.cfg``) with ``prune_config``, in place of a ratio: ratios, skips and overrides.
        io: Names and dynamic axes of the exported files.

    Raises:
        AmctError: The subclass tells whether arguments, config, model or data are invalid.
    """
    settings = _checked(model, ratio, flops, align, reach, config)
    traced = cached_trace(model, example)
    data: Iterable[Arguments] = ()
    if batches is not None:
        data = torch_batches(traced.model, batches, name="batches")
        data.keep()  # it is read twice
    plan = None
    if config is not None:
        plan = _plan_of_file(traced, config)
    elif reach == "amct":
        ratios = FilterPruneSettings(prune_ratio=ratio or DEFAULT_RATIO, ascend_optimized=align % ASCEND_CHANNELS == 0)
        plan = uniform_pruning(ratios, "prune", prunable_layers(traced))
    if plan is not None and not plan.filters:
        raise ConfigError(f"{plan.source}: it prunes no channels; sparsify is the function for 2:4 sparsity")
    if plan is not None and plan.selective and reach == "full":
        raise ConfigError(
            f'{plan.source}: it prunes channels and gives "{plan.selective[0].name}" 2:4 sparsity; both at once are '
            'done with reach="amct" only'
        )
    if reach == "amct":
        assert plan is not None
        found = _as_amct(traced, plan, data)
    else:
        found = prune_fully(traced, _wanted(ratio or DEFAULT_RATIO, flops, align, plan), data)
    result = pruned_model(model, traced, found, settings, io)
    if batches is not None:
        refresh_batch_norms(result.model, data)
    return result


def sparsify(
    model: nn.Module,
    example: object,
    *,
    update_freq: int = 0,
    config: str | os.PathLike[str] | None = None,
    io: IoOptions | None = None,
) -> PrunedModel:
    """Add 2:4 masks to convolutions, transposed convolutions and linear layers: two of every four weights become zero.

    Train the model afterwards; its weights stay dense, and the exported ones have exactly the mask's zeros.

    Args:
        model: Any nn.Module; it is not changed.
        example: A tensor, or a tuple or dict of arguments, with which the model can be run.
        update_freq: The mask is chosen anew every so many forwards in training; 0: in the first one only.
        config: A simple config (``.cfg``) with ``n_out_of_m_pruner``, in place of ``update_freq``.
        io: Names and dynamic axes of the exported files.

    Raises:
        AmctError: The subclass tells whether arguments, config or model are invalid.
    """
    check_model(model)
    if isinstance(update_freq, bool) or not isinstance(update_freq, int) or update_freq < 0:
        raise ArgumentError(f"update_freq: expected a whole number from 0, got {update_freq!r}")
    traced = cached_trace(model, example)
    if config is not None:
        plan = _plan_of_file(traced, config)
    else:
        plan = uniform_pruning(SelectivePruneSettings(update_freq=update_freq), "sparsify", prunable_layers(traced))
    if not plan.selective or plan.filters:
        raise ConfigError(f"{plan.source}: expected n_out_of_m_pruner for all layers; prune removes channels")
    return pruned_model(model, traced, _as_amct(traced, plan), f"2:4 sparsity, update_freq {update_freq}", io)


def restore_pruned(
    model: nn.Module, record: Record | str | os.PathLike[str], state: str | os.PathLike[str] | None = None
) -> nn.Module:
    """Cut a whole model as a record says, in another process, and load the state of the trained one.

    Args:
        model: The whole model; it is not changed.
        record: The record of ``prune``, or its file.
        state: A file with the ``state_dict`` of the pruned model; None: the weights of ``model`` are kept.

    Raises:
        RecordError: The record does not fit the model.
        FileError: A file cannot be read.
    """
    check_model(model)
    source = "the record" if isinstance(record, Record) else os.fspath(record)
    found = record if isinstance(record, Record) else read_record(record)
    if not found.prune or any(chain.selective is not None for chain in found.prune):
        raise RecordError(f"{source}: expected the removed channels of a pruned model")
    if not any(node.prune_index for chain in found.prune for node in chain.producers):
        raise RecordError(f"{source}: no chain has a prune_index; give the record that prune wrote")
    restored = copy_model(model)
    cut_channels(restored, found.prune, source)
    if state is not None:
        load_state(restored, state, None)
    return restored.train(model.training)


def check_model(model: object) -> None:
    """Check that a model is a module.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")


def check_align(align: object) -> None:
    """Check the number of which the channels that are left are a multiple.

    Raises:
        ArgumentError: It is none.
    """
    if isinstance(align, bool) or not isinstance(align, int) or align < 1:
        raise ArgumentError(f"align: expected a whole number from 1, got {align!r}")


def _checked(model: object, ratio: float | None, flops: float | None, align: int, reach: str, config: object) -> str:
    """Check the settings; returns them as text."""
    check_model(model)
    for name, value in (("ratio", ratio), ("flops", flops)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1):
            raise ArgumentError(f"{name}: expected a number between 0 and 1, got {value!r}")
    given = [name for name, value in (("ratio", ratio), ("flops", flops), ("config", config)) if value is not None]
    if len(given) > 1:
        raise ArgumentError(f"{' and '.join(given)}: give one of them")
    check_align(align)
    if reach not in ("full", "amct"):
        raise ArgumentError(f'reach: expected "full" or "amct", got {reach!r}')
    if reach == "amct" and flops is not None:
        raise ArgumentError('flops: only with reach="full"')
    what = (
        f"flops {flops:g}"
        if flops is not None
        else f"config {config}"
        if config is not None
        else f"ratio {ratio or DEFAULT_RATIO:g}"
    )
    return f"{what}, align {align}, reach {reach}"


def _plan_of_file(traced: Traced, config: str | os.PathLike[str]) -> PrunePlan:
    layers = prunable_layers(traced)
    plan = PRUNING.compression_plan(PRUNING.expand_config(read_bytes(config), os.fspath(config), layers), layers).prune
    assert plan is not None
    for warning in plan.warnings:
        logger.warning("%s", warning)
    return plan


def _wanted(ratio: float, flops: float | None, align: int, plan: PrunePlan | None) -> Wanted:
    if plan is None:
        return Wanted(ratio=lambda _: ratio, flops=flops, align=lambda _: align, kept={})
    settings = {layer.name: layer.settings for layer in plan.filters}

    def of(cell: ChannelCell) -> list[FilterPruneSettings]:
        found = (settings.get(maker.name) for maker in cell.makers)  # a functional layer has no settings
        return [each for each in found if isinstance(each, FilterPruneSettings)]

    return Wanted(
        ratio=lambda cell: min((each.prune_ratio for each in of(cell)), default=0.0),
        align=lambda cell: ASCEND_CHANNELS if any(each.ascend_optimized for each in of(cell)) else align,
        kept=plan.not_pruned,
    )


def _as_amct(traced: Traced, plan: PrunePlan, batches: Iterable[Arguments] = ()) -> Pruned:
    """Apply a plan of AMCT's config."""
    found = apply_plan(traced, plan, batches)
    plain = plain_copy(found.model)
    whole = map_channels(traced)
    smaller = map_channels(cached_trace(plain, (*traced.inputs.args, traced.inputs.kwargs)))
    names = [maker.name for maker in whole.producers if maker.name in whole.modules]
    return Pruned(
        model=found.model,
        chains=found.records,
        skips=found.skips,
        channels={
            name: (channel_counts(whole.modules[name])[1], channel_counts(plain.get_submodule(name))[1])
            for name in names
        },
        before=Removal(whole),
        after=Removal(smaller),
    )


def everywhere(traced: Traced) -> PrunePlan | None:
    """The plan of AMCT that prunes every layer that it can; None if there is none."""
    with suppress(ConfigError):
        return uniform_pruning(FilterPruneSettings(prune_ratio=DEFAULT_RATIO), "everywhere", prunable_layers(traced))
    return None


def pruned_model(model: nn.Module, traced: Traced, found: Pruned, settings: str, io: IoOptions | None) -> PrunedModel:
    """The result of pruning a model, in its mode."""
    found.model.train(model.training)
    return PrunedModel(
        model=found.model,
        record=Record(prune=found.chains),
        skipped=tuple(found.skips),
        channels=found.channels,
        before=cost_of(found.before),
        after=cost_of(found.after),
        original=traced,
        config=settings,
        io=io or IoOptions(),
    )
