"""Logging to the screen and, in AMCT's own functions, also to the file ``amct_log/<flow>.log``; progress bars.

Modules log with ``logging.getLogger(__name__)``; all those loggers are children of ``amct``, and only that one gets
handlers here. Importing this module creates nothing and prints nothing. The root logger is never changed, and records
still reach handlers that the user's program has added to it; those that such a handler shows on the console are not
shown again. The minimum levels come from AMCT's two environment variables.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar
from weakref import finalize

from amct.errors import ArgumentError
from amct.interrupts import raise_if_interrupted
from amct.printable import escaped, printable, shortened

if TYPE_CHECKING:
    from io import TextIOWrapper

    from rich.progress import Progress, Task

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
_LONGEST_NAME = 100

_ROOT_OF_OURS = "amct"

_files_allowed: ContextVar[bool] = ContextVar("amct_log_files_allowed", default=True)


class _ScreenHandler(logging.Handler):
    """Writes ``[AMCT][INFO]text`` to the current standard error; markup in the text is not interpreted."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        if stream is None or _is_shown_by_root(record):  # a program without a console, or with its own lines there
            return
        try:
            stream.write(f"[AMCT][{record.levelname}]{printable(self.format(record))}\n")
            stream.flush()
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 - a failed log line must not stop the work; logging has its own report for it
            self.handleError(record)


def _is_shown_by_root(record: logging.LogRecord) -> bool:
    """Whether the root logger writes a record to the console, as after ``logging.basicConfig()``."""
    consoles = (sys.stderr, sys.stdout)
    return logging.getLogger(_ROOT_OF_OURS).propagate and any(
        isinstance(handler, logging.StreamHandler) and handler.stream in consoles and record.levelno >= handler.level
        for handler in logging.getLogger().handlers
    )


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
        _refuse_links(Path(self.baseFilename))
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


def write_layer_files(flow: Flow, layers: Mapping[str, Sequence[tuple[int, str]]]) -> None:
    """Append lines about layers, each with its level, to a file of each layer: ``amct_log/<flow>_<layer>.log``.

    Lines below ``AMCT_LOG_FILE_LEVEL`` are left out, and inside ``screen_only`` all; if a file cannot be written, a
    warning says so once.
    """
    if not _files_allowed.get():
        return
    level, folder, names = file_level(), Path.cwd() / FOLDER, set[str]()
    for layer, lines in layers.items():
        text = "".join(f"{logging.getLevelName(at)} - {printable(line)}\n" for at, line in lines if at >= level)
        name = re.sub(r"[^\w.-]", "_", layer)[:_LONGEST_NAME]
        while name.lower() in names:
            name += "_"
        names.add(name.lower())
        path = folder / f"{flow}_{name}.log"
        try:
            if text:
                _refuse_links(path)
                with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)
        except OSError as error:
            logger = logging.getLogger(_ROOT_OF_OURS)
            logger.warning("no log files of layers: %s cannot be written (%s)", path, error.strerror or error)
            return


def _refuse_links(file: Path) -> None:
    """Make the folder of a log file; in a folder from elsewhere a link could point to any file of the user."""
    file.parent.mkdir(exist_ok=True)
    for path in (file.parent, file):
        if path.is_symlink():
            raise OSError(errno.ELOOP, f"{path.name} is a link")


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


# -- Progress bars on the terminal -------------------------------------------------------------------------------------
#
# A bar is drawn on standard error, only if that is a terminal and ``AMCT_LOG_LEVEL`` is INFO or lower. There is no
# background thread (data loaders fork); a bar is redrawn when it advances, at most ten times a second. A bar inside a
# bar is one more line of the same display. It shows what is done of how much, how much a second, and the time left, or
# where the end is not known the time spent.


_T = TypeVar("_T")

_REDRAW_SECONDS = 0.1

_display: ContextVar[Progress | None] = ContextVar("amct_progress_display", default=None)
"""The display that is being drawn; an inner bar adds a line to it."""


class Advance(Protocol):
    """Advances a bar, and optionally changes its description."""

    def __call__(self, steps: float = 1, description: str | None = None) -> None:
        """Advance the bar by ``steps``."""


