"""Prefetches the next items in a background thread while the current one is processed.

One thread makes all calls, in order. It ends when the ReadAhead is closed or garbage-collected, or when the program
ends.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

Item = TypeVar("Item")


class _Shared(Generic[Item]):
    """State shared by the thread and the ReadAhead; without a reference to the latter, which can thus be collected."""

    def __init__(self, fetch: Callable[[], Item], depth: int) -> None:
        self.fetch = fetch
        self.depth = depth
        self.ready: deque[Item] = deque()
        self.error: BaseException | None = None
        self.stopped = False
        self.changed = threading.Condition()

    def work(self) -> None:
        """Fetch until ``stopped`` is set or fetching fails."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.stopped or len(self.ready) < self.depth)
                if self.stopped:
                    return
            try:
                item = self.fetch()
            except BaseException as error:  # noqa: BLE001 - it is raised again by take()
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.ready.append(item)
                self.changed.notify_all()

    def take(self) -> Item:
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.ready or self.error is not None)
            if self.ready:
                item = self.ready.popleft()
                self.changed.notify_all()
                return item
            if self.error is not None:
                raise self.error
            raise ArgumentError("nothing more can be taken: reading ahead has been closed")


def _end(shared: _Shared[Item], threads: list[threading.Thread]) -> None:
    with shared.changed:
        shared.stopped = True
        shared.ready.clear()
        shared.changed.notify_all()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


class ReadAhead(Generic[Item]):
    """Calls ``fetch`` in a background thread, up to ``depth`` items ahead; the first ``take`` starts the thread.

    Args:
        fetch: Returns the next item; called from one thread only. It must not refer to the ReadAhead or its owner,
            which could otherwise never be garbage-collected.
        depth: The maximum number of prefetched items.
        name: The name of the thread, for debugging.
    """

    def __init__(self, fetch: Callable[[], Item], depth: int, name: str = "read-ahead") -> None:
        self._shared = _Shared(fetch, max(1, depth))
        self._threads: list[threading.Thread] = []
        self._name = name
        self._finalizer = weakref.finalize(self, _end, self._shared, self._threads)

    def take(self) -> Item:
        """Return the next item; an exception of ``fetch`` is raised here, and again by each later call.

        Raises:
            ArgumentError: The ReadAhead has been closed.
        """
        if not self._threads and self._finalizer.alive:
            # daemon: at exit Python would join an ordinary thread before it runs the finalizer that stops the thread
            thread = threading.Thread(target=self._shared.work, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return self._shared.take()

    def close(self) -> None:
        """End the thread and discard the prefetched items."""
        self._finalizer()
