"""AMCT's import path of ``Conv2dQAT``."""

from amct.pytorch.qat.single_op.layers import Conv2dQAT

__all__ = ["Conv2dQAT"]
