"""The fields of a message type as the text reader needs them, taken from its descriptor once.

Each field has the functions that read its numbers and words, so the parser has no cases by type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from amct.errors import did_you_mean
from amct.schema._values import (
    BadValueError,
    integer_reader,
    read_bool_number,
    read_bool_word,
    read_double,
    read_float,
    read_not_finite,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

Kind = Literal["message", "string", "bytes", "scalar", "enum", "anything"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FieldInfo:
    """One field of a message type: its shape, and how to read its numbers and words."""

    name: str
    kind: Kind
    repeated: bool
    required: bool
    oneof: str | None
    message: Descriptor | None
    enum_numbers: Mapping[str, int]
    expected: str
    number: Callable[[str], Any]
    word: Callable[[str], Any]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MessageTable:
    """The fields of a message type by name."""

    name: str
    fields: Mapping[str, FieldInfo]
    required: tuple[str, ...]
    oneofs: frozenset[str]
    is_map_entry: bool


@lru_cache(maxsize=1024)
def table_of(descriptor: Descriptor) -> MessageTable:
    """The table of a message type; built on first use."""
    fields = {field.name: _field_info(field) for field in descriptor.fields}
    return MessageTable(
        name=descriptor.name,
        fields=fields,
        required=tuple(name for name, field in fields.items() if field.required),
        oneofs=frozenset(oneof.name for oneof in descriptor.oneofs),
        is_map_entry=bool(descriptor.GetOptions().map_entry),
    )


def _labels(field: FieldDescriptor) -> tuple[bool, bool]:
    """Whether a field is repeated, and whether required; protobuf 6.31 renamed the attributes, 7 dropped ``label``."""
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated), bool(field.is_required)
    label = getattr(field, "label")  # noqa: B009 - the type stubs of newer protobuf do not know it
    return label == getattr(field, "LABEL_REPEATED"), label == getattr(field, "LABEL_REQUIRED")  # noqa: B009 - same


def _field_info(field: FieldDescriptor) -> FieldInfo:
    repeated, required = _labels(field)
    kind, expected, number, word = _readers(field)
    return FieldInfo(
        name=field.name,
        kind=kind,
        repeated=repeated,
        required=required,
        oneof=field.containing_oneof.name if field.containing_oneof else None,
        message=field.message_type,
        enum_numbers={value.name: value.number for value in field.enum_type.values} if field.enum_type else {},
        expected=expected,
        number=number,
        word=word,
    )


def _readers(field: FieldDescriptor) -> tuple[Kind, str, Callable[[str], Any], Callable[[str], Any]]:
    cpp_type = field.cpp_type
    if cpp_type == field.CPPTYPE_MESSAGE:
        expected = "a block { }"
        return "message", expected, _refuse(expected), _refuse(expected)
    if cpp_type == field.CPPTYPE_STRING:
        expected = "a quoted string"
        return "bytes" if field.type == field.TYPE_BYTES else "string", expected, _refuse(expected), _refuse(expected)
    if cpp_type == field.CPPTYPE_BOOL:
        return "scalar", "true or false", read_bool_number, read_bool_word
    if cpp_type == field.CPPTYPE_FLOAT:
        return "scalar", "a decimal number", read_float, read_not_finite
    if cpp_type == field.CPPTYPE_DOUBLE:
        return "scalar", "a decimal number", read_double, read_not_finite
    if field.enum_type is not None:
        return "enum", *_enum_readers(field.enum_type)
    expected, low, high = {
        field.CPPTYPE_INT32: ("an integer (int32)", -(2**31), 2**31 - 1),
        field.CPPTYPE_UINT32: ("an integer (uint32)", 0, 2**32 - 1),
        field.CPPTYPE_INT64: ("an integer (int64)", -(2**63), 2**63 - 1),
        field.CPPTYPE_UINT64: ("an integer (uint64)", 0, 2**64 - 1),
    }[cpp_type]
    return "scalar", expected, integer_reader(expected, low, high), _refuse(expected)


def _enum_readers(enum: EnumDescriptor) -> tuple[str, Callable[[str], str], Callable[[str], str]]:
    names = {value.name: value.name for value in enum.values}
    name_of_number = {value.number: value.name for value in reversed(enum.values)}
    expected = f"one of {', '.join(names)}"
    read_integer = integer_reader(expected, -(2**31), 2**31 - 1)

    def read_number(literal: str) -> str:
        number = read_integer(literal)
        if number not in name_of_number:
            numbers = ", ".join(f"{name} = {number}" for number, name in sorted(name_of_number.items()))
            raise BadValueError(f"takes one of {numbers}; got {shown(literal)}")
        return name_of_number[number]

    def read_name(word: str) -> str:
        if word not in names:
            hint = did_you_mean(word, names) if len(word) <= 100 else ""
            raise BadValueError(f"takes {expected}; got {shown(word)}.{hint}")
        return word

    return expected, read_number, read_name


def _refuse(expected: str) -> Callable[[str], Any]:
    def read(literal: str) -> Any:  # noqa: ANN401 - never returns
        raise BadValueError(f"takes {expected}, got {shown(literal)}")

    return read


def _keep(literal: str) -> str:
    return literal


def anything(name: str) -> FieldInfo:
    """A placeholder for a field that is already reported as a mistake, so that the rest of the file can be checked."""
    return FieldInfo(
        name=name,
        kind="anything",
        repeated=True,
        required=False,
        oneof=None,
        message=None,
        enum_numbers={},
        expected="anything",
        number=_keep,
        word=_keep,
    )
