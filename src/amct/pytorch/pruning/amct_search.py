"""AMCT's function that searches the channels to prune."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amct import atomic
from amct.arguments import output_file
from amct.atomic import read_bytes
from amct.config.plan import PruneLayerPlan, PrunePlan
from amct.config.prune.search import PruneSearchConfig, read_search_config
from amct.errors import ArgumentError, ArgumentTypeError, SearchError
from amct.numerics.pruning import remaining_channels
from amct.numerics.settings import FilterPruneSettings
from amct.pytorch.amct_api import pytorch_function
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.pruning.amct_chains import chosen_chains, find_chains, prunable_layers
from amct.pytorch.pruning.budget.config import DEFAULT_RATIO, config_text
from amct.pytorch.pruning.channel_search import (
    BITOPS,
    SEARCHES,
    SENSITIVITIES,
    SENSITIVITY,
    ChannelSensitivity,
    SearchChannelBase,
    SearchedGraph,
    attribute,
    channel_bitops,
    set_attribute,
    total_bitops,
)
from amct.pytorch.pruning.cutting import channel_counts
from amct.pytorch.pruning.propagation import map_channels
from amct.pytorch.pruning.removal import macs_of_weights
from amct.pytorch.user_model import copy_model
from amct.record import PruneRecord, Record, encode_record
from amct.schema import message_class

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.atomic import AnyPath
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.pruning.channel_search import GraphInfo

logger = logging.getLogger(__name__)

_PAIR = 2


@pytorch_function
def auto_channel_prune_search(
    model: nn.Module,
    config: AnyPath,
    input_data: list[Any],
    output_cfg: AnyPath,
    sensitivity: str | ChannelSensitivity = "TaylorLossSensitivity",
    search_alg: str | SearchChannelBase = "GreedySearch",
) -> None:
    """Search how many channels each layer can lose, and write that as a config for ``create_prune_retrain_model``.

    Args:
        model: any nn.Module; it is not changed.
        config: a text file of an ``AutoChannelPruneConfig``: how many times fewer bit operations are wanted.
        input_data: ``[data, label]``, both with the samples along their first axis.
        output_cfg: where the config is written.
        sensitivity: "TaylorLossSensitivity", or an object of a class derived from ``ChannelSensitivity``.
        search_alg: "GreedySearch", or an object of a class derived from ``SearchChannelBase``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the config does not fit the model; all mistakes are listed with their positions.
        OSError: a file cannot be read or written.
        RuntimeError: the model cannot be run, the config cannot be parsed, or a class of the user's returns something
            else than channels.
    """
    _check_data(input_data)
    measure = _object_of(sensitivity, SENSITIVITIES, ChannelSensitivity, "sensitivity")
    search = _object_of(search_alg, SEARCHES, SearchChannelBase, "search_alg")
    output_file(output_cfg, "output_cfg")
    traced = cached_trace(model, input_data[0][:1])
    source = os.fspath(config)
    wanted = read_search_config(read_bytes(config), source, prunable_layers(traced), read_file=read_bytes)
    for warning in wanted.warnings:
        logger.warning("%s", warning)
    settings = wanted.settings
    plan, chains = _chains(traced, wanted)
    searched, fixed = _divided(chains, wanted)
    records, graph_info = _messages(searched), _numbers(traced)
    kept: dict[str, list[int]] = {}
    if searched:
        graph = SearchedGraph(copy_model(traced.model).eval())
        measure.setup_initialization((graph, graph_info), input_data, settings.test_iteration)
        measure.get_sensitivity(records)
        _check_sensitivity(records, measure)
        for record in records:
            set_attribute(record.producer[0], BITOPS, channel_bitops(record, graph_info))
        before = total_bitops(graph_info)
        how = (settings.compress_ratio, settings.ascend_optimized, settings.max_prune_ratio)
        kept = _checked(search.channel_prune_search(graph_info, records, how), records, _numbers(traced), search)
        _tell(kept, before, total_bitops(graph_info), settings.compress_ratio)
    else:
        logger.warning("%s: no layer that may be searched is in a chain that AMCT prunes; see docs/pruning.md", source)
    followers = {name: ratio for name, ratio in _fixed_ratios(fixed, plan).items() if name in wanted.search_layers}
    ratios = dict.fromkeys(wanted.search_layers, 0.0) | followers
    ratios |= {name: _ratio(values, ascend=settings.ascend_optimized) for name, values in kept.items()}
    atomic.write_text(output_cfg, config_text(ratios, wanted.override, ascend=settings.ascend_optimized))


def _check_data(input_data: object) -> None:
    if not isinstance(input_data, list):
        raise ArgumentTypeError(f"input_data: expected a list [data, label], got {type(input_data).__name__}")
    if len(input_data) != _PAIR or not all(isinstance(each, torch.Tensor) and each.ndim for each in input_data):
        raise ArgumentError(
            "input_data: expected a list of two tensors, [data, label], got "
            f"{[type(each).__name__ for each in input_data]}"
        )
    if not len(input_data[0]):
        raise ArgumentError("input_data: there are no samples")


def _object_of(given: object, known: Mapping[str, type[Any]], base: type, argument: str) -> Any:  # noqa: ANN401  of base
    if isinstance(given, base):
        return given
    if isinstance(given, str):
        if given not in known:
            raise ArgumentError(f'{argument}: expected "{min(known)}" or an object, got "{given}"')
        return known[given]()
    raise ArgumentTypeError(
        f"{argument}: expected a name or an object of a class derived from {base.__name__}, got {type(given).__name__}"
    )


def _chains(traced: Traced, wanted: PruneSearchConfig) -> tuple[PrunePlan, list[PruneRecord]]:
    """The chains of all layers that are searched or fixed, and the plan of the fixed ones."""
    settings = FilterPruneSettings(prune_ratio=DEFAULT_RATIO, ascend_optimized=wanted.settings.ascend_optimized)
    types = {layer.name: layer.type for layer in prunable_layers(traced)}
    layers = [
        *wanted.fixed,
        *(
            PruneLayerPlan(name=name, type=types[name], enabled=True, settings=settings)
            for name in wanted.search_layers
        ),
    ]
    plan = PrunePlan(source=wanted.source, layers=tuple(layers), not_pruned={}, warnings=())
    return plan, chosen_chains(traced, plan, find_chains(traced, plan))


def _divided(chains: Sequence[PruneRecord], wanted: PruneSearchConfig) -> tuple[list[PruneRecord], list[PruneRecord]]:
    """The chains whose layers are all searched, and those with a fixed layer."""
    free = [all(node.name in wanted.search_layers for node in chain.producers) for chain in chains]
    return (
        [chain for chain, is_free in zip(chains, free, strict=True) if is_free],
        [chain for chain, is_free in zip(chains, free, strict=True) if not is_free],
    )


def _fixed_ratios(chains: Sequence[PruneRecord], plan: PrunePlan) -> dict[str, float]:
    """The ratios of searched layers whose chain has a fixed one: those of the fixed layer."""
    fixed = {layer.name: layer.settings.prune_ratio for layer in plan.filters}  # type: ignore[union-attr]  # filters only
    found: dict[str, float] = {}
    for chain in chains:
        names = [node.name for node in chain.producers]
        found.update(dict.fromkeys(names, min(fixed[name] for name in names)))
    return found


def _messages(chains: Sequence[PruneRecord]) -> Any:  # noqa: ANN401  protobuf's own classes
    """The chains as AMCT's messages, without channels that are removed."""
    message: Any = message_class("AMCTPytorchProto.ScaleOffsetRecord", schema="pytorch")()
    message.ParseFromString(encode_record(Record(prune=tuple(chains)), "binary"))
    for record in message.prune_record:
        for node in (*record.producer, *record.consumer):
            for each in [each for each in node.attr if each.name == "prune_index"]:
                node.attr.remove(each)
    return message.prune_record


