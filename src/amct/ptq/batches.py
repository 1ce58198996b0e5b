"""A user's data as batches that a model can run on: arrays, lists of batches, data loaders, generators.

Iterating again starts anew. Data that can be iterated only once is read once, unless ``keep`` was called before.
Nothing here holds more than one batch, except what ``keep`` asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any

from amct.errors import ArgumentTypeError, CalibrationError

BatchInputs = Callable[[Any], Any]
"""Turns a batch of the user's data into the inputs of the model, where its form does not tell them."""

_EMPTY = object()


class Batches:
    """The data as arguments of one model.

    Args:
        data: One batch of a type in ``single``, or an iterable of batches.
        convert: Turns a batch into the arguments of one run of the model; labels are left out.
        single: The types that are one batch by themselves.
        expected: What the data may be, for the error message.
    """

    def __init__(
        self, data: object, convert: Callable[[Any], Any], *, single: tuple[type, ...] = (), expected: str = ""
    ) -> None:
        if isinstance(data, single):
            data = [data]
        if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
            raise ArgumentTypeError(f"calibration_data: expected {expected}, got {type(data).__name__}")
        self._data = data
        self._convert = convert
        self._once = data if isinstance(data, Iterator) else None
        self._keep = False
        self._read: list[Any] = []

    @property
    def length(self) -> int | None:
        """The number of batches, where it is known before they are read."""
        if self._once is not None or not isinstance(self._data, Sized):
            return None
        with suppress(TypeError):  # a data loader over a stream has ``__len__`` and raises
            return len(self._data)
        return None

    def keep(self) -> None:
        """Keep what is read from data that can be iterated only once, because several passes are needed."""
        self._keep = True

    def first(self) -> Any:  # noqa: ANN401  the door's arguments
        """The first batch as arguments; it is not consumed.

        Raises:
            CalibrationError: There is no batch.
        """
        if self._once is not None and not self._read:
            self._read.extend(itertools.islice(self._once, 1))
        batch = next(iter(self._data if self._once is None else self._read), _EMPTY)
        if batch is _EMPTY:
            raise CalibrationError("calibration_data is empty; at least one batch is needed")
        return self._convert(batch)

    def limited(self, count: int | None) -> Iterator[Any]:
        """The first ``count`` batches as arguments; all of them when ``count`` is None."""
        return itertools.islice(self, count)

    def __iter__(self) -> Iterator[Any]:
        return map(self._convert, self._originals())  # no frame keeps a batch while the model runs

    def with_originals(self) -> Iterator[tuple[Any, Any]]:
        """Each batch as the data gave it (with its labels), and as arguments."""
        for batch in self._originals():
            yield batch, self._convert(batch)

    def _originals(self) -> Iterator[Any]:
        if self._once is None:
            return iter(self._data)
        return self._kept() if self._keep else self._read_once()

    def _read_once(self) -> Iterator[Any]:
        while self._read:
            yield self._read.pop(0)
        assert self._once is not None
        yield from self._once

    def _kept(self) -> Iterator[Any]:
        yield from list(self._read)
        assert self._once is not None
        for batch in self._once:
            self._read.append(batch)
            yield batch
