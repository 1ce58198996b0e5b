"""MemoryData: batches of arrays that the program sets (``net.set_input_arrays``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.errors import ModelError

if TYPE_CHECKING:
    import numpy.typing as npt

    from amct.caffe.engine.blob import Blob, Shape

_AXES = 4


@register("MemoryData")
class MemoryData(Layer):
    """Reads the arrays in batches; starts over after the end."""

    bottom_count = (0, 0)
    top_count = (2, 2)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the sizes."""
        options = self.parameter.memory_data_param
        self._batch = options.batch_size
        self._picture = (options.channels, options.height, options.width)
        if min(self._batch, *self._picture) < 1:
            raise self.error(
                "batch_size, channels, height, and width must be specified and positive in memory_data_param"
            )
        self._shapes: list[Shape] = [(self._batch, *self._picture), (self._batch,)]
        self._arrays: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None
        self._position = 0

    def set_arrays(self, data: npt.NDArray[Any], labels: npt.NDArray[Any]) -> None:
        """Set the arrays: data (count, channels, height, width), labels (count,) or (count, 1, 1, 1), float32.

        Raises:
            ModelError: Type, layout or shape of an array does not fit.
        """
        if labels.ndim == 1:
            labels = np.ascontiguousarray(labels.reshape(-1, 1, 1, 1))
        _check_array(data, "data array", self._picture)
        _check_array(labels, "label array", (1, 1, 1))
        if len(data) != len(labels):
            raise ModelError(f"data and labels must have the same first dimension: {len(data)} and {len(labels)}")
        if len(data) % self._batch or not len(data):
            raise ModelError(
                f"first dimensions of input arrays must be a multiple of batch size: {len(data)} and {self._batch}"
            )
        self._arrays = (data, labels)
        self._position = 0

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes of the prototxt; as in Caffe labels have four axes after the first forward pass."""
        return list(self._shapes)

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Put the next batch into the tops."""
        if self._arrays is None:
            raise self.error("MemoryDataLayer needs to be initialized: call net.set_input_arrays(data, labels) first")
        for blob, array in zip(tops, self._arrays, strict=True):
            # A copy, so that writes to the blob do not change the caller's array.
            blob.set_tensor(torch.from_numpy(array[self._position : self._position + self._batch].copy()))
        self._position = (self._position + self._batch) % len(self._arrays[0])
        self._shapes = [blob.shape for blob in tops]


def _check_array(array: npt.NDArray[Any], name: str, picture: tuple[int, ...]) -> None:
    if not array.flags.c_contiguous:
        raise ModelError(f"{name} must be C contiguous")
    if array.ndim != _AXES:
        raise ModelError(f"{name} must be 4-d, got shape {array.shape}")
    if array.dtype != np.float32:
        raise ModelError(f"{name} must be float32, got {array.dtype}")
    for axis, what in enumerate(("number of channels", "height", "width")):
        if array.shape[axis + 1] != picture[axis]:
            raise ModelError(f"{name} has wrong {what}: {array.shape[axis + 1]}, the layer expects {picture[axis]}")
