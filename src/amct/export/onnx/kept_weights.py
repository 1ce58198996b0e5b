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

Checking, shape inference and opset conversion need small constants (shapes, axes) but no weights. For them there are
light copies, in which large initializers are inputs of the same name and shape.
"""

from __future__ import annotations

import itertools
import math
import secrets
from typing import TYPE_CHECKING, Any, BinaryIO
from weakref import WeakValueDictionary

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from amct.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt
    from google.protobuf.message import Message
    from numpy.typing import NDArray


LEAST_BYTES = 2**16
"""Smaller arrays are stored in the message."""
_TYPES = frozenset(np.dtype(kind) for kind in ("float32", "float16", "float64", "int8", "uint8", "int16", "int32"))
_LOCATION = f"kept-weights/{secrets.token_hex(16)}/"
_NUMBERS = itertools.count()
_VALUES_PER_PART = 2**18
_KEPT: WeakValueDictionary[str, Kept] = WeakValueDictionary()


class Kept:
    """An array beside a message, and the type that its values have in the model.

    A transposed matrix stays as it is, because a copy of all of them would be a copy of a transformer's weights: its
    values are put in order when they are written or run.
    """

    def __init__(self, array: NDArray[Any], dtype: np.dtype[Any]) -> None:
        self._array, self._dtype = np.asarray(array, order=None if array.T.flags.c_contiguous else "C").view(), dtype
        self._array.flags.writeable = False

    @property
    def nbytes(self) -> int:
        """The size of the values in the model."""
        return int(self._array.size * self._dtype.itemsize)

    def array(self) -> NDArray[Any]:
        """All values: the array itself, or a new one if it has another type than in the model."""
        found: NDArray[Any] = self._array.astype(self._dtype, copy=False)
        return found

    def parts(self) -> Iterator[memoryview]:
        """The bytes of the values, in parts where they are converted."""
        flat = self._array.reshape(-1)
        step = flat.size if flat.dtype == self._dtype else _VALUES_PER_PART
        for start in range(0, flat.size, step):
            yield flat[start : start + step].astype(self._dtype, copy=False).data.cast("B")


class KeptInFile(Kept):
    """Values that are read from a file whenever they are asked for.

    Args:
        path: The file, which must stay as it is.
        offset: Where the values begin.
        shape: Of the array.
        dtype: Of the values.
    """

    def __init__(self, path: Path, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self._path, self._offset, self._shape, self._dtype = path, offset, tuple(shape), dtype

    @property
    def nbytes(self) -> int:
        """The size of the values."""
        return int(math.prod(self._shape) * self._dtype.itemsize)

    def array(self) -> NDArray[Any]:
        """All values, in a new array."""
        found: NDArray[Any] = np.fromfile(self._path, self._dtype, math.prod(self._shape), offset=self._offset)
        return found.reshape(self._shape)

    def parts(self) -> Iterator[memoryview]:
        """The bytes of the values."""
        yield self.array().reshape(-1).data.cast("B")


class KeptWeights:
    """Owns the arrays to which models refer."""

    def __init__(self) -> None:
        self._owned: dict[str, Kept] = {}

    def tensor(self, name: str, array: NDArray[Any], dtype: npt.DTypeLike | None = None) -> TensorProto:
        """A message that refers to an array; one that holds it, if it is small or of a rare type.

        Args:
            name: Of the message.
            array: It must not be changed any more, and is copied only if neither it nor its transpose is in C order.
            dtype: The type in the model, if it is another one: small integers that are floats in a file are converted
                whenever they are read.
        """
        kind = np.dtype(array.dtype if dtype is None else dtype)
        if array.size * kind.itemsize < LEAST_BYTES or kind not in _TYPES:
            return numpy_helper.from_array(np.asarray(array, order="C").astype(kind, copy=False), name)
        return self._referring(name, Kept(array, kind), kind, array.shape)

    def tensor_in_file(
        self, name: str, path: Path, offset: int, shape: Sequence[int], dtype: np.dtype[Any]
    ) -> TensorProto | None:
        """A message that refers to values in a file; None if they are few or of a rare type, as for ``tensor``."""
        kept = KeptInFile(path, offset, shape, dtype)
        return self._referring(name, kept, dtype, shape) if kept.nbytes >= LEAST_BYTES and dtype in _TYPES else None

    def _referring(self, name: str, kept: Kept, dtype: np.dtype[Any], shape: Sequence[int]) -> TensorProto:
        key = f"{_LOCATION}{next(_NUMBERS)}"
        self._owned[key] = _KEPT[key] = kept
        element = helper.np_dtype_to_tensor_dtype(dtype)
        message = TensorProto(name=name, data_type=element, dims=shape, data_location=TensorProto.EXTERNAL)
        message.external_data.add(key="location", value=key)
        return message

    def adopt(self, model: ModelProto) -> None:
        """Own the arrays to which a model refers, too."""
        for tensor in model.graph.initializer:
            found = kept_values(tensor)
            if found is not None:
                self._owned[tensor.external_data[0].value] = found


def kept_values(tensor: TensorProto) -> Kept | None:
    """What a message refers to; None for a message that holds its values.

    Raises:
        ExportError: the owner of the array is gone.
    """
    if tensor.data_location != TensorProto.EXTERNAL or len(tensor.external_data) != 1:
        return None
    key = tensor.external_data[0].value
    if not key.startswith(_LOCATION):
        return None
    found = _KEPT.get(key)
    if found is None:
        raise ExportError(f'the values of "{tensor.name}" were freed; keep the owner of the model as long as the model')
    return found


def owner_of(model: ModelProto) -> KeptWeights:
    """An owner of the arrays to which a model refers, and of no others."""
    owner = KeptWeights()
    owner.adopt(model)
    return owner


def kept_array(tensor: TensorProto) -> NDArray[Any] | None:
    """The array to which a message refers, read-only; None for a message that holds its values.

    Raises:
        ExportError: the owner of the array is gone.
    """
    found = kept_values(tensor)
    return None if found is None else found.array()


def tensor_array(tensor: TensorProto) -> NDArray[Any]:
    """The array of a tensor message.

    Raises:
        ExportError: its data is in a file that was not loaded.
    """
    kept = kept_array(tensor)
    if kept is not None:
        return kept
    if tensor.data_location == TensorProto.EXTERNAL:
        raise ExportError(
            f'the data of initializer "{tensor.name}" is in another file and was not loaded; '
            "load the model with onnx.load(path), which reads external data"
        )
    return numpy_helper.to_array(tensor)


def refers(model: ModelProto) -> bool:
    """Whether a model has weights beside it."""
    return any(kept_values(tensor) is not None for tensor in model.graph.initializer)


def kept_arrays(model: ModelProto) -> dict[str, NDArray[Any]]:
    """The arrays to which the initializers of a model refer, by name."""
    found = ((tensor.name, kept_array(tensor)) for tensor in model.graph.initializer)
    return {name: array for name, array in found if array is not None}


def with_values(model: ModelProto) -> ModelProto:
    """The model as a message that holds all its weights; the model itself if it does."""
    if not refers(model):
        return model
    whole = ModelProto()
    whole.CopyFrom(model)
    for tensor in whole.graph.initializer:
        if kept_values(tensor) is not None:
            tensor.CopyFrom(whole_tensor(tensor))
    return whole


def whole_tensor(tensor: TensorProto) -> TensorProto:
    """A message that holds its values: the message itself, or one with the values to which it refers."""
    array = kept_array(tensor)
    return tensor if array is None else numpy_helper.from_array(array, tensor.name)


def copy_fields(source: Message, target: Message, skip: Collection[str]) -> None:
    """Copy one message into another field by field, without the skipped (large) fields."""
    for field, value in source.ListFields():
        if field.name in skip:
            continue
        if hasattr(value, "extend"):  # a repeated field; descriptors differ between protobuf releases
            getattr(target, field.name).extend(value)
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


LARGEST_CONSTANT = 4096  # values; larger constants are weights, not shapes or indices


def without_initializers(model: ModelProto) -> ModelProto:
    """A copy of the model that stores no tensor."""
    bare = ModelProto()
    copy_fields(model, bare, skip={"graph"})
    copy_fields(model.graph, bare.graph, skip={"initializer"})
    return bare


def light_copy(model: ModelProto) -> ModelProto:
    """A copy of the model with large initializers replaced by inputs; small ones are kept."""
    return _with_inputs(model, is_large)


def weights_as_inputs(model: ModelProto) -> ModelProto:
    """A copy of the model with inputs in place of the weights beside it."""
    return _with_inputs(model, lambda tensor: kept_values(tensor) is not None)


def _with_inputs(model: ModelProto, is_replaced: Callable[[TensorProto], bool]) -> ModelProto:
    light = without_initializers(model)
    declared = {value.name for value in light.graph.input}
    for tensor in model.graph.initializer:
        if not is_replaced(tensor):
            light.graph.initializer.append(whole_tensor(tensor))
        elif tensor.name not in declared:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return light


def with_weights_beside(model: ModelProto, kept: KeptWeights) -> ModelProto:
    """A copy of the model whose large weights are beside it, so that the model can be freed."""
    light = without_initializers(model)
    for tensor in model.graph.initializer:
        plain = tensor.HasField("raw_data") and not tensor.doc_string and not tensor.metadata_props
        light.graph.initializer.append(kept.tensor(tensor.name, tensor_array(tensor)) if plain else tensor)
    return light


def is_large(tensor: TensorProto) -> bool:
    """Whether a stored tensor is a weight, which a light copy does not have."""
    return math.prod(tensor.dims) > LARGEST_CONSTANT


_RAW_DATA, _INITIALIZER, _GRAPH = 9, 5, 7
"""Numbers of fields in TensorProto, GraphProto and ModelProto; fields are serialized in the order of their numbers."""
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
"""Kinds of fields on the wire."""


def model_parts(model: ModelProto) -> Iterator[bytes | memoryview]:
    """The serialized model in parts: together the bytes of ``with_values(model)``."""
    if not refers(model):
        yield model.SerializeToString()
        return
    before, after = _without_field(model.graph, GraphProto, _INITIALIZER)
    sizes = [_content_bytes(tensor) for tensor in model.graph.initializer]
    size = len(before) + len(after) + sum(len(_head(_INITIALIZER, own)) + own for own in sizes)
    start, end = _without_field(model, ModelProto, _GRAPH)
    yield start + _head(_GRAPH, size) + before
    for tensor, own in zip(model.graph.initializer, sizes, strict=True):
        yield _head(_INITIALIZER, own)
        yield from _tensor_parts(tensor)
    yield after + end


def initializer_bytes(tensor: TensorProto) -> int:
    """The size of an initializer inside of its serialized graph."""
    size = _content_bytes(tensor)
    return len(_head(_INITIALIZER, size)) + size


def _content_bytes(tensor: TensorProto) -> int:
    kept = kept_values(tensor)
    if kept is None:
        return tensor.ByteSize()
    return _without_values(tensor).ByteSize() + len(_head(_RAW_DATA, kept.nbytes)) + kept.nbytes


def _tensor_parts(tensor: TensorProto) -> Iterator[bytes | memoryview]:
    kept = kept_values(tensor)
    if kept is None:
        yield tensor.SerializeToString()
        return
    yield _without_values(tensor).SerializeToString() + _head(_RAW_DATA, kept.nbytes)
    yield from kept.parts()


def _without_values(tensor: TensorProto) -> TensorProto:
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)


def _without_field(message: Message, kind: type[Message], number: int) -> tuple[bytes, bytes]:
    """What is serialized before one field, and behind it."""
    before, after = kind(), kind()
    fields = kind.DESCRIPTOR.fields
    copy_fields(message, before, skip={field.name for field in fields if field.number >= number})
    copy_fields(message, after, skip={field.name for field in fields if field.number <= number})
    return before.SerializeToString(), after.SerializeToString()


# -- reading -----------------------------------------------------------------------------------------------------------


def read_parts(path: Path, kept: KeptWeights, *, in_file: bool = False) -> ModelProto:
    """Read a model that was written here; its large weights are kept beside it instead of being copied repeatedly.

    Args:
        path: The file.
        kept: Takes the large weights.
        in_file: Whether they stay in the file, to be read whenever they are used.
    """
    model = ModelProto()
    with path.open("rb") as stream:
        for field, start, end in _fields(stream, path.stat().st_size):
            if field == _GRAPH:
                _read_graph(stream, end, model.graph, kept, path if in_file else None)
            else:
                model.MergeFromString(_span(stream, start, end))
    return model


def _read_graph(stream: BinaryIO, end: int, graph: GraphProto, kept: KeptWeights, file: Path | None) -> None:
    rest = bytearray()
    for field, start, stop in _fields(stream, end):
        if field == _INITIALIZER:
            graph.initializer.append(_read_tensor(stream, stop, kept, file))
        else:
            rest += _span(stream, start, stop)
    graph.MergeFromString(bytes(rest))


def _read_tensor(stream: BinaryIO, end: int, kept: KeptWeights, file: Path | None) -> TensorProto:
    tensor, place = TensorProto(), None
    for field, start, stop in _fields(stream, end):
        if field == _RAW_DATA:
            place = stream.tell(), stop
        else:
            tensor.MergeFromString(_span(stream, start, stop))
    if place is None:
        return tensor
    begin, stop = place
    stream.seek(begin)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if stop - begin != math.prod(tensor.dims) * dtype.itemsize:  # two values share a byte
        tensor.raw_data = stream.read(stop - begin)
    elif file is not None and (left := kept.tensor_in_file(tensor.name, file, begin, tensor.dims, dtype)) is not None:
        tensor = left
    else:
        array = np.fromfile(stream, dtype, math.prod(tensor.dims)).reshape(tensor.dims)
        tensor = kept.tensor(tensor.name, array)
    stream.seek(end)
    return tensor


def _fields(stream: BinaryIO, end: int) -> Iterator[tuple[int, int, int]]:
    """Each field of the message that ends at ``end``: its number, where it starts and where it ends.

    The stream stands at its content, and must stand anywhere inside of it when the next field is asked for.
    """
    while (start := stream.tell()) < end:
        number, kind = divmod(_read_varint(stream), 8)
        if kind == _LENGTH_DELIMITED:
            size = _read_varint(stream)
        elif kind == _VARINT:
            size, before = 0, stream.tell()
            _read_varint(stream)
            size = stream.tell() - before
            stream.seek(before)
        else:
            size = _FIXED_BYTES[kind]
        stop = stream.tell() + size
        yield number, start, stop
        stream.seek(stop)


def _span(stream: BinaryIO, start: int, end: int) -> bytes:
    stream.seek(start)
    return stream.read(end - start)


def _read_varint(stream: BinaryIO) -> int:
    value = shift = 0
    while (byte := stream.read(1)[0]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
    return value | byte << shift


# -- pieces ------------------------------------------------------------------------------------------------------------


def _head(field: int, size: int) -> bytes:
    """Tag and length of a field of bytes or of a message."""
    return bytes([field << 3 | _LENGTH_DELIMITED]) + _varint(size)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
