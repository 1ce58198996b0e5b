"""Tops that the program fills: Input, Parameter, DummyData (by fillers), MemoryData (``set_input_arrays``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.caffe.engine.layer import Layer, Place, Shape, Tensors, register
from amct.caffe.engine.messages import new_message
from amct.caffe.engine.weights import filler_function, lazy_fill
from amct.errors import ModelError

if TYPE_CHECKING:
    import numpy.typing as npt

    from amct.caffe.engine.blob import Blob


@register("Input")
class Input(Layer):
    """Tops that the user fills. The shape in the prototxt is only the initial one."""

    bottom_count = (0, 0)
    top_count = (1, None)
    is_filled_by_user = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the shapes: none, one for all tops, or one per top."""
        shapes = [tuple(shape.dim) for shape in self.parameter.input_param.shape]
        tops = len(self.top_blobs)
        if len(shapes) not in (0, 1, tops):
            raise self.error(
                f"Must specify 'shape' once, once per top blob, or not at all: {tops} tops vs. {len(shapes)} shapes"
            )
        for blob, shape in zip(self.top_blobs, shapes * tops if len(shapes) == 1 else shapes, strict=False):
            self.context.check_size(shape, f'a top of layer "{self.name}"')
            blob.set_shape(shape)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes that the user gave the blobs."""
        return [blob.shape for blob in self.top_blobs]

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Do nothing: the user has set the values."""


@register("Parameter")
class Parameter(Layer):
    """A top that holds a learnable parameter."""

    bottom_count = (0, 0)
    returns_views = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the parameter."""
        self.add_parameter(tuple(self.parameter.parameter_param.shape.dim))

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The parameter's shape."""
        return [self.blobs[0].shape]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """A view of the parameter."""
        return [parameters[0].view_as(parameters[0])]

    def to_onnx(self, place: Place) -> None:
        """A constant."""
        place.alias(place.parameter(0, "value"))


@register("DummyData")
class DummyData(Layer):
    """Constant tops are filled once, random tops at each forward pass."""

    bottom_count = (0, 0)
    top_count = (1, None)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read shapes and fillers: one for all tops, or one per top."""
        options, tops = self.parameter.dummy_data_param, len(self.top_blobs)
        self.shapes = self._shapes(tops)
        fillers = list(options.data_filler)
        if len(fillers) not in (0, 1, tops):
            raise self.error(
                f"Number of data fillers must be 0, 1 or equal to the number of tops: {tops}; you specified "
                f"{len(fillers)}"
            )
        if not fillers:
            fillers = [new_message("FillerParameter")]
        self.fillers = fillers * tops if len(fillers) == 1 else fillers
        for blob, shape, filler in zip(self.top_blobs, self.shapes, self.fillers, strict=True):
            self.context.check_size(shape, f'a top of layer "{self.name}"')
            filler_function(filler, shape, self.name)
            blob.set_shape(shape)
            lazy_fill(blob, filler, self.name)

    def _shapes(self, tops: int) -> list[Shape]:
        options = self.parameter.dummy_data_param
        if options.shape and options.num:
            raise self.error("give shape, or num, channels, height and width; not both")
        given = [tuple(shape.dim) for shape in options.shape]
        if not given:
            columns = (options.num, options.channels, options.height, options.width)
            lengths = {len(column) for column in columns}
            if len(lengths) != 1:
                raise self.error("num, channels, height and width must be given the same number of times")
            given = list(zip(*columns, strict=True))
        if len(given) not in (1, tops):
            raise self.error(f"Must specify 'shape' once, or once per top blob: {tops} tops, {len(given)} shapes")
        return given * tops if len(given) == 1 else given

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes of the prototxt."""
        return list(self.shapes)

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Fill the random tops again."""
        for blob, shape, filler in zip(tops, self.shapes, self.fillers, strict=True):
            if filler.type != "constant":
                seed = int(torch.randint(2**62, ()).item())
                blob.set_tensor(filler_function(filler, shape, self.name)(torch.Generator().manual_seed(seed)))

    def to_onnx(self, place: Place) -> None:
        """A constant; random data is an error."""
        for index, (blob, filler) in enumerate(zip(self.top_blobs, self.fillers, strict=True)):
            if filler.type != "constant":
                raise place.error(
                    f"its data is random ({filler.type}), which an ONNX file cannot express; make it an Input"
                )
            place.alias(place.value(f"value{index}", blob.tensor.detach().numpy()), index)


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
