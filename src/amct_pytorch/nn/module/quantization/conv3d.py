"""AMCT's import path of ``Conv3dQAT``."""

from amct.pytorch.qat.single_op.layers import Conv3dQAT

__all__ = ["Conv3dQAT"]
