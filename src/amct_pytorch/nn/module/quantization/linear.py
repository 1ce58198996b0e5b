"""AMCT's import path of ``LinearQAT``."""

from amct.pytorch.qat.single_op.layers import LinearQAT

__all__ = ["LinearQAT"]
