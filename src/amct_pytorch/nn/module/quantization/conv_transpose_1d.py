"""AMCT's import path of ``ConvTranspose1dQAT``."""

from amct.pytorch.qat.single_op.layers import ConvTranspose1dQAT

__all__ = ["ConvTranspose1dQAT"]
