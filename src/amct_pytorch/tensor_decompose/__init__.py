"""AMCT's tensor decomposition."""

from __future__ import annotations

from amct.pytorch.decomposition.amct_api import auto_decomposition, decompose_network

__all__ = ["auto_decomposition", "decompose_network"]
