"""AMCT's module of ``AutoCalibrationEvaluatorBase``."""

from amct.search.roll_back import AutoCalibrationEvaluatorBase

__all__ = ["AutoCalibrationEvaluatorBase"]
