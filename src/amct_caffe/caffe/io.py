"""``caffe.io`` under AMCT's name: ``from amct_caffe.caffe import io``."""

from __future__ import annotations

from amct.caffe.pycaffe.io import *  # noqa: F403 - everything caffe.io has
from amct.caffe.pycaffe.io import __all__ as __all__
