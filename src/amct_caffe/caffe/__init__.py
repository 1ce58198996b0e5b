"""pycaffe's names, served by this toolkit: ``from amct_caffe import caffe``."""

from __future__ import annotations

from amct.caffe.pycaffe import *  # noqa: F403 - everything pycaffe has
from amct.caffe.pycaffe import __all__, __version__

__all__ += ["__version__"]
