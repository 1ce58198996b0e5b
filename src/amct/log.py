"""Where log lines go: the screen, and ``amct_log/<flow>.log`` once a flow has started.

Modules log with ``logging.getLogger(__name__)``, as everywhere in Python; all those loggers are children of ``amct``,
and only that one gets handlers here. Importing this module creates nothing and prints nothing; the root logger is never
touched, and records still reach the handlers that a program has put there itself.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

from amct.verbosity import file_level, line_level

Flow = Literal["amct_pytorch", "amct_caffe", "amct_onnx"]

FOLDER = "amct_log"

_ROOT_OF_OURS = "amct"


class _ScreenHandler(logging.Handler):
    """Writes ``[AMCT][INFO]text`` to whatever standard error is at that moment, without reading tags in the text."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        if stream is None:  # a program without a console
            return
        try:
            stream.write(f"[AMCT][{record.levelname}]{self.format(record)}\n")
            stream.flush()
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 - a log line must never end the work; logging reports it its own way
            self.handleError(record)


class _FileHandler(logging.FileHandler):
    """Appends to the log file of one flow; when the disk refuses, says so once and goes on without."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name logging calls
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        logger = logging.getLogger(_ROOT_OF_OURS)
        logger.removeHandler(self)
        with suppress(OSError):  # closing tries to write the rest once more
            self.close()
        logger.warning("%s cannot be written any more (%s); going on without a log file", self.baseFilename, error)


def start(flow: Flow) -> None:
    """Begin or go on logging for a flow: to the screen, and to ``amct_log/<flow>.log`` under the current folder.

    Call it at the beginning of every public function of a flow: calling it again changes nothing, except that the
    environment variables are read anew and that a new current folder or another flow gets its own file.

    Raises:
        ArgumentError: ``AMCT_LOG_LEVEL`` or ``AMCT_LOG_FILE_LEVEL`` names no level.
    """
    on_screen, in_file = line_level(), file_level()
    logger = logging.getLogger(_ROOT_OF_OURS)
    screen = next((handler for handler in logger.handlers if isinstance(handler, _ScreenHandler)), None)
    if screen is None:
        screen = _ScreenHandler()
        logger.addHandler(screen)
    screen.setLevel(on_screen)
    logger.setLevel(min(on_screen, in_file))
    file = _file_handler(logger, Path.cwd() / FOLDER / f"{flow}.log")
    if file is not None:
        file.setLevel(in_file)


def stop() -> None:
    """Close the log file and stop writing to the screen; for tests and for programs that end a flow explicitly."""
    logger = logging.getLogger(_ROOT_OF_OURS)
    for handler in [*logger.handlers]:
        if isinstance(handler, _ScreenHandler | _FileHandler):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)


def _file_handler(logger: logging.Logger, path: Path) -> _FileHandler | None:
    """The handler that writes to ``path``, opened if needed, in place of any other; None when it cannot be written."""
    for handler in [*logger.handlers]:
        if isinstance(handler, _FileHandler):
            if Path(handler.baseFilename) == path and path.exists():
                return handler
            logger.removeHandler(handler)
            handler.close()
    try:
        path.parent.mkdir(exist_ok=True)
        file = _FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        logger.warning("no log file: %s cannot be written (%s); going on without", path, error.strerror or error)
        return None
    file.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - [AMCT]:[%(name)s]: %(message)s"))
    logger.addHandler(file)
    return file
