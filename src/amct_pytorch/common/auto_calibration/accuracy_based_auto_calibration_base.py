"""AMCT's module of ``AccuracyBasedAutoCalibrationBase``."""

from __future__ import annotations

from amct.search.roll_back import AccuracyBasedAutoCalibrationBase

__all__ = ["AccuracyBasedAutoCalibrationBase"]
