"""Progress bars on the terminal.

A bar is drawn on standard error, only if that is a terminal and ``AMCT_LOG_LEVEL`` is INFO or lower. There is no
background thread (data loaders fork); a bar is redrawn when it advances, at most ten times a second. A bar inside a bar
is one more line of the same display. It shows what is done of how much, how much a second, and the time left, or where
the end is not known the time spent.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import finalize

from amct.interrupts import raise_if_interrupted
from amct.log import screen_level
from amct.printable import escaped, shortened

if TYPE_CHECKING:
    from rich.progress import Progress, Task

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


# -- The progress bar of a calibration session -------------------------------------------------------------------------


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
