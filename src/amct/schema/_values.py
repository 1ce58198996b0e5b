"""Reading one scalar of protobuf's text format: numbers with their ranges, words, quoted strings."""

from __future__ import annotations

import math
import re
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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
