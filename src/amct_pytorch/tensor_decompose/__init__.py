"""AMCT's tensor decomposition."""

from amct.pytorch.decomposition.amct_api import auto_decomposition, decompose_network

__all__ = ["auto_decomposition", "decompose_network"]
