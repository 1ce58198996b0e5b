"""AMCT's import path of ``MatMulQAT``."""

from amct.pytorch.qat.single_op.layers import MatMulQAT

__all__ = ["MatMulQAT"]
