"""AMCT's module of ``SensitivityBase``."""

from amct.pytorch.pruning.channel_search import ChannelSensitivity as SensitivityBase

__all__ = ["SensitivityBase"]
