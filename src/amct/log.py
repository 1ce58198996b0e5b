"""Logging to the screen and, in AMCT's own functions, also to the file ``amct_log/<flow>.log``.

Modules log with ``logging.getLogger(__name__)``; all those loggers are children of ``amct``, and only that one gets
handlers here. Importing this module creates nothing and prints nothing. The root logger is never changed, and records
still reach handlers that the user's program has added to it. The minimum levels come from AMCT's two environment
variables.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from amct.errors import ArgumentError
from amct.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import TextIOWrapper

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


Flow = Literal["amct_pytorch", "amct_caffe"]

FOLDER = "amct_log"

_ROOT_OF_OURS = "amct"

_files_allowed: ContextVar[bool] = ContextVar("amct_log_files_allowed", default=True)


class _ScreenHandler(logging.Handler):
    """Writes ``[AMCT][INFO]text`` to the current standard error; markup in the text is not interpreted."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        if stream is None:  # a program without a console
            return
        try:
            stream.write(f"[AMCT][{record.levelname}]{printable(self.format(record))}\n")
            stream.flush()
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 - a failed log line must not stop the work; logging has its own report for it
            self.handleError(record)


class _FileHandler(logging.FileHandler):
    """Appends to the log file of one flow; the first line creates folder and file.

    When the file cannot be written, one warning is logged and the handler removes itself.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - [AMCT]:[%(name)s]: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def _open(self) -> TextIOWrapper:
        file = Path(self.baseFilename)
        file.parent.mkdir(exist_ok=True)
        for path in (file.parent, file):
            if path.is_symlink():  # in a folder from elsewhere it could point to any file of the user
                raise OSError(errno.ELOOP, f"{path.name} is a link")
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # opening failed; logging handles only errors of writing
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name logging calls
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        logger = logging.getLogger(_ROOT_OF_OURS)
        logger.removeHandler(self)
        with suppress(OSError):  # closing tries to write the rest once more
            self.close()
        reason = error.strerror or error
        logger.warning("no log file: %s cannot be written (%s); logging to the screen only", self.baseFilename, reason)


def start(flow: Flow) -> None:
    """Log to the screen and, unless inside ``screen_only``, to ``amct_log/<flow>.log`` under the current folder.

    Every AMCT function calls it first. Calling it again reads the environment variables again; after a change of the
    current folder or of the flow, a new file is used. The file is created by the first line written to it.

    Raises:
        ArgumentError: ``AMCT_LOG_LEVEL`` or ``AMCT_LOG_FILE_LEVEL`` names no level.
    """
    on_screen, in_file = line_level(), file_level()
    logger = _start_screen(on_screen)
    if _files_allowed.get():
        _file_handler(logger, Path.cwd() / FOLDER / f"{flow}.log").setLevel(in_file)
        logger.setLevel(min(on_screen, in_file))


@contextmanager
def screen_only() -> Iterator[None]:
    """Log to the screen; inside, ``start`` opens no log file. Also usable as a decorator.

    For functions and commands that AMCT does not have: they write only the files that the user requests.

    Raises:
        ArgumentError: ``AMCT_LOG_LEVEL`` names no level.
    """
    _start_screen(line_level())
    token = _files_allowed.set(False)
    try:
        yield
    finally:
        _files_allowed.reset(token)


def stop() -> None:
    """Close the log file and stop writing to the screen; for tests and for programs that end a flow explicitly."""
    logger = logging.getLogger(_ROOT_OF_OURS)
    for handler in [*logger.handlers]:
        if isinstance(handler, _ScreenHandler | _FileHandler):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)


def _start_screen(level: int) -> logging.Logger:
    """Add the screen handler if missing, set its level, and set the logger to the lowest level of its handlers."""
    logger = logging.getLogger(_ROOT_OF_OURS)
    screen = next((handler for handler in logger.handlers if isinstance(handler, _ScreenHandler)), None)
    if screen is None:
        screen = _ScreenHandler()
        logger.addHandler(screen)
    screen.setLevel(level)
    files = [handler.level for handler in logger.handlers if isinstance(handler, _FileHandler)]
    logger.setLevel(min([level, *files]))
    return logger


def _file_handler(logger: logging.Logger, path: Path) -> _FileHandler:
    """Return the handler that writes to ``path``, added if missing; one of another or a deleted file is removed."""
    for handler in [*logger.handlers]:
        if isinstance(handler, _FileHandler):
            if Path(handler.baseFilename) == path and (handler.stream is None or path.exists()):
                return handler
            logger.removeHandler(handler)
            handler.close()
    file = _FileHandler(path)
    logger.addHandler(file)
    return file
