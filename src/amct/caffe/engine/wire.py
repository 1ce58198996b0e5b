"""Reads weights from a binary caffemodel without creating protobuf messages.

A caffemodel may hold hundreds of megabytes of floats, which protobuf's Python objects would copy value by value, and a
fork of Caffe may use the same field numbers for other layer parameters. Only names and blobs are read; the values are
views of the file's bytes. Every length is checked: a truncated or damaged file is a ParseError with the byte offset.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from amct.errors import ParseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[np.generic]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_TRUNCATED = "a field of {size} bytes where only {left} are left: is it truncated?"
_INSIDE_NUMBER = "it ends inside a number"

# Field numbers: NetParameter, LayerParameter, V1LayerParameter, V0LayerParameter, BlobProto (see caffe.proto).
_NET_LAYER, _NET_LAYERS_V1 = 100, 2
_LAYER_NAME, _LAYER_BLOBS = 1, 7
_V1_NAME, _V1_BLOBS, _V1_V0_LAYER = 4, 6, 1
_V0_NAME, _V0_BLOBS = 1, 50
_BLOB_SHAPE, _BLOB_DATA, _BLOB_DIFF, _BLOB_DOUBLE, _BLOB_INT8, _BLOB_INT32 = 7, 5, 6, 8, 10, 11
# Weights of NVIDIA's Caffe and of OpenCV: the bytes of an array, and the type of its numbers. The type has the number
# of int8_data, but is a varint, which bytes never are.
_BLOB_RAW_TYPE, _BLOB_RAW = 10, 12
_LEGACY_FIELDS = (1, 2, 3, 4)
_STATE_ITER, _STATE_NET, _STATE_HISTORY, _STATE_STEP = 1, 2, 3, 4


@dataclass
class StoredBlob:
    """One blob of a file: shape, flat values (floats, int8 or int32), and whether its shape is legacy."""

    shape: tuple[int, ...]
    values: Array
    is_legacy: bool = False


@dataclass
class StoredLayer:
    """The name and the blobs of one layer of a file."""

    name: str
    blobs: list[StoredBlob] = field(default_factory=list)


@dataclass
class StoredState:
    """The content of a solver state file."""

    iteration: int = 0
    learned_net: str | None = None
    history: list[StoredBlob] = field(default_factory=list)
    current_step: int = 0


class _WireReader:
    """Reads the fields of one message, at a position of the file."""

    def __init__(self, data: bytes | memoryview, source: str, start: int = 0, end: int | None = None) -> None:
        self.data, self.source, self.position = memoryview(data), source, start
        self.end = len(self.data) if end is None else end

    def fail(self, why: str) -> ParseError:
        return ParseError(
            f"{self.source}: not a caffemodel, or damaged: {why} at byte {self.position}. Download or copy the file "
            "again."
        )

    def varint(self) -> int:
        result = shift = 0
        for _ in range(_MAX_VARINT_BYTES):
            if self.position >= self.end:
                raise self.fail(_INSIDE_NUMBER)
            byte = self.data[self.position]
            self.position += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result
            shift += 7
        raise self.fail("a number is too long")

    def fields(self) -> Iterator[tuple[int, int, int | _WireReader]]:
        """Each field as (number, wire type, value); a length-delimited value is a _WireReader."""
        while self.position < self.end:
            key = self.varint()
            number, kind = key >> 3, key & 7
            if number == 0:
                raise self.fail("field number 0")
            if kind == VARINT:
                yield number, kind, self.varint()
            elif kind == LENGTH:
                yield number, kind, self._take(self.varint(), _TRUNCATED)
            elif kind in (FIXED32, FIXED64):
                yield number, kind, self._take(4 if kind == FIXED32 else 8, _INSIDE_NUMBER)
            else:
                raise self.fail(f"unknown wire type {kind}")

    def _take(self, size: int, problem: str) -> _WireReader:
        left = self.end - self.position
        if size > left:
            raise self.fail(problem.format(size=size, left=left))
        start = self.position
        self.position += size
        return _WireReader(self.data, self.source, start, self.position)

    def bytes(self) -> memoryview:
        return self.data[self.position : self.end]

    def text(self) -> str:
        return bytes(self.bytes()).decode("utf-8", errors="replace")


def read_weights(data: bytes | memoryview, source: str) -> list[StoredLayer]:
    """Every layer of a serialized NetParameter, with its blobs; arrays are views of ``data``.

    Raises:
        ParseError: The bytes are not a caffemodel.
    """
    layers = []
    for number, _, value in _WireReader(data, source).fields():
        if isinstance(value, _WireReader):
            if number == _NET_LAYER:
                layers.append(_layer(value, _LAYER_NAME, _LAYER_BLOBS))
            elif number == _NET_LAYERS_V1:
                layers.append(_v1_layer(value))
    return layers


def read_blob(data: bytes | memoryview, source: str) -> StoredBlob:
    """A serialized BlobProto (a mean file).

    Raises:
        ParseError: The bytes are not a BlobProto.
    """
    return _blob(_WireReader(data, source))


def read_solver_state(data: bytes | memoryview, source: str) -> StoredState:
    """A serialized SolverState (``.solverstate``); history arrays are views of ``data``.

    Raises:
        ParseError: The bytes are not a SolverState.
    """
    state = StoredState()
    for number, _, value in _WireReader(data, source).fields():
        if isinstance(value, int):
            if number == _STATE_ITER:
                state.iteration = _signed(value)
            elif number == _STATE_STEP:
                state.current_step = _signed(value)
        elif number == _STATE_NET:
            state.learned_net = value.text()
        elif number == _STATE_HISTORY:
            state.history.append(_blob(value))
    return state


def state_parts(
    iteration: int, learned_net: str, history: list[list[bytes | memoryview]], current_step: int
) -> list[bytes | memoryview]:
    """A SolverState in pieces; ``history`` holds the pieces of each blob."""
    path = learned_net.encode()
    parts: list[bytes | memoryview] = [
        varint(_STATE_ITER << 3) + varint(iteration), length_delimited(_STATE_NET, len(path)), path
    ]  # fmt: skip
    for blob in history:
        parts += [length_delimited(_STATE_HISTORY, sum(map(len, blob))), *blob]
    parts.append(varint(_STATE_STEP << 3) + varint(current_step))
    return parts


def _layer(reader: _WireReader, name_field: int, blobs_field: int) -> StoredLayer:
    layer = StoredLayer("")
    for number, _, value in reader.fields():
        if not isinstance(value, _WireReader):
            continue
        if number == name_field:
            layer.name = value.text()
        elif number == blobs_field:
            layer.blobs.append(_blob(value))
    return layer


def _v1_layer(reader: _WireReader) -> StoredLayer:
    start = reader.position
    layer = _layer(reader, _V1_NAME, _V1_BLOBS)
    if layer.blobs or layer.name:
        return layer
    for number, _, value in _WireReader(reader.data, reader.source, start, reader.end).fields():
        if number == _V1_V0_LAYER and isinstance(value, _WireReader):
            return _layer(value, _V0_NAME, _V0_BLOBS)
    return layer


_RAW_FLOAT = 1
_RAW_DTYPES: dict[int, npt.DTypeLike] = {0: "<f8", _RAW_FLOAT: "<f4", 2: "<f2"}


class _BlobParts:
    """The fields of a BlobProto read so far; values may be packed or single."""

    def __init__(self) -> None:
        self.dims: list[int] | None = None
        self.legacy: dict[int, int] = {}
        self.pieces: dict[int, list[Array]] = {}
        self.loose: dict[int, bytearray] = {}
        self.raw_type = _RAW_FLOAT
        self.raw: memoryview | None = None


_DTYPES: dict[int, npt.DTypeLike] = {_BLOB_DATA: "<f4", _BLOB_DOUBLE: "<f8", _BLOB_INT8: np.int8}


def _blob(reader: _WireReader) -> StoredBlob:
    parts = _BlobParts()
    for number, kind, value in reader.fields():
        if isinstance(value, int):
            if number in _LEGACY_FIELDS:
                parts.legacy[number] = _signed(value)
            elif number == _BLOB_RAW_TYPE:
                parts.raw_type = value
            elif number == _BLOB_INT32:
                parts.pieces.setdefault(number, []).append(np.array([_signed(value)], np.int32))
        elif number == _BLOB_SHAPE:
            parts.dims = (parts.dims or []) + _dims(value)
        elif number == _BLOB_INT32:
            parts.pieces.setdefault(number, []).append(np.array(_varints(value), np.int64).astype(np.int32))
        elif number in _DTYPES:
            _take_numbers(parts, number, kind, value)
        elif number == _BLOB_RAW and kind == LENGTH:
            parts.raw = value.bytes()
    return _finish_blob(parts, reader)


def _take_numbers(parts: _BlobParts, number: int, kind: int, value: _WireReader) -> None:
    if kind == LENGTH:
        size = np.dtype(_DTYPES[number]).itemsize
        content = value.bytes()
        if len(content) % size:
            raise value.fail(f"{len(content)} bytes are not a whole number of {size}-byte values")
        parts.pieces.setdefault(number, []).append(np.frombuffer(content, _DTYPES[number]))
    else:
        parts.loose.setdefault(number, bytearray()).extend(value.bytes())


def _finish_blob(parts: _BlobParts, reader: _WireReader) -> StoredBlob:
    for number, content in parts.loose.items():
        parts.pieces.setdefault(number, []).append(np.frombuffer(bytes(content), _DTYPES[number]))
    order = (_BLOB_INT8, _BLOB_INT32, _BLOB_DOUBLE, _BLOB_DATA)
    found = next((parts.pieces[number] for number in order if number in parts.pieces), [np.zeros(0, np.float32)])
    values = found[0] if len(found) == 1 else np.concatenate(found)
    if parts.raw is not None and not parts.pieces:
        values = _raw_values(parts.raw, parts.raw_type, reader)
    legacy = parts.dims is None and bool(parts.legacy)
    shape = tuple(parts.legacy.get(number, 0) for number in _LEGACY_FIELDS) if legacy else tuple(parts.dims or ())
    if any(size < 0 for size in shape):
        raise reader.fail(f"a blob of negative size {shape}")
    return StoredBlob(shape, values, legacy)


def _raw_values(content: memoryview, kind: int, reader: _WireReader) -> Array:
    if kind not in _RAW_DTYPES:
        raise reader.fail(f"raw_data of type {kind}, expected 0 (double), 1 (float) or 2 (float16),")
    dtype = np.dtype(_RAW_DTYPES[kind])
    if len(content) % dtype.itemsize:
        raise reader.fail(f"{len(content)} bytes are not a whole number of {dtype.itemsize}-byte values")
    return np.frombuffer(content, dtype)


def _dims(reader: _WireReader) -> list[int]:
    dims: list[int] = []
    for number, _, value in reader.fields():
        if number == 1:
            dims += [_signed(value)] if isinstance(value, int) else _varints(value)
    return dims


def _varints(reader: _WireReader) -> list[int]:
    values = []
    while reader.position < reader.end:
        values.append(_signed(reader.varint()))
    return values


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def varint(value: int) -> bytes:
    """A protobuf varint."""
    value &= 2**64 - 1
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def length_delimited(number: int, size: int) -> bytes:
    """The tag and length of a length-delimited field; ``size`` bytes must follow."""
    return varint(number << 3 | LENGTH) + varint(size)


def _bytes(values: npt.NDArray[np.float32]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


def blob_parts(shape: tuple[int, ...], values: Array, diff: Array | None = None) -> list[bytes | memoryview]:
    """A BlobProto of float32 values as a list of byte pieces, so that large arrays are written without a copy."""
    data = np.ascontiguousarray(values, np.dtype("<f4"))
    pieces: list[bytes | memoryview] = [length_delimited(_BLOB_DATA, data.nbytes), _bytes(data)]
    if diff is not None:
        gradients = np.ascontiguousarray(diff, np.dtype("<f4"))
        pieces += [length_delimited(_BLOB_DIFF, gradients.nbytes), _bytes(gradients)]
    dims = b"".join(varint(size) for size in shape)
    packed = length_delimited(1, len(dims)) + dims if dims else b""
    pieces += [length_delimited(_BLOB_SHAPE, len(packed)), packed]
    return pieces


def layer_parts(parameter: bytes, blobs: list[list[bytes | memoryview]]) -> list[bytes | memoryview]:
    """The ``layer`` field of a NetParameter, in pieces: a LayerParameter serialized without blobs, then its blobs."""
    body: list[bytes | memoryview] = [parameter]
    for blob in blobs:
        body.append(length_delimited(_LAYER_BLOBS, sum(map(len, blob))))
        body += blob
    return [length_delimited(_NET_LAYER, sum(map(len, body))), *body]
