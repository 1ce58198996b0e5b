"""AMCT's import path of ``ConvTranspose2dQAT``."""

from amct.pytorch.qat.single_op.layers import ConvTranspose2dQAT

__all__ = ["ConvTranspose2dQAT"]
