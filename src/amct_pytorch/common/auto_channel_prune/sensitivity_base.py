"""AMCT's module of ``SensitivityBase``."""

from __future__ import annotations

from amct.pytorch.pruning.channel_search import ChannelSensitivity as SensitivityBase

__all__ = ["SensitivityBase"]
