"""Makes sure that Ctrl-C ends the command, even if its KeyboardInterrupt is lost.

A package that is being imported may swallow the exception or raise an ImportError in its place, and a signal that
arrives just before a wait does not end the wait. The command therefore remembers that it was interrupted, and long work
asks for it between two steps.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

POLL_SECONDS = 0.5
"""The longest wait after which an interrupt is looked for."""

_interrupted: ContextVar[threading.Event | None] = ContextVar("amct_interrupted", default=None)


@contextmanager
def remembered() -> Iterator[None]:
    """Remember an interrupt inside of the context, for ``raise_if_interrupted``; a handler of the user's is kept.

    Raises:
        KeyboardInterrupt: An exception left the context after an interrupt: it is taken for the result of that.
    """
    is_main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = threading.Event()

    def remember(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    token = _interrupted.set(interrupted)
    signal.signal(signal.SIGINT, remember)
    try:
        yield
    except Exception as error:
        if interrupted.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _interrupted.reset(token)


def raise_if_interrupted() -> None:
    """Raise the KeyboardInterrupt of an earlier Ctrl-C once more, if its first one was lost.

    Raises:
        KeyboardInterrupt: The command was interrupted.
    """
    interrupted = _interrupted.get()
    if interrupted is not None and interrupted.is_set():
        raise KeyboardInterrupt
