"""The classes of accuracy-based calibration."""

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
