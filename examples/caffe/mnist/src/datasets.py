"""Reads the images of an LMDB in batches, as the net was trained on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from amct.data.lmdb import LmdbReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

SCALE = 0.00390625
"""The ``scale`` of the transform_param in mnist-train.prototxt."""


class LMDBData:
    """Batches of an LMDB of digits, from its first entry on; after the last one it starts again.

    Args:
        path: The LMDB.
        batch_size: Images per batch.
    """

    def __init__(self, path: Path, batch_size: int) -> None:
        self._reader = LmdbReader(path)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self._reader)

    def batches(self, count: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """Images [batch, 1, 28, 28] and labels."""
        entries = self._endless()
        for _ in range(count):
            batch = [next(entries) for _ in range(self.batch_size)]
            images = np.stack([image for image, _ in batch]).astype(np.float32) * np.float32(SCALE)
            yield images, np.array([label for _, label in batch], np.int64)

    def _endless(self) -> Iterator[tuple[NDArray[np.uint8], int]]:
        while True:
            for entry in self._reader.datums():
                yield entry.values, entry.label
