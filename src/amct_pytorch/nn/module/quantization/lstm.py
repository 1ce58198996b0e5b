"""AMCT's import path of ``LSTMQAT``."""

from amct.pytorch.qat.single_op.recurrent import LSTMQAT

__all__ = ["LSTMQAT"]