def track(iterable: Iterable[_T], description: str, total: float | None = None) -> Iterator[_T]:
    """Iterate over ``iterable`` with a progress bar; ``total`` is its length, if known."""
    if total is None and isinstance(iterable, Sized):
        with suppress(TypeError):  # raised by len() of a data loader over an iterable dataset
            total = len(iterable)
    with bar(description, total) as advance:
        for item in iterable:
            yield item
            raise_if_interrupted()
            advance()


@contextmanager
def bar(description: str, total: float | None = None, *, unit: str = "", done: float = 0) -> Iterator[Advance]:
    """Show a bar that the caller advances.

    Args:
        description: What is being done.
        total: How many steps there are, if known.
        unit: What a step is, for the rate.
        done: The steps that were done before; they do not count in the rate.

    >>> with bar("Calibrating", total=2) as advance:
    ...     advance()
    """
    if not _is_drawn():
        yield _advance_nothing
        return
    outer = _display.get()
    display = outer or _new_display()
    if outer is None:
        _display.set(display)
        display.start()
    task = display.add_task(escaped(shortened(description)), total=total, completed=int(done), unit=unit, before=done)
    drawn = 0.0

    def advance(steps: float = 1, description: str | None = None) -> None:
        nonlocal drawn
        shown = None if description is None else escaped(shortened(description))
        display.update(task, advance=steps, description=shown)
        if time.monotonic() - drawn >= _REDRAW_SECONDS:
            display.refresh()
            drawn = time.monotonic()

    try:
        display.refresh()
        yield advance
    finally:
        display.refresh()
        if outer is None:
            _display.set(None)
            display.stop()
        else:
            display.remove_task(task)


def _is_drawn() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and screen_level() <= logging.INFO


def _advance_nothing(steps: float = 1, description: str | None = None) -> None:
    """The advance of a bar that is not drawn."""


def rate_text(task: Task) -> str:
    """How many steps a second a task makes; slow ones by the seconds of a step."""
    elapsed = task.finished_time if task.finished else task.elapsed
    steps = task.completed - task.fields.get("before", 0)
    if not elapsed or steps <= 0:
        return ""
    rate, unit = steps / elapsed, task.fields.get("unit", "")
    return f"{rate:.1f} {unit}/s".replace(" /", "/") if rate >= 1 else f"{1 / rate:.1f} s each"


def time_text(task: Task) -> str:
    """The time left, or without a known end the time spent."""
    elapsed = task.elapsed or 0.0
    steps = task.completed - task.fields.get("before", 0)
    if task.total is None:
        return f"{_clock(elapsed)} so far"
    if task.finished or steps <= 0:
        return "" if task.finished else "-:--:-- left"
    return f"{_clock((task.total - task.completed) * elapsed / steps)} left"


def _clock(seconds: float) -> str:
    minutes, whole = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{whole:02}"


def _new_display() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
    from rich.text import Text

    class Column(ProgressColumn):
        """A text that is made from a task."""

        def __init__(self, make: Callable[[Task], str]) -> None:
            super().__init__()
            self._make = make

        def render(self, task: Task) -> Text:
            return Text(self._make(task), style="progress.remaining")

    return Progress(
        TextColumn("{task.description}", markup=False),  # layer names may contain brackets
        BarColumn(),
        MofNCompleteColumn(),
        Column(rate_text),
        Column(time_text),
        console=Console(stderr=True),
        auto_refresh=False,
        # Lines printed meanwhile appear above the bar; piped output is not redirected.
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )


class ProgressBar:
    """The progress bar of a session: shown from the first batch on, removed after the last one."""

    def __init__(self, total: int | None, *, shown: bool) -> None:
        self._total = total
        self._is_shown = shown
        self._moved_to = 0
        self._stack = ExitStack()
        self._advance: Advance | None = None
        # restores the cursor of the terminal if the loop is aborted
        self._cleanup = finalize(self, self._stack.close)

    def start_at(self, done: int) -> None:
        """Tell what was done before; the rate does not count it."""
        self._moved_to = done

    def move_to(self, done: int) -> None:
        """Show that so much is done."""
        if not self._is_shown:
            return
        if self._advance is None:
            shown = bar("Calibrating", self._total, unit="batches", done=self._moved_to)
            self._advance = self._stack.enter_context(shown)
        if done > self._moved_to:
            self._advance(done - self._moved_to)
            self._moved_to = done

    def close(self) -> None:
        """Remove the bar."""
        self._cleanup()
