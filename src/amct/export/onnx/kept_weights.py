"""Large weights beside their model: a message refers to arrays in memory instead of holding copies of them.

Every copy of a model, and every change from message to bytes and back, copies its weights. A large model therefore has
references in their place: tensors with external data whose location is the key of an array in this process. Whoever
makes such a model owns its arrays::

    kept = KeptWeights()
    model.graph.initializer.append(kept.tensor("conv1.weight", array))
    tensor_array(model.graph.initializer[0])                     the array itself, as long as kept exists
    with_values(model)                                           a message with the weights in it

A key cannot be guessed, and files from elsewhere are read without any external data that is left: no file can refer to
memory.
"""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amct.errors import ExportError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_BYTES = 2**16
"""Smaller arrays are stored in the message."""
_TYPES = frozenset(np.dtype(kind) for kind in ("float32", "float16", "float64", "int8", "uint8", "int16", "int32"))
_LOCATION = f"kept-weights/{secrets.token_hex(16)}/"
_NUMBERS = itertools.count()
_ARRAYS: WeakValueDictionary[str, NDArray[Any]] = WeakValueDictionary()


class KeptWeights:
    """Owns the arrays to which models refer."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def tensor(self, name: str, array: NDArray[Any]) -> TensorProto:
        """A message that refers to an array; one that holds it, if it is small or of a rare type.

        The array must not be changed any more. It is copied only if it is not in C order.
        """
        if array.nbytes < LEAST_BYTES or array.dtype not in _TYPES:
            return numpy_helper.from_array(np.asarray(array, order="C"), name)
        kept = np.asarray(array, order="C").view()
        kept.flags.writeable = False
        key = f"{_LOCATION}{next(_NUMBERS)}"
        self._arrays[key] = _ARRAYS[key] = kept
        kind = helper.np_dtype_to_tensor_dtype(kept.dtype)
        message = TensorProto(name=name, data_type=kind, dims=list(kept.shape), data_location=TensorProto.EXTERNAL)
        message.external_data.add(key="location", value=key)
        return message


def kept_array(tensor: TensorProto) -> NDArray[Any] | None:
    """The array to which a message refers, read-only; None for any other message.

    Raises:
        ExportError: the owner of the array is gone.
    """
    if tensor.data_location != TensorProto.EXTERNAL or len(tensor.external_data) != 1:
        return None
    key = tensor.external_data[0].value
    if not key.startswith(_LOCATION):
        return None
    found = _ARRAYS.get(key)
    if found is None:
        raise ExportError(f'the values of "{tensor.name}" were freed; keep the owner of the model as long as the model')
    return found


def kept_arrays(model: ModelProto) -> dict[str, NDArray[Any]]:
    """The arrays to which the initializers of a model refer, by name."""
    found = ((tensor.name, kept_array(tensor)) for tensor in model.graph.initializer)
    return {name: array for name, array in found if array is not None}


def with_values(model: ModelProto) -> ModelProto:
    """The model as a message that holds all its weights; the model itself if it does."""
    if not kept_arrays(model):
        return model
    whole = ModelProto()
    whole.CopyFrom(model)
    for tensor in whole.graph.initializer:
        array = kept_array(tensor)
        if array is not None:
            tensor.ClearField("data_location")
            del tensor.external_data[:]
            tensor.raw_data = array.tobytes()
    return whole
