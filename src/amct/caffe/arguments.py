"""Checks of arguments that AMCT's functions share; an error names the function, the argument and the type."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from amct import atomic
from amct.errors import ArgumentError, ArgumentTypeError, FileError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


def check_types(function: str, expected: Mapping[str, tuple[object, tuple[type, ...]]]) -> None:
    """Check arguments, given as ``{name: (value, accepted types)}``.

    Raises:
        ArgumentTypeError: one has another type.
    """
    for name, (value, types) in expected.items():
        wrong_bool = isinstance(value, bool) and bool not in types  # a bool is an int for Python
        if not isinstance(value, types) or wrong_bool:
            accepted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in types)
            raise ArgumentTypeError(f"{function}: {name} must be {accepted}, got {type(value).__name__}")


def input_file(path: str | os.PathLike[str], argument: str) -> Path:
    """The path of a file that must exist.

    Raises:
        FileError: it does not.
    """
    file = Path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise FileError(f'{argument}: "{file}" {what}; expected the name of an existing file')
    return file


def output_file(path: str | os.PathLike[str], argument: str) -> Path:
    """The path of a file to be written, checked to be writable before any work is done.

    Raises:
        ArgumentError: it is no file name.
        FileError: it is a folder, or its folder cannot be written to.
    """
    file = Path(path)
    if not file.name or str(path).endswith("/"):
        raise ArgumentError(f'{argument}: expected the name of a file, got "{path}"')
    if file.is_dir():
        raise FileError(f'{argument}: "{file}" is a folder; expected the name of a file')
    atomic.check_writable(file.parent)
    return file
