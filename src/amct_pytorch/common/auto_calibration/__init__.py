"""The classes of accuracy-based calibration."""

from __future__ import annotations

from amct.search.roll_back import (
    AccuracyBasedAutoCalibrationBase,
    AutoCalibrationEvaluatorBase,
    AutoCalibrationStrategyBase,
    BinarySearchStrategy,
    CosineSimilaritySensitivity,
    MseSimilaritySensitivity,
    SensitivityBase,
)

__all__ = [
    "AccuracyBasedAutoCalibrationBase",
    "AutoCalibrationEvaluatorBase",
    "AutoCalibrationStrategyBase",
    "BinarySearchStrategy",
    "CosineSimilaritySensitivity",
    "MseSimilaritySensitivity",
    "SensitivityBase",
]