def _numbers(traced: Traced) -> GraphInfo:
    """The channels and bit operations of each layer, for one sample."""
    channel_map = map_channels(traced)
    found: GraphInfo = {}
    for weight, macs in macs_of_weights(channel_map).items():
        name = weight.rpartition(".")[0]
        module = channel_map.modules.get(name)
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            inputs, outputs = channel_counts(module)
            bits = 8 * module.weight.element_size()
            found[name] = {"cin": inputs, "cout": outputs, "ori_cout": outputs, BITOPS: float(macs) * bits**2}
    return found


def _check_sensitivity(records: Any, measure: ChannelSensitivity) -> None:  # noqa: ANN401  protobuf's own classes
    for record in records:
        first = record.producer[0]
        values = attribute(first, SENSITIVITY)
        count = attribute(first, "end") - attribute(first, "begin")
        if not isinstance(values, list) or len(values) != count or not torch.tensor(values).isfinite().all():
            raise SearchError(
                f'{type(measure).__name__}.get_sensitivity: expected the attribute "{SENSITIVITY}" of layer '
                f'"{first.name}" with {count} finite numbers, got '
                f"{'none' if values is None else f'{len(values)} of them' if isinstance(values, list) else values}"
            )


def _checked(
    found: object,
    records: Any,  # noqa: ANN401  protobuf's own classes
    graph_info: GraphInfo,
    search: SearchChannelBase,
) -> dict[str, list[int]]:
    """What a search returned: for each layer of a chain whether its channels stay."""
    where = f"{type(search).__name__}.channel_prune_search"
    if not isinstance(found, dict):
        raise SearchError(f"{where}: expected a dict of lists by layer, got {type(found).__name__}")
    names = [node.name for record in records for node in record.producer]
    for name in names:
        count, values = int(graph_info[name]["ori_cout"]), found.get(name)
        if not isinstance(values, list) or len(values) != count or any(each not in (0, 1) for each in values):
            raise SearchError(
                f'{where}: expected a list of {count} times 0 or 1 for layer "{name}", got {values!r:.80}'
            )
        if not any(values):
            raise SearchError(f'{where}: no channel of layer "{name}" is left; one is needed')
    return {name: found[name] for name in names}


def _ratio(values: Sequence[int], *, ascend: bool) -> float:
    """The share of channels that go; 0 where the config would leave all."""
    ratio = values.count(0) / len(values)
    return ratio if ratio and remaining_channels(len(values), ratio, ascend=ascend) < len(values) else 0.0


def _tell(kept: Mapping[str, Sequence[int]], before: float, after: float, wanted: float) -> None:
    for name, values in kept.items():
        logger.info('"%s": %d of %d channels stay', name, sum(values), len(values))
    reached = before / max(after, 1e-30)
    if reached < wanted and after < before:
        logger.warning(
            "compress_ratio %g was not reached, only %.3g: no more channels may go. Raise max_prune_ratio, or leave "
            "ascend_optimized or skipped layers out",
            wanted,
            reached,
        )
    else:
        logger.info("bit operations: %.3g times fewer", reached)
