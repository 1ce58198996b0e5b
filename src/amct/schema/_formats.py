"""Messages to text, in the layout of AMCT's documents, and from binary files, with the errors of this package.

protobuf's own writer depends on its version: up to 4.25 it writes control characters and bytes above 127 raw, which
cannot be parsed again. The layout here is that of protobuf 5 and later with ``as_utf8``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

from amct.errors import ArgumentTypeError, ParseError
from amct.schema._fields import shortest_float, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message


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
