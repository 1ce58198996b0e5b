"""AMCT's import path of ``GRUQAT``."""

from amct.pytorch.qat.single_op.recurrent import GRUQAT

__all__ = ["GRUQAT"]
