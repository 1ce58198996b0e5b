"""The images of the classification samples: pictures of a folder, or an LMDB such as that of ImageNet.

Both give what ResNet-50 was trained on: BGR, the middle of the picture, minus the mean of ImageNet.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from amct.data.lmdb import LmdbReader
from amct_caffe import caffe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Sample = tuple[NDArray[np.float32], int]

MEAN_BGR = np.array([104, 117, 123], np.float32).reshape(3, 1, 1)
RESIZE = 256 / 224
"""Pictures are scaled to this multiple of the net's input before the middle is taken."""


def _prepared(picture: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """The net's input [3, size, size] of a BGR picture [height, width, 3] with values 0 … 255."""
    side = max(size, round(size * RESIZE))
    if picture.shape[:2] != (side, side):
        picture = caffe.io.resize_image(picture, (side, side))
    start = (side - size) // 2
    middle = picture[start : start + size, start : start + size]
    return middle.transpose(2, 0, 1).astype(np.float32) - MEAN_BGR


class ImageFolder:
    """Pictures listed in ``image_label.txt`` of a folder, one line per picture: file name and class number.

    Args:
        folder: The folder.
        size: Height and width of the net's input.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        listing = folder / "image_label.txt"
        if not listing.is_file():
            raise SystemExit(
                f"{listing} does not exist. Put pictures into {folder} and list them in it, one per line: the file "
                "name, a space, the number of the class."
            )
        lines = [line.split() for line in listing.read_text().splitlines() if line.strip()]
        self._entries = [(name, int(label)) for name, label in lines]

    def __iter__(self) -> Iterator[Sample]:
        for name, label in self._entries:
            rgb = caffe.io.load_image(self._folder / name) * 255
            yield _prepared(rgb[:, :, ::-1], self._size), label


class LMDBData:
    """The entries of an LMDB, as Caffe's convert_imageset writes it.

    Args:
        path: The LMDB.
        size: Height and width of the net's input.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._reader, self._size = LmdbReader(path), size

    def __iter__(self) -> Iterator[Sample]:
        for entry in self._reader.datums(color=True):
            yield _prepared(entry.values.transpose(1, 2, 0).astype(np.float32), self._size), entry.label


def batches(
    data: ImageFolder | LMDBData, batch_size: int, count: int
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """At most ``count`` batches of images and labels; the last one may be smaller."""
    samples = iter(data)
    for _ in range(count):
        batch = list(islice(samples, batch_size))
        if not batch:
            return
        yield np.stack([image for image, _ in batch]), np.array([label for _, label in batch], np.int64)
