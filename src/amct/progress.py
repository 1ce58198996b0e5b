"""Progress bars on the terminal.

A bar is drawn on standard error, only if that is a terminal and ``AMCT_LOG_LEVEL`` is INFO or lower. There is no
background thread (data loaders fork); a bar is redrawn when it advances, at most ten times a second. A bar inside a bar
is one more line of the same display.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, TypeVar

from amct.printable import escaped, shortened
from amct.verbosity import screen_level

if TYPE_CHECKING:
    from rich.progress import Progress

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
            advance()


@contextmanager
def bar(description: str, total: float | None = None) -> Iterator[Advance]:
    """Show a bar that the caller advances.

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
    task = display.add_task(escaped(shortened(description)), total=total)
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


def _new_display() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),  # layer names may contain brackets
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        # Lines printed meanwhile appear above the bar; piped output is not redirected.
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )
