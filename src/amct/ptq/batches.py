"""A user's data as batches that a model can run on: arrays, lists of batches, data loaders, generators.

Iterating again starts anew. Data that can be iterated only once is read once, unless ``keep`` was called before.
Nothing here holds more than one batch, except what ``keep`` asks for and the few samples of ``KeptBatches``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from amct.errors import ArgumentTypeError, CalibrationError
from amct.export.check.batch import LARGEST_BATCH, MOST_BATCHES, MOST_SAMPLES

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


class KeptBatches:
    """Copies of the first batches that pass by, for the check of the saved files, in a fixed budget of memory.

    Attributes:
        kept: The copies as arguments of the model: the first batch, and further ones as far as the budget goes.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._samples = self._bytes = 0

    def passing(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches."""
        return map(self._notice, batches)  # no frame keeps a batch while the model runs

    def _notice(self, batch: Any) -> Any:  # noqa: ANN401  the door's arguments
        if self._samples >= MOST_SAMPLES or len(self.kept) >= MOST_BATCHES:
            return batch
        samples, size = _size(batch)
        fits = self._samples + samples <= MOST_SAMPLES and self._bytes + size <= LARGEST_BATCH
        if fits or not self.kept:
            self.kept.append(pytree.tree_map_only((Tensor, np.ndarray), _copy, batch))
            self._samples += samples
            self._bytes += size
        return batch


def _size(batch: Any) -> tuple[int, int]:  # noqa: ANN401  the door's arguments
    """The samples of a batch, by the first axis of its largest array, and the bytes of all its arrays."""
    arrays = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, (Tensor, np.ndarray))]
    largest = max(arrays, key=lambda array: array.nbytes, default=None)
    samples = int(largest.shape[0]) if largest is not None and largest.ndim else 1
    return samples, sum(array.nbytes for array in arrays)


def _copy(array: Tensor | NDArray[Any]) -> Tensor | NDArray[Any]:
    return array.detach().clone() if isinstance(array, Tensor) else array.copy()
