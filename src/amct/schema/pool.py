"""Message types from the committed descriptor set, each family in a pool of its own, and messages as text and binary.

Private pools do not clash with the messages of another library in the same program, such as Caffe's ``caffe_pb2``. The
descriptor set is read when the first message type is requested.

protobuf's own writer of text depends on its version: up to 4.25 it writes control characters and bytes above 127 raw,
which cannot be parsed again. The layout here is that of protobuf 5 and later with ``as_utf8``.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from amct.errors import ArgumentError, ArgumentTypeError, ParseError, did_you_mean
from amct.schema._fields import shortest_float, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import Message


Schema = Literal["pytorch", "caffe_config", "caffe"]

DESCRIPTOR_SET = "descriptors.binpb"

#: Which family each ``*.proto`` file of this folder belongs to; ``scripts/build_schema.py`` holds them together.
FAMILIES: MappingProxyType[str, Schema] = MappingProxyType(
    {
        "basic_info.proto": "pytorch",
        "calibration_config.proto": "pytorch",
        "distill_config.proto": "pytorch",
        "quant_calibration_config.proto": "pytorch",
        "retrain_config.proto": "pytorch",
        "scale_offset_record.proto": "pytorch",
        "caffe_calibration_config.proto": "caffe_config",
        "caffe_retrain_config.proto": "caffe_config",
        "caffe_scale_offset_record.proto": "caffe_config",
        "caffe.proto": "caffe",
    }
)

FIRST_NUMBER = 2**28
"""Field numbers from here to 2^29 - 1 belong to extensions; no ``.proto`` of this package uses them."""


@dataclass(frozen=True, kw_only=True)
class ExtraField:
    """A field that an extension adds to a message, such as ``toy_quantize { k: 3.0 }``.

    Attributes:
        container: The message that gets the field, with its package: ``AMCTPytorchProto.CalibrationConfig``.
        name: The name of the field.
        settings: The dataclass whose fields become those of the field's message.
        oneof: The oneof of the container that the field joins; None: the field stands alone.
    """

    container: str
    name: str
    settings: type[Any]
    oneof: str | None = None

    @property
    def number(self) -> int:
        """The field number: it follows from the name, so it is the same in every program."""
        return numbered(self.name)


def numbered(name: str) -> int:
    """The field number of a name among the numbers of extensions."""
    return FIRST_NUMBER + zlib.crc32(name.encode()) % FIRST_NUMBER


@cache
def file_protos(schema: Schema) -> tuple[FileDescriptorProto, ...]:
    """The parsed ``.proto`` files of one family, imports before their users.

    They can be copied, extended (``with_extra_fields``) and loaded into a pool of the caller's own (``pool_of``).
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    if schema not in FAMILIES.values():
        raise ArgumentError(f"schema must be one of {', '.join(sorted(set(FAMILIES.values())))}, got {schema!r}")
    everything = FileDescriptorSet.FromString(resources.files(__package__).joinpath(DESCRIPTOR_SET).read_bytes())
    return tuple(file for file in everything.file if FAMILIES[file.name] == schema)


def pool_of(files: Iterable[FileDescriptorProto]) -> DescriptorPool:
    """A new descriptor pool with these files and nothing else; imports come before their users."""
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


@lru_cache(maxsize=64)
def pool(schema: Schema, extra: tuple[ExtraField, ...] = ()) -> DescriptorPool:
    """The pool of one family, with the fields of extensions."""
    if not extra:
        return pool_of(file_protos(schema))
    from amct.schema.extension import with_extra_fields

    return pool_of(with_extra_fields(file, extra) for file in file_protos(schema))


@lru_cache(maxsize=1024)
def descriptor(full_name: str, *, schema: Schema, extra: tuple[ExtraField, ...] = ()) -> Descriptor:
    """Return the descriptor of a message type, for example ``descriptor("caffe.NetParameter", schema="caffe")``.

    Args:
        full_name: The message type with its package.
        schema: The family it belongs to.
        extra: Fields of extensions; the message type then belongs to a private copy of the family that has them.

    Raises:
        ArgumentError: The family or the message type is unknown, or an extra field clashes with one of the schema.
    """
    try:
        return pool(schema, extra).FindMessageTypeByName(full_name)
    except KeyError:
        known = [
            f"{file.package}.{message.name}" if file.package else message.name
            for file in file_protos(schema)
            for message in file.message_type
        ]
        raise ArgumentError(
            f"schema {schema!r} has no message type {full_name!r}.{did_you_mean(full_name, known)}"
        ) from None


def message_class(full_name: str, *, schema: Schema, extra: tuple[ExtraField, ...] = ()) -> type[Message]:
    """Return the protobuf class of a message type, for example ``AMCTPytorchProto.AMCTConfig`` of ``pytorch``."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(descriptor(full_name, schema=schema, extra=extra))


_SPECIAL = re.compile(r"""[\x00-\x1f\x7f"'\\]""")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "'": "\\'", "\\": "\\\\"}


