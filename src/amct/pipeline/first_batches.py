"""Data that is read as a stream, whose first batches are kept: what is measured afterwards need not be read again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from amct.pipeline.batches import batch_size

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BYTES = 64 << 20
"""Bytes of the batches that are kept; all of a small data set, enough of a large one to measure a model on."""


class Source(Protocol):
    """Data on disk that is read in batches."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def part(self, first: int, step: int) -> Iterator[Any]:
        """Every ``step``-th batch, from number ``first`` on."""

    def identity(self) -> str:
        """A fingerprint of the data."""


class FirstBatches:
    """The batches of some data; the first ones stay in memory when they have been read.

    Args:
        data: The data; it is not changed while it is used.
        most: The bytes of all that is kept; the first batch is always kept.
    """

    def __init__(self, data: Source, most: int = MOST_BYTES) -> None:
        self._data = data
        self._left = most
        self._kept: list[Any] = []
        self._is_full = False
        self._has_all = False
        self._lock = threading.Lock()  # a pass may be read in another thread

    @property
    def reads_ahead(self) -> bool:
        """Yes, unless all is in memory."""
        return not self._has_all

    def __len__(self) -> int:
        return len(self._data)

    def identity(self) -> str:
        """A fingerprint of the data."""
        return self._data.identity()

    def part(self, first: int, step: int) -> Iterator[Any]:
        """Every ``step``-th batch, from number ``first`` on."""
        return iter(self._kept[first::step]) if self._has_all else self._data.part(first, step)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kept) if self._has_all else _Pass(self, iter(self._data), 0)

    def first(self) -> Sequence[Any]:
        """As many batches from the beginning as may be kept; those that were not read yet are read now."""
        if not (self._is_full or self._has_all):
            for _ in _Pass(self, self._data.part(len(self._kept), 1), len(self._kept)):
                if self._is_full:
                    break
        return tuple(self._kept)

    def notice(self, number: int, batch: Any) -> None:  # noqa: ANN401  the user's own kind
        """Keep a batch if it is the next one and fits."""
        with self._lock:
            if number != len(self._kept) or self._is_full:
                return
            self._left -= batch_size(batch)[1]
            self._is_full = self._left < 0
            if not self._is_full or number == 0:
                self._kept.append(batch)

    def notice_end(self, count: int) -> None:
        """All batches have been read."""
        with self._lock:
            self._has_all = count == len(self._kept)


class _Pass(Iterator[Any]):
    """A pass over the data from some batch on."""

    def __init__(self, owner: FirstBatches, batches: Iterator[Any], number: int) -> None:
        self._owner = owner
        self._batches = batches
        self._number = number

    def __next__(self) -> Any:  # noqa: ANN401  the user's own kind
        try:
            batch = next(self._batches)
        except StopIteration:
            self._owner.notice_end(self._number)
            raise
        self._owner.notice(self._number, batch)
        self._number += 1
        return batch
