"""Reads and preprocesses data from disk: images, .npy/.npz arrays, LMDB databases of Datums, idx files.

``images.py`` decodes images, ``resample.py`` resizes them, ``datum.py`` and ``lmdb.py`` read Caffe's databases,
``arrays.py`` and ``idx.py`` read arrays; ``samples.py`` gives all of them one interface, ``stored_batches.py`` divides
them into batches; ``read_ahead.py`` prefetches in a background thread. This package does not import torch.
"""

from __future__ import annotations

from amct.data.arrays import read_array, read_arrays, read_idx
from amct.data.images import decode_image, list_images, read_image, resize
from amct.data.samples import Preparation, Sample, SampleSource, batches, first_shape, holds_pictures, open_samples
from amct.data.stored_batches import AheadIterator, DataFacts, InBackground, ReadAhead, StoredBatches

__all__ = [
    "AheadIterator",
    "DataFacts",
    "InBackground",
    "Preparation",
    "ReadAhead",
    "Sample",
    "SampleSource",
    "StoredBatches",
    "batches",
    "decode_image",
    "first_shape",
    "holds_pictures",
    "list_images",
    "open_samples",
    "read_array",
    "read_arrays",
    "read_idx",
    "read_image",
    "resize",
]
