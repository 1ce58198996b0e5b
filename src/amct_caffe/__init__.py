"""AMCT's names for Caffe models: ``import amct_caffe as amct``. Everything is implemented in ``amct.caffe``."""

from __future__ import annotations

import sys

from amct.lazy import lazy_names

#: ``from amct_caffe import amct``, as in the samples of AMCT's guide.
amct = sys.modules[__name__]
__getattr__, __dir__, _names = lazy_names(__name__)
__all__ = [*_names, "amct"]
