"""Calibration data for several passes: what can be iterated only once is read once, and kept where that is needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from amct.errors import CalibrationError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Replay:
    """Batches as the user gave them.

    Iterating again starts anew; an iterator is read once, unless ``keep`` was called before.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._rest = data if isinstance(data, Iterator) else None
        self._keep = False
        self._read: list[Any] = []

    def __len__(self) -> int:
        """How many batches there are.

        Raises:
            TypeError: nobody can know before they are read.
        """
        if self._rest is not None or not isinstance(self._data, Sized):
            raise TypeError("the number of batches is not known before they are read")
        return len(self._data)

    @property
    def length(self) -> int | None:
        """How many batches there are, where that is known."""
        with suppress(TypeError):  # also a data loader over a stream, which has a length in name only
            return len(self)
        return None

    def keep(self) -> None:
        """Keep what is read of data that can be read only once, because it is needed several times."""
        self._keep = True

    def first(self) -> Any:  # noqa: ANN401  whatever the user calls a batch
        """The first batch, without losing it.

        Raises:
            CalibrationError: there is none.
        """
        if self._rest is not None:
            if not self._read:
                self._read.extend(itertools.islice(self._rest, 1))
            batch = self._read[0] if self._read else _NOTHING
        else:
            batch = next(iter(self._data), _NOTHING)
        if batch is _NOTHING:
            raise CalibrationError("calibration_data is empty; at least one batch is needed")
        return batch

    def __iter__(self) -> Iterator[Any]:
        if self._rest is None:
            yield from self._data
            return
        kept, self._read = self._read, self._read if self._keep else []
        yield from list(kept)
        for batch in self._rest:
            if self._keep:
                self._read.append(batch)
            yield batch


_NOTHING = object()
