"""AMCT's import path of ``Conv1dQAT``."""

from amct.pytorch.qat.single_op.layers import Conv1dQAT

__all__ = ["Conv1dQAT"]
