"""Data: images and labels from an LMDB."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from amct.caffe.engine.data_layers.prefetch import PrefetchLayer
from amct.caffe.engine.registry import register
from amct.data.lmdb import LmdbReader, is_lmdb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.data_layers.prefetch import Arrays, BatchSource
    from amct.caffe.engine.data_layers.transform import Transformation
    from amct.data.datum import DatumValues
    from amct.errors import ModelError

_LEVELDB = 0


class _DatumBatches:
    """Batches of Datums in the order of the keys; starts over after the last."""

    def __init__(
        self, reader: LmdbReader, transformation: Transformation, *, batch_size: int, with_labels: bool, skip: int
    ) -> None:
        self._transformation = transformation
        self._batch_size = batch_size
        self._with_labels = with_labels
        self._datums = islice(_endless(reader, transformation.color), skip, None)

    def next_batch(self) -> Arrays:
        datums = [next(self._datums) for _ in range(self._batch_size)]
        batch = [self._transformation.batch([datum.values for datum in datums])]
        if self._with_labels:
            batch.append(np.array([datum.label for datum in datums], np.float32))
        return batch


def _endless(reader: LmdbReader, color: bool | None) -> Iterator[DatumValues]:
    while True:
        yield from reader.datums(color=color)


@register("Data")
class Data(PrefetchLayer):
    """Reads an LMDB of Datums repeatedly; top 0 holds the images, top 1 (optional) the labels."""

    def open_source(self) -> tuple[BatchSource, list[Shape]]:
        """Open the database and read its first entry."""
        options = self.parameter.data_param
        if not options.source:
            raise self.error("data_param needs source, the folder of the database")
        if not options.batch_size:
            raise self.error("data_param needs batch_size, at least 1")
        if options.backend == _LEVELDB:
            raise self._leveldb_error(options.source)
        self.depth = max(1, options.prefetch)
        reader = LmdbReader(options.source)
        transformation, seed = self.transformation(is_random=options.rand_skip > 0)
        first = next(reader.datums(color=transformation.color))
        skip = int(np.random.default_rng(seed).integers(options.rand_skip)) if options.rand_skip else 0
        with_labels = len(self.top_blobs) > 1
        source = _DatumBatches(
            reader, transformation, batch_size=options.batch_size, with_labels=with_labels, skip=skip
        )
        shapes: list[Shape] = [(options.batch_size, *transformation.output_shape(first.values.shape))]
        if with_labels:
            shapes.append((options.batch_size,))
        return source, shapes

    def _leveldb_error(self, source: str) -> ModelError:
        if is_lmdb(Path(source)):
            return self.error(f'"{source}" is an LMDB, but backend is LEVELDB (the default): write backend: LMDB')
        return self.error(
            f'"{source}" is meant to be a LevelDB (backend: LEVELDB, the default), which is not supported. Make an '
            "LMDB of it: run Caffe's convert_imageset with --backend=lmdb, or copy every Datum with amct.data.lmdb."
            "write_lmdb; then write backend: LMDB"
        )
