"""Text files of protobuf: their tokens, and the messages read from them, with file, line and column of every field.

protobuf's own reader has positions only in its errors, accepts repeated fields silently or not at all, has no depth
limit and reads 1e999 as infinity.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from amct.errors import ArgumentError, ParseError, Position, Problem, did_you_mean
from amct.schema._fields import FieldInfo, MessageTable, table_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message


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


class TextField(NamedTuple):
    """One field of the file; ``value`` of an enum is its name, of a block a ``TextMessage``."""

    name: str
    value: Any
    source: SourceText
    offset: int

    @property
    def position(self) -> Position:
        """The position of the field's name."""
        return self.source.position(self.offset)


class TextMessage:
    """A message of the file.

    ``fields`` has every occurrence in the order of the file; ``get``, ``all`` and ``which`` return the effective value:
    the last one, the merged block, the last member of a oneof.
    """

    __slots__ = ("__dict__", "_source", "descriptor", "effective", "fields", "offset", "warnings")

    def __init__(self, descriptor: Descriptor, source: SourceText, offset: int) -> None:
        self.descriptor = descriptor
        self.fields: list[TextField] = []
        self.effective: dict[str, TextField] = {}
        """The effective occurrence of each field that is not repeated."""
        self.warnings: Sequence[Problem] = ()
        """Warnings about the whole file, such as a repeated value; only the outermost message has them."""
        self._source = source
        self.offset = offset

    @property
    def position(self) -> Position:
        """The position of the field that opens this message; 1:1 for the outermost."""
        return self._source.position(self.offset)

    @property
    def table(self) -> MessageTable:
        """The fields this type of message has."""
        return table_of(self.descriptor)

    @cached_property
    def _occurrences(self) -> dict[str, list[TextField]]:
        occurrences: dict[str, list[TextField]] = {}
        for field in self.fields:
            occurrences.setdefault(field.name, []).append(field)
        return occurrences

    def _info(self, name: str) -> FieldInfo:
        info = self.table.fields.get(name)
        if info is None:
            raise ArgumentError(
                f"{self.descriptor.full_name} has no field {name!r}.{did_you_mean(name, self.table.fields)}"
            )
        return info

    def has(self, name: str) -> bool:
        """Whether the file sets the field (a member of a oneof: and no later member replaces it)."""
        return name in (self._occurrences if self._info(name).repeated else self.effective)

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - the type is the field's
        """The last value the file gives, or ``default``; the schema's default is not used."""
        if self._info(name).repeated:
            occurrences = self._occurrences.get(name)
            return occurrences[-1].value if occurrences else default
        field = self.effective.get(name)
        return default if field is None else field.value

    def all(self, name: str) -> list[Any]:
        """All values of a repeated field; of another field the effective one, if any."""
        if self._info(name).repeated:
            return [field.value for field in self._occurrences.get(name, ())]
        return [self.effective[name].value] if name in self.effective else []

    def where(self, name: str, index: int = -1) -> Position:
        """The position of the last (or the ``index``-th) occurrence; that of the message when there is none."""
        self._info(name)
        occurrences = self._occurrences.get(name)
        return occurrences[index].position if occurrences else self.position

    def which(self, oneof: str) -> str | None:
        """The effective member of a oneof, or None."""
        if oneof not in self.table.oneofs:
            raise ArgumentError(
                f"{self.descriptor.full_name} has no oneof {oneof!r}.{did_you_mean(oneof, self.table.oneofs)}"
            )
        members = (name for name, info in self.table.fields.items() if info.oneof == oneof)
        return next((name for name in members if name in self.effective), None)

    def to_message(self) -> Message:
        """The same content as a protobuf message."""
        from google.protobuf.message_factory import GetMessageClass

        message: Message = GetMessageClass(self.descriptor)()
        pending: list[tuple[TextMessage, Any]] = [(self, message)]
        while pending:
            source, target = pending.pop()
            pending.extend(source._fill(target))
        return message

    def _fill(self, target: Any) -> Iterator[tuple[TextMessage, Any]]:  # noqa: ANN401 - generated class
        """Set the fields of this message; yield each inner message with its empty target."""
        for name, field in self.effective.items():
            info = self.table.fields[name]
            if info.message is not None:
                inner = getattr(target, name)
                inner.SetInParent()
                yield field.value, inner
            else:
                setattr(target, name, info.enum_numbers.get(field.value, field.value))
        for name, occurrences in self._occurrences.items():
            info = self.table.fields[name]
            if not info.repeated:
                continue
            container = getattr(target, name)
            if info.message is None:
                container.extend([info.enum_numbers.get(field.value, field.value) for field in occurrences])
            elif table_of(info.message).is_map_entry:
                _fill_map(container, [field.value for field in occurrences])
            else:
                for field in occurrences:
                    yield field.value, container.add()


def _fill_map(container: Any, entries: list[TextMessage]) -> None:  # noqa: ANN401 - generated class
    for entry in entries:
        filled: Any = entry.to_message()
        if entry.table.fields["value"].message is None:
            container[filled.key] = filled.value
        else:
            container[filled.key].CopyFrom(filled.value)
