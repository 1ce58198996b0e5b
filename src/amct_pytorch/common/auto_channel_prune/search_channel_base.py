"""AMCT's module of ``SearchChannelBase`` and ``GreedySearch``."""

from __future__ import annotations

from amct.pytorch.pruning.channel_search import GreedySearch, SearchChannelBase

__all__ = ["GreedySearch", "SearchChannelBase"]
