"""The minimum log levels of screen and file, from AMCT's two environment variables."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

SCREEN_VARIABLE = "AMCT_LOG_LEVEL"
FILE_VARIABLE = "AMCT_LOG_FILE_LEVEL"
LOCAL_VARIABLE = "AMCT_LOCAL_CALIBRATION"
"""Set to 1: each of several processes works by itself."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


_default_level: ContextVar[int] = ContextVar("amct_default_line_level", default=logging.INFO)
"""The minimum level of log lines on screen when ``AMCT_LOG_LEVEL`` is not set."""


@contextmanager
def few_lines() -> Iterator[None]:
    """Hide log lines below WARNING on the screen, unless ``AMCT_LOG_LEVEL`` is set; progress bars are still shown.

    For commands that print their own summary.
    """
    token = _default_level.set(logging.WARNING)
    try:
        yield
    finally:
        _default_level.reset(token)


def line_level() -> int:
    """Return the minimum level of log lines on screen: ``AMCT_LOG_LEVEL``, or INFO, or WARNING inside ``few_lines``."""
    if os.environ.get(SCREEN_VARIABLE, "").strip() or is_other_process():
        return screen_level()
    return _default_level.get()


def is_other_process() -> bool:
    """Return whether this is one of several processes (``torch.distributed``) that are silent, all but the first."""
    distributed = sys.modules.get("torch.distributed")  # not imported here: torch is large
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_rank() > 0 and os.environ.get(LOCAL_VARIABLE, "") != "1"


def screen_level() -> int:
    """Return the minimum level shown on screen: ``AMCT_LOG_LEVEL``, or INFO (WARNING in processes but the first)."""
    return _level(SCREEN_VARIABLE)


def file_level() -> int:
    """Return the minimum level written to the log file: ``AMCT_LOG_FILE_LEVEL``, or INFO (as on screen)."""
    return _level(FILE_VARIABLE)


def _level(variable: str) -> int:
    value = os.environ.get(variable, "").strip()
    if not value:
        return logging.WARNING if is_other_process() else logging.INFO
    if value.upper() not in LEVELS:
        raise ArgumentError(
            f"the environment variable {variable} must be one of {', '.join(LEVELS)} (in any case), got {value!r}"
        )
    level: int = getattr(logging, value.upper())
    return level
