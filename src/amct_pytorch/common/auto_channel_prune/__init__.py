"""The classes of AMCT's search for channels to prune."""

from amct.pytorch.pruning.channel_search import (
    ChannelSensitivity as SensitivityBase,
)
from amct.pytorch.pruning.channel_search import (
    GreedySearch,
    SearchChannelBase,
    TaylorLossSensitivity,
)

__all__ = ["GreedySearch", "SearchChannelBase", "SensitivityBase", "TaylorLossSensitivity"]
