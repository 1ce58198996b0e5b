"""Public names of a package that are imported when they are first used.

``import amct.pytorch`` then costs next to nothing; the engine behind it is loaded by the first use of a name. The names
stand once, in the ``__init__.pyi`` of the package, which type checkers read in place of its ``__init__.py``.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package; ``package`` is its ``__name__``."""
    stub = pkgutil.get_data(package, "__init__.pyi") or b""
    places = {name: module for module, name in _NAME.findall(stub.decode())}

    def getattribute(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        is_module = places[name] == package  # a module of its own
        found: object = importlib.import_module(f"{package}.{name}" if is_module else places[name])
        value = found if is_module else getattr(found, name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return getattribute, directory, sorted(places)
