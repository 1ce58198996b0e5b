"""How much to say: the two environment variables of AMCT."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

SCREEN_VARIABLE = "AMCT_LOG_LEVEL"
FILE_VARIABLE = "AMCT_LOG_FILE_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


_unasked: ContextVar[int] = ContextVar("amct_unasked_lines", default=logging.INFO)
"""The least level of lines on screen when the user has not asked for one."""


@contextmanager
def few_lines() -> Iterator[None]:
    """Inside, log lines below WARNING go to the file only, unless the user asked for them; progress is still shown.

    For commands, which tell in their own words what they did.
    """
    token = _unasked.set(logging.WARNING)
    try:
        yield
    finally:
        _unasked.reset(token)


def line_level() -> int:
    """The least level of log lines on screen: as ``screen_level``, but what ``few_lines`` says when nothing is set."""
    return screen_level() if os.environ.get(SCREEN_VARIABLE, "").strip() else _unasked.get()


def screen_level() -> int:
    """The least level shown on screen, from ``AMCT_LOG_LEVEL``; INFO when it is not set."""
    return _level(SCREEN_VARIABLE)


def file_level() -> int:
    """The least level written to the log file, from ``AMCT_LOG_FILE_LEVEL``; INFO when it is not set."""
    return _level(FILE_VARIABLE)


def _level(variable: str) -> int:
    value = os.environ.get(variable, "").strip()
    if not value:
        return logging.INFO
    if value.upper() not in LEVELS:
        raise ArgumentError(
            f"the environment variable {variable} must be one of {', '.join(LEVELS)} (in any case), got {value!r}"
        )
    level: int = getattr(logging, value.upper())
    return level
