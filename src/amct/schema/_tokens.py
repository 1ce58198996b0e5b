"""A text file and its tokens: decoding, line and column of an offset, and the text format as regular expressions.

``STATEMENT`` matches a whole statement of the common form, ``TOKEN`` any single token. Each part matches in only one
way, so no input makes them backtrack for long.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property

from amct.errors import ParseError, Position

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class SourceText:
    """A decoded text with its name and the positions of its lines."""

    __slots__ = ("__dict__", "name", "text")

    def __init__(self, text: str | bytes, name: str) -> None:
        self.name = name
        self.text = _decode(text, name) if isinstance(text, bytes) else text.removeprefix("\ufeff")
        self._refuse_impossible_characters()

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(newline.end() for newline in re.finditer("\n", self.text))]

    def position(self, offset: int) -> Position:
        """Line and column, from 1, of the character at ``offset``."""
        line = bisect_right(self._line_starts, offset)
        return Position(self.name, line, offset - self._line_starts[line - 1] + 1)

    def _refuse_impossible_characters(self) -> None:
        nul = self.text.find("\0")
        if nul >= 0:
            raise ParseError(
                "a NUL character cannot stand in a text file; is this a binary file?", position=self.position(nul)
            )
        if self.text.isascii():
            return
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ParseError(
                f"the character U+{ord(self.text[error.start]):04X} (half of a surrogate pair) is not text",
                position=self.position(error.start),
            ) from None


def _decode(data: bytes, name: str) -> str:
    if data.startswith(_UTF16_MARKS):
        raise ParseError("the file is UTF-16; save it as UTF-8", position=Position(name, 1, 1))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # A byte order mark is not counted: error.start is relative to the bytes after it.
        body = data.removeprefix(b"\xef\xbb\xbf")
        start = body.rfind(b"\n", 0, error.start) + 1
        position = Position(
            name, body.count(b"\n", 0, error.start) + 1, len(body[start : error.start].decode("utf-8")) + 1
        )
        raise ParseError(
            f"the byte 0x{body[error.start]:02x} is not UTF-8; save the file as UTF-8", position=position
        ) from None


CLOSERS = {"{": "}", "<": ">"}

_SKIP = r"\s*(?:\#[^\n]*(?:\n\s*|\Z))*"
"""Blanks and comments."""

_DIGITS = r"\.?[0-9](?:[eE][+-]|[\w.])*"
"""A digit with all adjoining letters, digits, dots and exponents; the field checks whether it is a number."""

STATEMENT = re.compile(
    _SKIP
    + r"""(?:
      ([A-Za-z_]\w*)\s*(?:
          (?::\s*)?([{<])
        | :\s*(?:
              "([^"\\\n]*)"(?!\s*["'\#])
            | '([^'\\\n]*)'(?!\s*["'\#])
            | ([A-Za-z_]\w*)
            | (-?DIGITS)
          )\s*[;,]?
      )
    | ([}>])\s*[;,]?
    )""".replace("DIGITS", _DIGITS),
    re.ASCII | re.VERBOSE,
)
NAME, OPEN, DOUBLE_QUOTED, SINGLE_QUOTED, WORD, NUMBER, CLOSE = range(1, 8)
"""The groups of ``STATEMENT``; a string is matched only when no escape and no further piece of it can follow."""

TOKEN = re.compile(
    _SKIP
    + r"""(?:
      (?P<word>[A-Za-z_]\w*)
    | (?P<number>DIGITS)
    | (?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*" | '[^'\\\n]*(?:\\.[^'\\\n]*)*')
    | (?P<sign>[][{}<>:;,-])
    | (?P<end>\Z)
    | (?P<bad>.)
    )""".replace("DIGITS", _DIGITS),
    re.ASCII | re.VERBOSE,
)


def described(kind: str, token: str) -> str:
    """A token as a message shows it."""
    if kind == "end":
        return "the end of the file"
    shortened = token if len(token) <= 60 else f"{token[:57]}..."
    return f'"{shortened}"' if kind == "sign" else shortened
