"""The classes of accuracy-based calibration."""

from __future__ import annotations

from amct.search.roll_back import (
    AutoCalibrationEvaluatorBase,
    AutoCalibrationStrategyBase,
    BinarySearchStrategy,
    CosineSimilaritySensitivity,
    MseSimilaritySensitivity,
    SensitivityBase,
)

__all__ = [
    "AutoCalibrationEvaluatorBase",
    "AutoCalibrationStrategyBase",
    "BinarySearchStrategy",
    "CosineSimilaritySensitivity",
    "MseSimilaritySensitivity",
    "SensitivityBase",
]
