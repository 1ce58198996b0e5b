"""AMCT's module of ``SearchChannelBase`` and ``GreedySearch``."""

from amct.pytorch.pruning.channel_search import GreedySearch, SearchChannelBase

__all__ = ["GreedySearch", "SearchChannelBase"]