def format_text(message: Message) -> str:
    """The message in the layout of AMCT's documents: two spaces a level, ``key: "x"``, ``value {``.

    A float is written with the fewest digits that give the same float32 back; names stay readable UTF-8.
    """
    lines: list[str] = []
    _write_fields(message, "", lines)
    return "".join(lines)


def _write_fields(message: Message, indent: str, lines: list[str]) -> None:
    fields = table_of(message.DESCRIPTOR).fields
    for field, value in message.ListFields():
        info = fields[field.name]
        values: Iterable[Any] = value if info.repeated else (value,)
        if info.message is None:
            format_value = _formatter(field)
            lines += [f"{indent}{field.name}: {format_value(item)}\n" for item in values]
            continue
        if info.repeated and table_of(info.message).is_map_entry:
            values = _map_entries(info.message, value)
        for item in values:
            lines.append(f"{indent}{field.name} {{\n")
            _write_fields(item, f"{indent}  ", lines)
            lines.append(f"{indent}}}\n")


def _map_entries(entry: Any, container: Any) -> Iterable[Message]:  # noqa: ANN401 - protobuf's own classes
    from google.protobuf.message_factory import GetMessageClass

    make: Any = GetMessageClass(entry)
    for key in sorted(container):
        yield make(key=key, value=container[key])


def _formatter(field: FieldDescriptor) -> Callable[[Any], str]:
    """The function that writes one value of a field."""
    enum = field.enum_type
    if enum is not None:
        names = {value.number: value.name for value in reversed(enum.values)}
        return lambda number: names.get(number, str(number))
    if field.cpp_type == field.CPPTYPE_STRING:
        return _format_bytes if field.type == field.TYPE_BYTES else _format_string
    if field.cpp_type == field.CPPTYPE_BOOL:
        return lambda value: "true" if value else "false"
    if field.cpp_type == field.CPPTYPE_FLOAT:
        return lambda value: str(shortest_float(value))
    return str


def _format_string(value: str) -> str:
    return f'"{_SPECIAL.sub(_escaped, value)}"'


def _format_bytes(value: bytes) -> str:
    text = _SPECIAL.sub(_escaped, value.decode("latin-1"))
    return '"' + "".join(character if character < "\x80" else f"\\{ord(character):03o}" for character in text) + '"'


def _escaped(special: re.Match[str]) -> str:
    character = special[0]
    return _NAMED.get(character) or f"\\{ord(character):03o}"


_MessageT = TypeVar("_MessageT", bound="Message")


def read_binary(data: bytes, message_class: type[_MessageT], source: str) -> _MessageT:
    """Read a message in protobuf's binary format; ``source`` is the file's name for the error.

    Raises:
        ParseError: The bytes are not such a message: broken, of another kind, or without a required field.
        ArgumentTypeError: ``data`` is not bytes.
    """
    from google.protobuf.message import DecodeError

    if not isinstance(data, bytes | bytearray | memoryview):
        raise ArgumentTypeError(f"data must be bytes, got {type(data).__name__}")
    name = message_class.DESCRIPTOR.full_name
    message = message_class()
    try:
        message.ParseFromString(bytes(data))
        _refuse_broken_names(message)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ParseError(f"{source}: not a binary {name}: {error}; is the file cut off, or text?") from error
    if data and not message.ListFields():
        raise ParseError(f"{source}: nothing in it is a field of {name}; is it another kind of file?")
    if not message.IsInitialized():
        missing: list[str] = message.FindInitializationErrors()  # type: ignore[attr-defined]  # not in the stubs
        raise ParseError(f"{source}: a {name} needs {', '.join(missing)}")
    return message


def _refuse_broken_names(message: Message) -> None:
    """Check every string: some protobuf runtimes silently return bytes where a string is not UTF-8."""
    pending: list[Message] = [message]
    while pending:
        for field, value in pending.pop().ListFields():
            if field.message_type is None:
                if field.type == field.TYPE_STRING:
                    for text in [value] if isinstance(value, str | bytes) else value:
                        if isinstance(text, bytes):
                            text.decode("utf-8")
            elif hasattr(value, "DESCRIPTOR"):
                pending.append(value)
            else:
                pending.extend(_inner_messages(field, value))


def _inner_messages(field: FieldDescriptor, value: Any) -> Iterable[Message]:  # noqa: ANN401 - a protobuf container
    if field.message_type is None or not field.message_type.GetOptions().map_entry:
        messages: Iterable[Message] = value
        return messages
    return value.values() if field.message_type.fields_by_name["value"].message_type else ()
