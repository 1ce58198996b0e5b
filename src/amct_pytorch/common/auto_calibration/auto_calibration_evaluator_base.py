"""AMCT's module of ``AutoCalibrationEvaluatorBase``."""

from __future__ import annotations

from amct.search.roll_back import AutoCalibrationEvaluatorBase

__all__ = ["AutoCalibrationEvaluatorBase"]
