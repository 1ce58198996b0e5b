"""Fetch the next few items in a background thread while the current one is used.

The order is that of the calls, one thread does them all, and the thread ends with its owner: when the ReadAhead is
closed or no longer used, or when the program ends.
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
    """State shared by the thread and its owner; it holds no reference to the owner, which can be collected."""

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
            except BaseException as error:  # noqa: BLE001 - it is raised where the item is asked for
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
    """Calls ``fetch`` in the background, up to ``depth`` items ahead; the thread starts with the first ``take``.

    Args:
        fetch: Makes the next item; called from one thread only, and must not know the ReadAhead's owner (else the
            owner would live as long as the thread).
        depth: How many items may wait.
        name: The thread's name, for those who debug.
    """

    def __init__(self, fetch: Callable[[], Item], depth: int, name: str = "read-ahead") -> None:
        self._shared = _Shared(fetch, max(1, depth))
        self._threads: list[threading.Thread] = []
        self._name = name
        self._finalizer = weakref.finalize(self, _end, self._shared, self._threads)

    def take(self) -> Item:
        """The next item; what ``fetch`` raised is raised here, again at each later call.

        Raises:
            ArgumentError: It has been closed.
        """
        if not self._threads and self._finalizer.alive:
            # daemon: at the end of the program the finalizer stops it; a waiting ordinary thread would come first
            thread = threading.Thread(target=self._shared.work, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return self._shared.take()

    def close(self) -> None:
        """End the thread and drop what it fetched."""
        self._finalizer()
