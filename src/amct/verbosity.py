"""How much to say: the two environment variables of AMCT."""

from __future__ import annotations

import logging
import os

from amct.errors import ArgumentError

SCREEN_VARIABLE = "AMCT_LOG_LEVEL"
FILE_VARIABLE = "AMCT_LOG_FILE_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


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
