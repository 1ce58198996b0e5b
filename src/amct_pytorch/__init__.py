"""The names of AMCT for PyTorch: ``import amct_pytorch as amct``. Everything is implemented in ``amct``."""

from __future__ import annotations

from amct.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
