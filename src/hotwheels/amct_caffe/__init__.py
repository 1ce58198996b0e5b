"""``amct_caffe`` under the name that SS928 users import: ``from hotwheels import amct_caffe``."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import amct_caffe
from amct_caffe import *  # noqa: F403 - the same names
from amct_caffe import __all__ as __all__

# ``from hotwheels.amct_caffe import caffe`` and others give the same modules, not copies.
for _module in pkgutil.iter_modules(amct_caffe.__path__, "amct_caffe."):
    sys.modules[f"hotwheels.{_module.name}"] = importlib.import_module(_module.name)
    globals()[_module.name.rpartition(".")[2]] = sys.modules[_module.name]
