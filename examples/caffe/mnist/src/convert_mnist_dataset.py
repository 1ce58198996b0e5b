"""Makes the LMDBs of the sample: from MNIST's own files if they are there, else from digits that scikit-learn ships.

MNIST's files belong in ``tmp/mnist_data``: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
t10k-labels-idx1-ubyte, packed (``.gz``) or not. They are published at http://yann.lecun.com/exdb/mnist; nothing is
downloaded here.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from amct.data.arrays import read_idx
from amct.data.lmdb import write_lmdb

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Digits = tuple[NDArray[np.uint8], NDArray[np.int64]]

FILES = {"train": "train", "test": "t10k"}
TRAINING_IMAGES = 1200
"""Of the 1797 digits of scikit-learn."""


def mnist_digits(folder: Path, part: str) -> Digits | None:
    """Images [number, 28, 28] and labels of one part of MNIST; None if a file is missing."""
    found = []
    for ending in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        plain = folder / f"{FILES[part]}-{ending}"
        path = next((each for each in (plain, Path(f"{plain}.gz")) if each.is_file()), None)
        if path is None:
            return None
        found.append(read_idx(path))
    return found[0], found[1].astype(np.int64)


def scikit_digits(part: str) -> Digits:
    """Digits of scikit-learn, 8x8 pixels enlarged to 24x24, with a margin as MNIST's."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.kron(data.images, np.ones((3, 3))) * (255 / 16)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    chosen = order[:TRAINING_IMAGES] if part == "train" else order[TRAINING_IMAGES:]
    return images[chosen], data.target[chosen]


def convert(data: Path, part: str, target: Path) -> int:
    """Write the LMDB of one part, ``train`` or ``test``, replacing an old one; returns the number of images."""
    digits = mnist_digits(data, part)
    if digits is None:
        print(f"[AMCT][INFO] no MNIST files in {data}: the digits of scikit-learn are used for {target}")
        digits = scikit_digits(part)
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    images, labels = digits
    return write_lmdb(target, zip(images[:, None], map(int, labels), strict=True))


def main() -> int:
    """Write both LMDBs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist_data", type=Path, default=Path("tmp/mnist_data"), help="folder of MNIST's files")
    arguments = parser.parse_args()
    for part in FILES:
        target = Path(f"tmp/mnist_{part}_lmdb")
        print(f"{target}: {convert(arguments.mnist_data, part, target)} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
