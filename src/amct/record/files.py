"""Record files: text in the layout of AMCT's documents, and protobuf's binary form.

``.txt`` is text and ``.bin`` is binary; for other names the form is detected from the content. Reading and writing a
text file written by AMCT or by this package reproduces it byte by byte.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from amct import atomic
from amct.errors import ParseError, RecordParseError
from amct.record.messages import MESSAGES, record_from_message, record_to_message
from amct.record.records import AnyRecord, CaffeRecord, Dialect, Record
from amct.schema import descriptor, format_text, message_class, parse_text, read_binary

if TYPE_CHECKING:
    from google.protobuf.message import Message

Form = Literal["text", "binary"]
AnyPath = str | os.PathLike[str]

_RecordT = TypeVar("_RecordT", Record, CaffeRecord)

_KINDS: dict[Dialect, type[AnyRecord]] = {"pytorch": Record, "caffe": CaffeRecord}
_BINARY_SUFFIXES = frozenset({".bin", ".pb", ".binpb"})
#: Control characters that do not occur in text; every binary record has some of them as tags.
_NOT_TEXT = bytes(code for code in range(32) if chr(code) not in "\t\n\v\f\r")


def read_record(path: AnyPath) -> Record:
    """Read a record file in the PyTorch dialect, text or binary.

    Raises:
        FileError: The file does not exist or cannot be read.
        RecordParseError: It is not a record file of this dialect; the message has line and column.
    """
    return _read(atomic.read_bytes(path), str(path), Record, form_of(path))


def read_caffe_record(path: AnyPath) -> CaffeRecord:
    """Read a record file in the Caffe dialect, text or binary; errors as in ``read_record``."""
    return _read(atomic.read_bytes(path), str(path), CaffeRecord, form_of(path))


def read_any_record(path: AnyPath, *, dialect: Dialect | None = None) -> AnyRecord:
    """Read a record file; without ``dialect`` it is detected from the content.

    Raises:
        RecordParseError: The file is not a record, or it is binary, fits both dialects and ``dialect`` is not given.
    """
    data = atomic.read_bytes(path)
    form = form_of(path) or ("binary" if _looks_binary(data) else "text")
    kind = _kind_of(data, str(path), form) if dialect is None else _KINDS[dialect]
    record: AnyRecord = _read(data, str(path), kind, form)  # type: ignore[type-var]  # one of both
    return record


def parse_record(content: str | bytes, source: str = "<record>") -> Record:
    """Read a record in the PyTorch dialect from text, or from bytes of either form."""
    return _read(content, source, Record, None)


def parse_caffe_record(content: str | bytes, source: str = "<record>") -> CaffeRecord:
    """Read a record in the Caffe dialect from text, or from bytes of either form."""
    return _read(content, source, CaffeRecord, None)


def format_record(record: AnyRecord) -> str:
    """Return the text of a record, in the layout of AMCT's documents."""
    return format_text(record_to_message(record))


def write_record(record: AnyRecord, path: AnyPath, *, form: Form | None = None) -> None:
    """Write a record file, atomically; without ``form`` binary if the suffix is that of a binary file, otherwise text.

    Raises:
        FileError: The file cannot be written.
        RecordValueError: A number does not fit its field.
    """
    atomic.write_bytes(path, encode_record(record, form or form_of(path) or "text"))


def encode_record(record: AnyRecord, form: Form) -> bytes:
    """Return the bytes of a record file in the given form."""
    return record_to_message(record).SerializeToString() if form == "binary" else format_record(record).encode()


def form_of(path: AnyPath) -> Form | None:
    """Return the form that the suffix of a file name implies; None if it implies none."""
    suffix = Path(path).suffix.lower()
    if suffix in _BINARY_SUFFIXES:
        return "binary"
    return "text" if suffix == ".txt" else None


def _read(content: str | bytes, source: str, kind: type[_RecordT], form: Form | None) -> _RecordT:
    name, schema = MESSAGES[kind]
    try:
        if isinstance(content, bytes) and (form == "binary" or (form is None and _looks_binary(content))):
            message = read_binary(content, message_class(name, schema=schema), source)
            if _has_unknown_fields(message):
                dialect = "caffe" if kind is CaffeRecord else "pytorch"
                raise ParseError(
                    f"{source}: has fields that the {dialect} dialect does not have; is it another dialect?"
                )
            return record_from_message(message, kind, source)
        text = parse_text(content, descriptor(name, schema=schema), source)
        message = text.to_message()
    except ParseError as error:
        raise RecordParseError.from_problems(error.problems) from error
    return record_from_message(message, kind, source, text)


def _looks_binary(data: bytes) -> bool:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return False  # UTF-16: the text reader raises a clear error
    return len(data.translate(None, _NOT_TEXT)) != len(data)


def _kind_of(data: bytes, source: str, form: Form) -> type[AnyRecord]:
    if form == "text":
        only_caffe = (b"record_d", b"num_bits_w", b"object_layer")
        return CaffeRecord if any(word in data for word in only_caffe) else Record
    possible = [kind for kind in MESSAGES if _could_be(data, kind)]
    if len(possible) > 1:
        raise RecordParseError(f"{source}: could be a pytorch or a caffe record; choose one with dialect")
    return possible[0] if possible else Record


def _could_be(data: bytes, kind: type[AnyRecord]) -> bool:
    name, schema = MESSAGES[kind]
    try:
        return not _has_unknown_fields(read_binary(data, message_class(name, schema=schema), ""))
    except ParseError:
        return False


def _has_unknown_fields(message: Message) -> bool:
    """Whether a binary message has fields that its type does not define."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return bool(known.ByteSize() != message.ByteSize())
