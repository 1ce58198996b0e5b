"""AMCT's import path of ``QuantCalibrationOp``."""

from amct.pytorch.kv_cache import QuantCalibrationOp

__all__ = ["QuantCalibrationOp"]
