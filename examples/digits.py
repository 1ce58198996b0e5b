"""The data of the examples: 1797 handwritten digits that ship with scikit-learn, so nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sklearn.datasets import load_digits

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRAINING_IMAGES = 1200
CALIBRATION_IMAGES = 64
BATCH = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Digits:
    """Images [number, 1, height, width] with values 0 … 1, and labels 0 … 9."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]

    def calibration_batches(self) -> list[NDArray[np.float32]]:
        """A few training images, enough for post-training quantization. Labels are not used."""
        return [self.images[start : start + BATCH] for start in range(0, CALIBRATION_IMAGES, BATCH)]

    def test_batches(self) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """Batches of 100 test images with their labels."""
        starts = range(0, len(self.test_labels), 100)
        return [(self.test_images[at : at + 100], self.test_labels[at : at + 100]) for at in starts]


def load(*, enlarge: int, margin: int = 0) -> Digits:
    """All digits in a fixed shuffled order: 1200 for training and 597 for testing.

    Args:
        enlarge: Each pixel of the 8×8 images becomes a square with this side length.
        margin: Number of empty pixels on each side.
    """
    data = load_digits()
    images = np.kron(data.images[:, None] / 16, np.ones((enlarge, enlarge)))
    images = np.pad(images, ((0, 0), (0, 0), (margin, margin), (margin, margin))).astype(np.float32)
    labels = data.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    learn, test = order[:TRAINING_IMAGES], order[TRAINING_IMAGES:]
    return Digits(images=images[learn], labels=labels[learn], test_images=images[test], test_labels=labels[test])
