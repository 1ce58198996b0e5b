"""Checks of arguments that AMCT's functions have in common: wrong types are told by function, argument and type."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from amct import atomic
from amct.errors import ArgumentTypeError, FileError
from amct.export.writer import check_file_name

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = (str, os.PathLike)
"""What can name a file."""


def check_types(function: str, expected: Mapping[str, tuple[object, tuple[type, ...]]]) -> None:
    """Check arguments, given as ``{name: (value, accepted types)}``; None is accepted where NoneType is.

    Raises:
        ArgumentTypeError: one has another type.
    """
    for name, (value, types) in expected.items():
        # A bool is an int for Python; for a user it is a slip.
        slipped = isinstance(value, bool) and bool not in types
        if not isinstance(value, types) or slipped:
            accepted = " or ".join("None" if kind is type(None) else _type_name(kind) for kind in types)
            raise ArgumentTypeError(f"{function}: {name} must be {accepted}, got {type(value).__name__}")


def _type_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def output_file(path: str | os.PathLike[str], argument: str) -> Path:
    """A file that will be written, found to be writable before any work is done.

    Raises:
        ArgumentError: it is no file name.
        FileError: it is a folder, or its folder cannot be written to.
    """
    check_file_name(path, argument)
    file = Path(path)
    if file.is_dir():
        raise FileError(f'{argument}: "{file}" is a folder; expected the name of a file')
    atomic.check_writable(file.parent)
    return file
