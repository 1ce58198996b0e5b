"""The bytes of an ONNX file in parts, so that weights beside a model go into the file without being copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import GraphProto, ModelProto, TensorProto

from amct.export.onnx.kept_weights import kept_array, kept_arrays
from amct.export.onnx.messages import copy_fields

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

_RAW_DATA, _INITIALIZER, _GRAPH = 9, 5, 7
"""Numbers of fields in TensorProto, GraphProto and ModelProto; fields are serialized in the order of their numbers."""
_LENGTH_DELIMITED = 2


def model_parts(model: ModelProto) -> Iterator[bytes | memoryview]:
    """The serialized model in parts: together the bytes of ``with_values(model)``."""
    if not kept_arrays(model):
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
    array = kept_array(tensor)
    if array is None:
        return tensor.ByteSize()
    return _without_values(tensor).ByteSize() + len(_head(_RAW_DATA, array.nbytes)) + array.nbytes


def _tensor_parts(tensor: TensorProto) -> Iterator[bytes | memoryview]:
    array = kept_array(tensor)
    if array is None:
        yield tensor.SerializeToString()
        return
    yield _without_values(tensor).SerializeToString() + _head(_RAW_DATA, array.nbytes)
    yield array.reshape(-1).data.cast("B")


def _without_values(tensor: TensorProto) -> TensorProto:
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)


def _without_field(message: Message, kind: type[Message], number: int) -> tuple[bytes, bytes]:
    """What is serialized before one field, and behind it."""
    before, after = kind(), kind()
    fields = kind.DESCRIPTOR.fields
    copy_fields(message, before, skip={field.name for field in fields if field.number >= number})
    copy_fields(message, after, skip={field.name for field in fields if field.number <= number})
    return before.SerializeToString(), after.SerializeToString()


def _head(field: int, size: int) -> bytes:
    """Tag and length of a field of bytes or of a message."""
    return bytes([field << 3 | _LENGTH_DELIMITED]) + _varint(size)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
