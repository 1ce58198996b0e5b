"""A simple config that gives AMCT's functions the numbers of channels of a search, as far as they prune."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.config.prune.dialect import FILTER
from amct.config.qat.dialect import PYTORCH_QAT
from amct.schema import format_text, message_class

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from google.protobuf.message import Message

    from amct.pytorch.pruning.amct_chains import Chain

DEFAULT_RATIO = 0.3
"""The ratio of the global pruner; every layer that it could prune is overridden or skipped."""


def ratios_of(chains: Sequence[Chain], channels: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """The share of its channels that each layer of AMCT's chains loses; 0 where its chain cannot lose them.

    Args:
        chains: All chains of AMCT.
        channels: The numbers of output channels of each layer, before and after.
    """
    found: dict[str, float] = {}
    for chain in chains:
        counts = {channels.get(link.name, (chain.size, chain.size)) for link in chain.producers}
        before, after = counts.pop()
        same = chain.ended is None and not counts and after % chain.prune_group == 0
        found.update({link.name: (before - after) / before if same else 0.0 for link in chain.producers})
    return found


def config_text(ratios: Mapping[str, float], override: Message | None = None, *, ascend: bool = False) -> str:
    """The text of a config in which each layer loses its share, and those that lose none are skipped.

    Args:
        ratios: Of every layer that is not in ``override``.
        override: A config that fixes other layers.
        ascend: Whether a multiple of 16 channels is left.
    """
    config = message_class(PYTORCH_QAT.message, schema="pytorch")()
    if override is not None:
        config.CopyFrom(override)
    _set(config, DEFAULT_RATIO, ascend=ascend)
    for name, ratio in ratios.items():
        if ratio > 0:
            layer = config.override_layer_configs.add()  # type: ignore[attr-defined]  # a field of AMCT's message
            layer.layer_name = name
            _set(layer, ratio, ascend=ascend)
        else:
            config.regular_prune_skip_layers.append(name)  # type: ignore[attr-defined]
    return format_text(config)


def _set(message: Message, ratio: float, *, ascend: bool) -> None:
    pruner = getattr(getattr(message.prune_config, FILTER.field), "balanced_l2_norm_filter_prune")  # type: ignore[attr-defined]  # noqa: B009
    pruner.prune_ratio = ratio
    pruner.ascend_optimized = ascend
