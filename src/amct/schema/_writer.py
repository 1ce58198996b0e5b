"""Messages as text, in the layout of AMCT's documents.

protobuf's own writer depends on its version: up to 4.25 it writes control characters and bytes above 127 raw, which
cannot be parsed again. The layout here is that of protobuf 5 and later with ``as_utf8``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from amct.schema._fields import table_of
from amct.schema._values import shortest_float

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
