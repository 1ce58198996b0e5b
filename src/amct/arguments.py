"""Argument checks shared by the public functions; error messages name the argument."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from amct import atomic, log
from amct.atomic import is_file, is_folder
from amct.errors import ArgumentError, ArgumentTypeError, FileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FILE = (str, os.PathLike)
"""Types that can name a file."""
LONGEST_NAME = 254

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def amct_function(
    flow: log.Flow, types: Mapping[str, tuple[type, ...]]
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """A decorator for AMCT's functions: it starts the log, and checks the types of arguments by their names.

    None is accepted where it is the default; arguments whose name has no types are not checked.
    """

    def decorate(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        signature = inspect.signature(function)
        accepted = {
            name: (*types[name], type(None)) if parameter.default is None else types[name]
            for name, parameter in signature.parameters.items()
            if name in types
        }

        @functools.wraps(function)
        def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            log.start(flow)
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # arguments are missing or unknown, which Python says better
                given = {}
            check_types(
                function.__name__, {name: (given[name], kinds) for name, kinds in accepted.items() if name in given}
            )
            return function(*args, **kwargs)

        return checked

    return decorate


def check_types(function: str, expected: Mapping[str, tuple[object, tuple[type, ...]]]) -> None:
    """Check arguments, given as ``{name: (value, accepted types)}``.

    Raises:
        ArgumentTypeError: An argument has another type; the message names ``function``.
    """
    for name, (value, types) in expected.items():
        bool_as_int = isinstance(value, bool) and bool not in types
        if not isinstance(value, types) or bool_as_int:
            accepted = " or ".join("None" if kind is type(None) else _type_name(kind) for kind in types)
            raise ArgumentTypeError(f"{function}: {name} must be {accepted}, got {type(value).__name__}")


def _type_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def input_file(path: str | os.PathLike[str], argument: str) -> Path:
    """Return the path of a file that must exist; ``argument`` is its name in error messages.

    Raises:
        FileError: It does not exist, or is a folder.
    """
    file = Path(path)
    if not is_file(file):
        what = "is a folder" if is_folder(file) else "does not exist"
        raise FileError(f'{argument}: "{file}" {what}; expected the name of an existing file')
    return file


def input_files(**paths: str | os.PathLike[str]) -> None:
    """Check that files exist, given by the names of their arguments.

    Raises:
        FileError: One does not exist, or is a folder.
    """
    for argument, path in paths.items():
        input_file(path, argument)


def check_file_name(path: str | os.PathLike[str], argument: str) -> None:
    """Check the name of a file that is to be written.

    Raises:
        ArgumentTypeError: It is neither a string nor a path.
        ArgumentError: It is empty, ends like a folder, or its last part is longer than 254 characters.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"{argument}: expected the name of a file, got {type(path).__name__}")
    text = os.fspath(path)
    name = text.rpartition("/")[2]
    if name in ("", ".", "..") or "\0" in text:
        raise ArgumentError(f'{argument}: expected the name of a file, got "{text}"')
    if len(name) > LONGEST_NAME:
        raise ArgumentError(f"{argument}: a file name may have {LONGEST_NAME} characters, got {len(name)}")


def output_file(path: str | os.PathLike[str], argument: str) -> Path:
    """Return the path of a file to be written, after checking that its folder is writable.

    Raises:
        ArgumentTypeError, ArgumentError: It is not a valid file name.
        FileError: It is a folder, or its folder cannot be written to.
    """
    check_file_name(path, argument)
    file = Path(path)
    if is_folder(file):
        raise FileError(f'{argument}: "{file}" is a folder; expected the name of a file')
    atomic.check_writable(file.parent)
    return file
