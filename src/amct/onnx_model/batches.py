"""Converts calibration data to feeds of an ONNX model, checked against the names, types and shapes of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.errors import ArgumentError, ArgumentTypeError, did_you_mean
from amct.onnx_model.reading import element_dtype, input_shape
from amct.pipeline.batches import Batches, as_array

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.pipeline.batches import BatchInputs

Feeds = dict[str, "NDArray[Any]"]
"""One batch: an array per model input, by input name."""


def onnx_batches(model: ModelProto, data: object, inputs: BatchInputs | None = None, *, name: str = "data") -> Batches:
    """Convert data to feeds of a model.

    An array or a dict of arrays is one batch. The items of a tuple or list are the inputs in model order; further items
    (labels) are ignored. Arrays may be NumPy arrays or torch tensors.
    """
    return Batches(
        data,
        _Converter(model, inputs, name),
        single=(np.ndarray, torch.Tensor, Mapping),
        expected="an array, a dict of arrays by input name or an iterable of batches",
        name=name,
    )


def sample_count(feeds: Feeds) -> int:
    """The number of samples in one batch."""
    first = next(iter(feeds.values()))
    return int(first.shape[0]) if first.ndim else 1


class _Converter:
    """Converts batches to feeds of one model and checks them against the types and shapes of its inputs."""

    def __init__(self, model: ModelProto, inputs: BatchInputs | None, argument: str) -> None:
        self._inputs = inputs
        self._argument = argument
        self._shapes = {value.name: input_shape(model, value.name) for value in model.graph.input}
        self._types = {value.name: np.dtype(element_dtype(model, value.name)) for value in model.graph.input}

    def __call__(self, batch: object) -> Feeds:
        names = list(self._shapes)
        given = self._inputs(batch) if self._inputs is not None else batch
        if isinstance(given, Mapping):
            values = dict(given)
        elif isinstance(given, (tuple, list)):
            values = dict(zip(names, given, strict=False))
        else:
            values = {names[0]: given}
        unknown = [name for name in values if name not in self._shapes]
        missing = [name for name in names if name not in values]
        if unknown or missing:
            found = f'"{unknown[0]}" is none of them.{did_you_mean(str(unknown[0]), names)}' if unknown else ""
            lacking = f'"{missing[0]}" is missing' if missing else ""
            raise ArgumentError(
                f"{self._argument}: a batch must have the inputs of the model ({', '.join(names)}): "
                f"{found or lacking}; give a dict of arrays by these names, or a tuple in this order"
            )
        return {name: self._checked(name, values[name]) for name in names}

    def _checked(self, name: str, value: object) -> NDArray[Any]:
        array = as_array(name, value, argument=self._argument)
        expected = self._types[name]
        if array.dtype != expected:
            if array.dtype.kind not in "fiub" or (expected.kind in "iub" and array.dtype.kind == "f"):
                raise ArgumentTypeError(
                    f'{self._argument}: input "{name}": expected values of {expected}, got {array.dtype}'
                )
            array = array.astype(expected)
        shape = self._shapes[name]
        if shape is not None and not _fits(shape, array.shape):
            wanted = ", ".join("?" if size is None else str(size) for size in shape)
            hint = ""
            if len(shape) == array.ndim and _fits((None, *shape[1:]), array.shape):
                hint = f"; the file fixes the batch size, so give batches of {shape[0]}"
            raise ArgumentError(
                f'{self._argument}: input "{name}": expected shape [{wanted}], got {list(array.shape)}{hint}'
            )
        return np.ascontiguousarray(array)


def _fits(shape: tuple[int | str | None, ...], found: tuple[int, ...]) -> bool:
    if len(shape) != len(found):
        return False
    return all(not isinstance(size, int) or size == own for size, own in zip(shape, found, strict=True))
