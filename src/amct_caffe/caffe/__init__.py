"""pycaffe's names: ``from amct_caffe import caffe``, ``import amct_caffe.caffe.io``."""

from __future__ import annotations

from amct.caffe.pycaffe import *  # noqa: F403 - everything pycaffe has
from amct.caffe.pycaffe import __all__ as _names
from amct.caffe.pycaffe import __version__
from amct.caffe.pycaffe.runtime import alias_modules

alias_modules(__name__)

__all__ = [*_names, "__version__"]
