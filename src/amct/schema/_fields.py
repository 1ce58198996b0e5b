"""The fields of a message type as the text reader needs them, and how each reads its numbers, words and strings.

A table is taken from the descriptor of a message type once. Each field has the functions that read its values, so the
parser has no cases by type.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from amct.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor


LONGEST_NUMBER = 400
"""No field type needs a longer number; the limit keeps megabytes of digits away from int() and float()."""

_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_REAL = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?")
_NOT_FINITE = re.compile(r"(-?(?:inf(?:inity)?|nan))f?", re.IGNORECASE)
_TRUE = frozenset({"true", "True", "t"})
_FALSE = frozenset({"false", "False", "f"})

_FLOAT32 = struct.Struct("<f")
_FLOAT32_NORMAL = 2.0**-126
_FLOAT32_TOO_LARGE = (2.0 - 2.0**-24) * 2.0**127
"""Halfway between the largest float32 and the next step: from here on rounding gives infinity."""

_SIMPLE_ESCAPES = {
    "a": b"\a", "b": b"\b", "f": b"\f", "n": b"\n", "r": b"\r", "t": b"\t", "v": b"\v",
    "?": b"?", "\\": b"\\", "'": b"'", '"': b'"',
}  # fmt: skip
_ESCAPE = re.compile(
    r"""\\(?:
        (?P<octal>[0-7]{1,3})
      | [xX](?P<hex>[0-9a-fA-F]{1,2})
      | u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})
      | (?:u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8}))
      | (?P<simple>[abfnrtv?\\'"])
      | .?
    )""",
    re.DOTALL | re.VERBOSE,
)


class BadValueError(Exception):
    """A scalar that its field cannot hold; the parser turns it into a problem with a position.

    ``offset`` is the position of the mistake in the quoted text.
    """

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


def shown(text: str) -> str:
    """A text from the file for a message; a long one is cut."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def integer_reader(expected: str, low: int, high: int) -> Callable[[str], int]:
    """A function that reads a decimal, octal or hexadecimal literal within ``low..high``."""

    def read(literal: str) -> int:
        if not _INTEGER.fullmatch(literal):
            raise BadValueError(f"takes {expected}, got {shown(literal)}")
        if len(literal) > LONGEST_NUMBER:
            raise BadValueError(f"takes {expected}, got a number of {len(literal)} characters")
        digits = literal.lstrip("-")
        value = int(literal, 16 if digits[1:2] in ("x", "X") else 8 if digits[0] == "0" else 10)
        if not low <= value <= high:
            raise BadValueError(f"takes {expected}, got {shown(literal)}: it must lie in {low}..{high}")
        return value

    return read


def read_double(literal: str) -> float:
    """Read a decimal literal; what is too large for a double is an error, never infinity."""
    if not _REAL.fullmatch(literal):
        raise BadValueError(f"takes a decimal number, got {shown(literal)}")
    if len(literal) > LONGEST_NUMBER:
        raise BadValueError(f"takes a decimal number, got one of {len(literal)} characters")
    value = float(literal.rstrip("fF"))
    if math.isinf(value):
        raise BadValueError(
            f"takes a decimal number, got {shown(literal)}: it is too large (write inf to mean infinity)"
        )
    return value


def read_float(literal: str) -> float:
    """Read a decimal literal as float32; return it as the double of its shortest decimal (0.7 stays 0.7)."""
    value = read_double(literal)
    if abs(value) >= _FLOAT32_TOO_LARGE:
        raise BadValueError(
            f"takes a decimal number, got {shown(literal)}: it is too large for float32, whose end is 3.4028235e+38"
        )
    if len(literal) <= 7 and abs(value) >= _FLOAT32_NORMAL:
        return value  # at most six digits, or an integer below 2^24: already the shortest decimal of its float32
    return shortest_float(value)


def shortest_float(value: float) -> float:
    """The double whose decimal, of six to nine digits, is the shortest that rounds to the same float32 as ``value``.

    >>> shortest_float(0.30000001192092896)
    0.3
    """
    if not math.isfinite(value):
        return value
    (exact,) = _FLOAT32.unpack(_FLOAT32.pack(value))
    for digits in range(6, 9):
        candidate = float(f"{exact:.{digits}g}")
        if abs(candidate) < _FLOAT32_TOO_LARGE and _FLOAT32.unpack(_FLOAT32.pack(candidate))[0] == exact:
            return candidate
    return float(f"{exact:.9g}")


def read_not_finite(word: str) -> float:
    """Read inf, infinity or nan, in any case, with a sign or a trailing f."""
    spelled = _NOT_FINITE.fullmatch(word)
    if not spelled:
        raise BadValueError(f"takes a decimal number, got {shown(word)}")
    return float(spelled[1])


def read_bool_word(word: str) -> bool:
    """Read true, True, t, false, False or f."""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise BadValueError(f"takes true or false, got {shown(word)}")


def read_bool_number(literal: str) -> bool:
    """Read 1 or 0 in any integer notation."""
    if _INTEGER.fullmatch(literal) and len(literal) <= LONGEST_NUMBER:
        digits = literal.lower().removeprefix("0x").lstrip("0")
        if not literal.startswith("-") and digits in ("", "1"):
            return digits == "1"
    raise BadValueError(f"takes true or false, got {shown(literal)}")


def unescape(quoted: str) -> bytes:
    """The bytes of the inside of a quoted string: UTF-8, with backslash escapes replaced."""
    pieces = []
    done = 0
    for escape in _ESCAPE.finditer(quoted):
        pieces.append(quoted[done : escape.start()].encode("utf-8"))
        pieces.append(_escaped(escape))
        done = escape.end()
    pieces.append(quoted[done:].encode("utf-8"))
    return b"".join(pieces)


def _escaped(escape: re.Match[str]) -> bytes:
    kind = escape.lastgroup
    if kind is None:
        raise BadValueError(f"has an unknown escape {escape[0]}; a backslash itself is written \\\\", escape.start())
    if kind == "simple":
        return _SIMPLE_ESCAPES[escape[kind]]
    if kind == "low":
        code = 0x10000 + ((int(escape["high"], 16) & 0x3FF) << 10) + (int(escape["low"], 16) & 0x3FF)
        return chr(code).encode("utf-8")
    code = int(escape[kind], 8 if kind == "octal" else 16)
    if kind in ("octal", "hex"):
        if code > 255:
            raise BadValueError(f"has the escape {escape[0]}, which is more than a byte (\\377)", escape.start())
        return bytes([code])
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise BadValueError(f"has the escape {escape[0]}, which is no Unicode character", escape.start())
    return chr(code).encode("utf-8")


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
