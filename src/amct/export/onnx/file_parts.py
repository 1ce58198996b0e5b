"""The bytes of an ONNX file in parts, so that weights go from beside a model into the file, and back, uncopied."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper

from amct.export.onnx.kept_weights import KeptWeights, copy_fields, kept_values, refers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.protobuf.message import Message

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
