"""AMCT's import path of ``QuantCalibrationOp``."""

from amct.pytorch.kv_cache.calibration_op import QuantCalibrationOp

__all__ = ["QuantCalibrationOp"]
