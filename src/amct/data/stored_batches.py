"""Calibration data on disk as batches: read when they are needed, one or two ahead, and never kept."""

from __future__ import annotations

import hashlib
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

from amct.data.samples import Preparation, batches, open_samples
from amct.errors import ArgumentError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from amct.data.samples import SampleSource


class StoredBatches:
    """The samples of a path that ``open_samples`` reads, stacked to batches of float32 arrays.

    It can be iterated repeatedly and has a length. Calibration reads its next batches in a background thread. A folder
    of pictures is listed while it is read; no picture is decoded twice in a pass or kept.

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
