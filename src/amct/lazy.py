"""Public names of a package that are imported when they are first used.

``import amct.pytorch`` then costs next to nothing; the engine behind it is loaded by the first use of a name.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its ``__name__``.
        modules: The module that defines each public name.
    """

    def getattribute(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return getattribute, directory
