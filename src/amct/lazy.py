"""Public names of a package that are imported when they are first used.

``import amct.pytorch`` then costs next to nothing; the engine behind it is loaded by the first use of a name.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its ``__name__``.
        modules: By module: the public names that it defines, or the name that it is.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def getattribute(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(places[name])
        value: object = module if places[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return getattribute, directory
