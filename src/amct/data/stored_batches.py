"""Prefetches the next items in a background thread while the current one is processed.

One thread makes all calls, in order. It ends when the ReadAhead is closed or garbage-collected, or when the program
ends.

Data is read ahead only if it says so, by an attribute ``reads_ahead`` that is true: data from disk does
(``StoredBatches``), and other data does inside of ``InBackground``. The user's own iteration may draw from torch's
random numbers, or use what another thread must not touch, so it is run where the user runs it.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from amct.data.samples import Preparation, batches, holds_pictures, open_samples
from amct.errors import ArgumentError
from amct.interrupts import POLL_SECONDS, raise_if_interrupted

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from amct.data.samples import ColorOrder, SampleSource

Item = TypeVar("Item")
LONGEST_WAIT = 1.0
"""Seconds for which closing waits for a read under way; one that never ends (a pipe) must not hold up Ctrl-C."""


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

    def _is_takable(self) -> bool:
        return self.stopped or bool(self.ready) or self.error is not None

    def take(self) -> Item:
        with self.changed:
            # a wait without an end would sleep through a Ctrl-C that comes just before it
            while not self.changed.wait_for(self._is_takable, POLL_SECONDS):
                raise_if_interrupted()
            if self.ready:
                item = self.ready.popleft()
                self.changed.notify_all()
                return item
            if isinstance(self.error, StopIteration):
                raise StopIteration(self.error.value)  # a new one: the stored one would keep the frames of the caller
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
            thread.join(LONGEST_WAIT)


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
            thread = threading.Thread(
                target=copy_context().run, args=(self._shared.work,), name=self._name, daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return self._shared.take()

    def close(self) -> None:
        """End the thread and discard the prefetched items."""
        self._finalizer()


AHEAD = 2
"""How many batches are read ahead: one that is ready, and one to make up for a batch that took longer."""


class AheadIterator(Iterator[Item]):
    """The items of an iterator, read in a background thread; an exception of the iterator is raised by ``next``."""

    def __init__(self, items: Iterator[Item], depth: int = AHEAD) -> None:
        self._reading: ReadAhead[Item] = ReadAhead(partial(next, items), depth)

    def __next__(self) -> Item:
        return self._reading.take()

    def close(self) -> None:
        """End the thread."""
        self._reading.close()


class InBackground:
    """Data whose batches may be read in a background thread while earlier ones are used.

    For data of your own whose reading takes long: what its iteration does must be safe in another thread, and must not
    draw from random numbers that the model uses too.

    Args:
        data: An iterable of batches. It can be iterated as often as that, also in parts if it has ``part``.
    """

    reads_ahead = True

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the data has
        if name in ("part", "identity"):
            return getattr(self._data, name)
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]  # a TypeError says that the data has no length


# -- Calibration data on disk as batches: read when they are needed, one or two ahead, and never kept ------------------


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What data says of itself.

    Attributes:
        samples: How many there are.
        batch_size: How many make a batch.
        unit: "pictures" or "samples".
        preparation: What is done to each of them; empty: nothing.
    """

    samples: int
    batch_size: int
    unit: str = "samples"
    preparation: str = ""


class StoredBatches:
    """The samples of a path that ``open_samples`` reads, stacked to batches of float32 arrays.

    It can be iterated repeatedly and has a length. Calibration reads its next batches in a background thread. The
    pictures of a folder come in a fixed order in which the first ones are from all over the folder; no picture is
    decoded twice in a pass or kept.

    Args:
        path: A folder of pictures, a list of them, .npy, .npz, LMDB or idx.
        batch_size: The samples in a batch; the last one may have fewer.
        prepare: The preprocessing.
        most: Use no more batches than this; None: all.

    Raises:
        ArgumentError: A number is not positive.
    """

    reads_ahead = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int = 1,
        *,
        prepare: Preparation | None = None,
        most: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise ArgumentError(f"a batch has at least one sample, got size {batch_size}")
        if most is not None and most < 1:
            raise ArgumentError(f"most: expected at least one batch, got {most}")
        self.batch_size = batch_size
        self._path, self._prepare, self._most = path, prepare, most

    @cached_property
    def _source(self) -> SampleSource:
        return open_samples(self._path, self._prepare)

    def __len__(self) -> int:
        count = -(-len(self._source) // self.batch_size)
        return count if self._most is None else min(count, self._most)

    def in_color(self, color: ColorOrder) -> StoredBatches:
        """The same batches, in this channel order if none was chosen."""
        prepare = self._prepare or Preparation()
        if prepare.color is not None:
            return self
        return StoredBatches(self._path, self.batch_size, prepare=replace(prepare, color=color), most=self._most)

    def facts(self) -> DataFacts:
        """How many samples there are, whether or not they are used, and what is done to each."""
        pictures = holds_pictures(self._path)
        return DataFacts(
            samples=len(self._source),
            batch_size=self.batch_size,
            unit="pictures" if pictures else "samples",
            preparation=(self._prepare or Preparation()).text(pictures=pictures),
        )

    @property
    def samples(self) -> int:
        """The number of samples in all these batches."""
        total = len(self._source)
        return total if self._most is None else min(total, self._most * self.batch_size)

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return self.part(0, 1)

    def part(self, first: int, step: int) -> Iterator[NDArray[np.float32]]:
        """Return batches first, first + step, first + 2 · step, …; the others are not decoded.

        Raises:
            FileError, ParseError: The data cannot be read.
        """
        count = None if self._most is None else len(range(first, self._most, step))
        found = islice(batches(self._source, self.batch_size, first=first, step=step), count)
        return map(itemgetter(0), found)  # no frame keeps a batch

    def labelled(self) -> Iterator[tuple[NDArray[np.float32], list[int | None]]]:
        """Return the batches with the labels of their samples; a missing label is None."""
        return islice(batches(self._source, self.batch_size), self._most)

    def identity(self) -> str:
        """A fingerprint of the files, the preprocessing and the division into batches."""
        parts = (self._source.identity(), self.batch_size, self._most)
        return hashlib.sha256(repr(parts).encode()).hexdigest()
