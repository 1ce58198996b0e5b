"""AMCT's module of ``AutoCalibrationStrategyBase``."""

from amct.search.roll_back import AutoCalibrationStrategyBase

__all__ = ["AutoCalibrationStrategyBase"]
