"""A user's data as batches that a model can run on: arrays, lists of batches, data loaders, generators.

Iterating again starts anew. Data that can be iterated only once is read once, unless ``keep`` was called before.
Data that allows it (``reads_ahead``) is read one or two batches ahead in a thread. Nothing else here holds more than
one batch, except what ``keep`` asks for and the ``FirstBatches`` of a data set that is read again.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from amct.calibration.ranks import ALONE, fingerprint
from amct.data.stored_batches import AheadIterator, DataFacts, StoredBatches
from amct.errors import ArgumentTypeError, CalibrationError
from amct.export.check.batch import batch_size
from amct.model.calibration_data import CalibrationData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from amct.calibration import Ranks
    from amct.data.samples import ColorOrder

BatchInputs = Callable[[Any], Any]
"""Turns a batch of the user's data into the inputs of the model, where its form does not tell them."""

MOST_BYTES = 64 << 20
"""Bytes of the batches that are kept; all of a small data set, enough of a large one to measure a model on."""
_EMPTY = object()


class Batches:
    """The data as arguments of one model.

    Args:
        data: One batch of a type in ``single``, or an iterable of batches.
        convert: Turns a batch into the arguments of one run of the model; labels are left out.
        single: The types that are one batch by themselves.
        expected: What the data may be, for the error message.
        color: The channel order of pictures from disk for which none was chosen.
        name: The user's argument, for error messages.
    """

    def __init__(
        self,
        data: object,
        convert: Callable[[Any], Any],
        *,
        single: tuple[type, ...] = (),
        expected: str = "",
        color: ColorOrder = "rgb",
        name: str = "data",
    ) -> None:
        if isinstance(data, single):
            data = _OneBatch([data])
        if isinstance(data, StoredBatches):
            data = data.in_color(color)
        if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
            raise ArgumentTypeError(f"{name}: expected {expected}, got {type(data).__name__}")
        self._name = name
        self._data = data
        self._convert = convert
        self._once = data if isinstance(data, Iterator) else None
        self._keep = False
        self._read: list[Any] = []
        self._ahead: weakref.WeakSet[AheadIterator[Any]] = weakref.WeakSet()

    def then(self, step: Callable[[Any], Any]) -> Batches:
        """The same data, with a further step behind the conversion to arguments."""
        before = self._convert
        self._convert = lambda batch: step(before(batch))
        return self

    @property
    def length(self) -> int | None:
        """The number of batches, where it is known before they are read."""
        if self._once is not None or not isinstance(self._data, Sized):
            return None
        with suppress(TypeError):  # a data loader over a stream has ``__len__`` and raises
            return len(self._data)
        return None

    def used(self, count: int) -> CalibrationData:
        """What the first ``count`` batches are of all the data, in samples where the data tells their number."""
        facts = self._facts()
        if facts is None:
            return CalibrationData(used=count, of=self.length)
        used = min(count * facts.batch_size, facts.samples)
        return CalibrationData(used=used, of=facts.samples, unit=facts.unit, preparation=facts.preparation)

    def _facts(self) -> DataFacts | None:
        data = self._data
        if hasattr(data, "facts"):
            found: DataFacts | None = data.facts()
            return found
        if isinstance(data, DataLoader) and data.batch_size is not None and isinstance(data.dataset, Sized):
            with suppress(TypeError):  # a data set may have ``__len__`` and raise
                return DataFacts(samples=len(data.dataset), batch_size=data.batch_size)
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
            raise CalibrationError(f"{self._name} is empty; at least one batch is needed")
        return self._convert(batch)

    def limited(self, count: int | None, ranks: Ranks = ALONE, *, skip: int = 0) -> Iterator[Any]:
        """The first ``count`` batches as arguments, all of them when ``count`` is None; of several processes its share.

        Only the batches of the share are read where the data allows it: a sequence, a DataLoader over a data set with
        indices, an object with a method ``part(first, step)``. Otherwise the others are read and left out.

        Args:
            count: The number of batches of all processes.
            ranks: The processes.
            skip: How many batches of its share are left out at the beginning.
        """
        first = ranks.number(skip)
        if self._once is not None:
            originals = itertools.islice(self._originals(), first, count, ranks.size)
        elif first == 0 and ranks.is_alone:
            originals = itertools.islice(iter(self._data), count)
        else:
            share = None if count is None else len(range(first, count, ranks.size))
            originals = itertools.islice(data_part(self._data, first, ranks.size), share)
        return map(self._convert, self._read_ahead(originals))

    def _read_ahead(self, originals: Iterator[Any]) -> Iterator[Any]:
        """The same batches, read in a thread where the data allows it."""
        if not getattr(self._data, "reads_ahead", False):
            return originals
        ahead = AheadIterator(originals)
        self._ahead.add(ahead)
        return ahead

    def close(self) -> None:
        """End the threads of passes that were not read to their end."""
        for ahead in list(self._ahead):
            ahead.close()

    def fingerprint(self, first: Any) -> str:  # noqa: ANN401  the door's arguments
        """What the data is, by its first batch, its length, and what data from disk says of its files."""
        leaves, form = pytree.tree_flatten(first)
        identity = self._data.identity() if hasattr(self._data, "identity") else ""
        return fingerprint([str(form), str(self.length), identity, *leaves])

    @property
    def is_read_once(self) -> bool:
        """Whether the data can be iterated only once."""
        return self._once is not None

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


