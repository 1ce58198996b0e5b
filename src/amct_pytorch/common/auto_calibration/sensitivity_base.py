"""AMCT's module of ``SensitivityBase``."""

from __future__ import annotations

from amct.search.roll_back import SensitivityBase

__all__ = ["SensitivityBase"]
