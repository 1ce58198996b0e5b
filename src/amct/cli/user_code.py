"""Finds the line of the user's own code that raised an error: a model's factory, its forward, a Python layer."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_OURS = Path(__file__).parent.parent
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def place_in_user_code(error: BaseException) -> str | None:
    """Return file, line, function and source of the last frame in the user's files; None if there is no such frame."""
    if isinstance(error, SyntaxError) and error.filename is not None and _is_users(error.filename):
        return _place(error.filename, error.lineno, None, error.text)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return _place(frame.filename, frame.lineno, frame.name, frame.line)
    return None


def _place(file: str, line: int | None, function: str | None, source: str | None) -> str:
    inside = f", in {function}" if function else ""
    return f"{file}:{line}{inside}" + (f"\n    {source.strip()}" if source else "")


def _is_users(file: str) -> bool:
    """Return whether a file is neither ours, nor installed, nor made at run time such as ``<string>``."""
    path = Path(file)
    return path.is_file() and not any(path.is_relative_to(folder) for folder in (_OURS, *_INSTALLED))
