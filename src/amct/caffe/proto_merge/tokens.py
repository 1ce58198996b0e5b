"""Splits a .proto file into tokens with their positions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.errors import ParseError, Position

if TYPE_CHECKING:
    from collections.abc import Iterable

_TOKEN = re.compile(
    r"""
      (?P<space>\s+|//[^\n]*|/\*.*?\*/)
    | (?P<name>\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)
    | (?P<number>0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    | (?P<sign>[{}\[\]()<>=;,-])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    """One token: its kind (name, number, string, sign, end), its text, and its offset."""

    kind: str
    text: str
    offset: int


class TokenStream:
    """A stream of tokens, and errors with positions."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self._tokens = list(self._split())
        self._next = 0

    def _split(self) -> Iterable[Token]:
        offset = 0
        while offset < len(self.text):
            match = _TOKEN.match(self.text, offset)
            if match is None:
                raise self.error(f"unexpected character {self.text[offset]!r}", offset)
            if match.lastgroup != "space":
                yield Token(str(match.lastgroup), match.group(), offset)
            offset = match.end()
        yield Token("end", "", len(self.text))

    def position(self, offset: int) -> Position:
        """Line and column of an offset."""
        before = self.text[:offset]
        return Position(self.source, before.count("\n") + 1, offset - before.rfind("\n"))

    def error(self, message: str, offset: int) -> ParseError:
        """An error at an offset."""
        return ParseError(message, position=self.position(offset))

    @property
    def current(self) -> Token:
        """The next token."""
        return self._tokens[self._next]

    def take(self) -> Token:
        """Return the next token and advance."""
        token = self._tokens[self._next]
        if token.kind != "end":
            self._next += 1
        return token

    def expect(self, kind: str, text: str | None = None) -> Token:
        """Take a token of this kind (and text), or raise an error that shows what was found."""
        token = self.current
        if token.kind != kind or (text is not None and token.text != text):
            found = "the end of the file" if token.kind == "end" else repr(token.text)
            raise self.error(f"expected {text or f'a {kind}'}, found {found}", token.offset)
        return self.take()

    def accept(self, text: str) -> bool:
        """Take the next token if it has this text."""
        if self.current.text == text and self.current.kind in ("name", "sign"):
            self.take()
            return True
        return False
