"""``amct_caffe`` under the name that SS928 users import: ``from hotwheels import amct_caffe``."""

from __future__ import annotations

from amct_caffe import *  # noqa: F403 - the same names
from amct_caffe import __all__ as __all__
