"""Makes ``import caffe`` import this package, for scripts written for Caffe."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from typing import TYPE_CHECKING

from amct.errors import ArgumentError

if TYPE_CHECKING:
    from types import ModuleType

_PACKAGE = "amct.caffe.pycaffe"


def install_as_caffe(*, force: bool = False) -> ModuleType:
    """Put this package into ``sys.modules`` as ``caffe``, with all sub-modules (``caffe.io``), and return it.

    Args:
        force: Replace a real Caffe that is installed or imported.

    Raises:
        ArgumentError: There is a real Caffe, and ``force`` is not set.
    """
    package = importlib.import_module(_PACKAGE)
    present = sys.modules.get("caffe")
    if present is not package and not force:
        spec = None if present is not None else importlib.util.find_spec("caffe")
        # A folder called caffe (such as its sources) is a namespace package without origin; it may be hidden.
        found = present is not None or (spec is not None and spec.origin is not None)
        if found:
            raise ArgumentError(
                "install_as_caffe: a package called caffe is already installed here, and would be hidden. Uninstall "
                "it, or call install_as_caffe(force=True) (amct caffe run --force) to hide it in this process"
            )
    if present is not None and present is not package:
        for name in [name for name in sys.modules if name == "caffe" or name.startswith("caffe.")]:
            del sys.modules[name]
    sys.modules["caffe"] = package
    alias_modules("caffe")
    return package


def alias_modules(name: str) -> None:
    """Make the modules of this package importable as ``<name>.io``, ``<name>.proto.caffe_pb2``, ..."""
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{_PACKAGE}."):
        sys.modules[name + module.name.removeprefix(_PACKAGE)] = importlib.import_module(module.name)