class _OneBatch(list[Any]):
    """The only batch of data that is one array or tensor."""

    def facts(self) -> DataFacts | None:
        samples = batch_size(self[0])[0]
        return DataFacts(samples=samples, batch_size=samples) if samples else None


def as_array(name: str, value: Any, dtype: Any = None, *, argument: str = "data") -> NDArray[Any]:  # noqa: ANN401  the user's own kind
    """Convert a value of a batch, an array, a torch tensor or nested lists of numbers, to an array.

    Raises:
        ArgumentTypeError: NumPy has no such values, or there are none (bfloat16, a tensor on the meta device).
    """
    try:
        array: NDArray[Any] = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value, dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        kind = f"a tensor of {value.dtype} on {value.device}" if hasattr(value, "detach") else type(value).__name__
        raise ArgumentTypeError(
            f'{argument}: input "{name}" cannot be read from {kind}: {error}. Give an array of numbers or a '
            "tensor with values in memory, such as tensor.float()"
        ) from error
    return array


def data_part(data: Any, first: int, step: int) -> Iterator[Any]:  # noqa: ANN401  any iterable of batches
    """Every ``step``-th batch of some data, from number ``first`` on; the others are read only if there is no way."""
    if hasattr(data, "part"):
        return iter(data.part(first, step))
    if isinstance(data, (list, tuple)):
        return iter(data[first::step])
    if isinstance(data, DataLoader) and data.batch_sampler is not None:
        loader: DataLoader[Any] = DataLoader(
            data.dataset,
            batch_sampler=_SomeBatches(data.batch_sampler, first, step),
            num_workers=data.num_workers,
            collate_fn=data.collate_fn,
            pin_memory=data.pin_memory,
            timeout=data.timeout,
            worker_init_fn=data.worker_init_fn,
            multiprocessing_context=data.multiprocessing_context,
            generator=data.generator,
            prefetch_factor=data.prefetch_factor,
        )
        return iter(loader)
    return itertools.islice(iter(data), first, None, step)


class _SomeBatches:
    """Every so many-th batch of indices that a batch sampler of a data loader gives."""

    def __init__(self, sampler: Iterable[list[int]], first: int, step: int) -> None:
        self._sampler, self._first, self._step = sampler, first, step

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self._sampler), self._first, None, self._step)


class StoredData(Protocol):
    """Data on disk that is read in batches."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def part(self, first: int, step: int) -> Iterator[Any]:
        """Every ``step``-th batch, from number ``first`` on."""

    def identity(self) -> str:
        """A fingerprint of the data."""

    def facts(self) -> DataFacts | None:
        """What the data says of itself; None: nothing."""


class FirstBatches:
    """The batches of some data; the first ones stay in memory when they have been read.

    Args:
        data: The data; it is not changed while it is used.
        most: The bytes of all that is kept; the first batch is always kept.
    """

    def __init__(self, data: StoredData, most: int = MOST_BYTES) -> None:
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

    def facts(self) -> DataFacts | None:
        """What the data says of itself, if it does."""
        return self._data.facts()

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
