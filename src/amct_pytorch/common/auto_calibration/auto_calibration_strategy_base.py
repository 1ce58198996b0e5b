"""AMCT's module of ``AutoCalibrationStrategyBase``."""

from __future__ import annotations

from amct.search.roll_back import AutoCalibrationStrategyBase

__all__ = ["AutoCalibrationStrategyBase"]
