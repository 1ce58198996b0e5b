"""The base of layers that read batches ahead in a background thread, from an endless source."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from amct.caffe.engine.data_layers.transform import Transformation
from amct.caffe.engine.layer import Layer
from amct.data.read_ahead import ReadAhead
from amct.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from amct.caffe.engine.blob import Blob, Shape

    Arrays = list[npt.NDArray[np.float32]]

#: The largest number of batches read ahead; Caffe's default of ``prefetch``.
DEPTH = 4


class BatchSource(Protocol):
    """Creates batches. It is used by the background thread only and must not refer to the layer."""

    def next_batch(self) -> Arrays:
        """The next batch, one array per top."""
        ...


class PrefetchLayer(Layer):
    """A layer whose tops come from a BatchSource.

    A subclass defines ``open_source``, which checks everything that can be checked before the first batch.
    """

    bottom_count = (0, 0)
    top_count: ClassVar[tuple[int, int | None]] = (1, 2)
    depth = DEPTH

    def open_source(self) -> tuple[BatchSource, list[Shape]]:
        """Open the data; return the source and the shapes of the tops."""
        raise NotImplementedError

    def setup(self, bottoms: list[Shape]) -> None:
        """Open the data."""
        source, self._shapes = self.open_source()
        self._batches: ReadAhead[Arrays] = ReadAhead(source.next_batch, self.depth, f"read-ahead {self.name}")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes of the last batch, or of the first one."""
        return list(self._shapes)

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Write the next batch to the tops."""
        for blob, values in zip(tops, self._batches.take(), strict=True):
            blob.set_tensor(torch.from_numpy(values))
        self._shapes = [blob.shape for blob in tops]

    def transformation(self, *, is_random: bool) -> tuple[Transformation, int]:
        """What ``transform_param`` asks for, and the seed of the source; 0 if neither uses random numbers."""
        options, where = self.parameter.transform_param, f'layer "{self.name}" ({self.type})'
        is_random = is_random or Transformation.needs_random(options, training=self.is_training)
        seed = self.new_seed() if is_random else 0

        def error(message: str) -> ModelError:  # unlike ``self.error`` it does not refer to the layer
            return ModelError(f"{where}: {message}")

        return Transformation(options, training=self.is_training, seed=seed, error=error), seed

    def new_seed(self) -> int:
        """A seed for the source's own random numbers, drawn from torch's generator (``set_random_seed``)."""
        return int(torch.randint(2**62, ()).item())
