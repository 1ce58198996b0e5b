"""A JSON reader that records the position of every key and value.

Python's ``json`` has no positions, silently keeps the last of two equal keys, accepts ``NaN`` and has no depth limit.
This reader stops at the first invalid text (``ParseError``) and puts repeated keys in ``JsonDocument.problems``, as
a file with a repeated key can still be checked for other mistakes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, NoReturn

from amct.errors import ParseError, Position, Problem

MAX_DEPTH = 64  # a config has four levels; the limit keeps hostile files below Python's recursion limit
MAX_NUMBER_LENGTH = 400  # longer than any float64 needs, and far below the length where int() becomes slow

_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN_TEXT = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|[-+]?[0-9][-+0-9A-Za-z_.]*")
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


class _Lines:
    """Converts an offset in a text to a position; shared by all nodes of a document."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.starts = [0, *(match.end() for match in re.finditer(r"\r\n|\n|\r", text))]

    def position(self, offset: int) -> Position:
        line = bisect_right(self.starts, offset)
        return Position(self.source, line, offset - self.starts[line - 1] + 1)


@dataclass(frozen=True, slots=True)
class JsonNode:
    """One value: a scalar, a list of nodes, or a dict of nodes in file order."""

    value: Any
    lines: _Lines = field(repr=False, compare=False)
    offset: int = field(repr=False, compare=False)
    key_offset: int = field(default=-1, repr=False, compare=False)

    @property
    def position(self) -> Position:
        """The start position of the value."""
        return self.lines.position(self.offset)

    @property
    def key_position(self) -> Position:
        """The start position of the value's key; for list items and the top level that of the value."""
        return self.lines.position(self.key_offset if self.key_offset >= 0 else self.offset)

    @property
    def is_object(self) -> bool:
        """Whether the value is a JSON object."""
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        """Whether the value is a JSON list."""
        return isinstance(self.value, list)

    def at(self, path: tuple[str | int, ...]) -> JsonNode:
        """The node at ``path`` below this one, or the deepest existing node on the way to it."""
        node = self
        for step in path:
            children = node.value
            if isinstance(children, list):
                children = dict(enumerate(children))
            if not isinstance(children, dict) or step not in children:
                break
            node = children[step]
        return node

    def plain(self) -> Any:  # noqa: ANN401  a JSON value is any of six types
        """The value with plain dicts and lists, as ``json.loads`` returns it."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


@dataclass(frozen=True)
class JsonDocument:
    """A parsed JSON text and its repeated keys."""

    root: JsonNode
    problems: tuple[Problem, ...]


def read_json(data: str | bytes, source: str) -> JsonDocument:
    """Read one JSON text.

    Args:
        data: The text, or its bytes in UTF-8 (a byte order mark is allowed).
        source: The name of the file, for positions.

    Raises:
        ParseError: The text is not JSON or not UTF-8; the position is that of the first invalid character.
    """
    text = decode_utf8(data, source) if isinstance(data, bytes) else data.removeprefix("\ufeff")
    return _JsonReader(text, source).document()


def decode_utf8(data: bytes, source: str) -> str:
    """Decode the bytes of a config file; the error has the position of the first byte that is not UTF-8."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        raise ParseError(
            f"byte 0x{data[error.start]:02x} is not valid UTF-8. Save the file as UTF-8 text.",
            position=_Lines(before, source).position(len(before)),
        ) from None


class _JsonReader:
    """A recursive descent parser; ``at`` is the offset of the next character."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.lines = _Lines(text, source)
        self.at = 0
        self.depth = 0
        self.problems: list[Problem] = []

    def document(self) -> JsonDocument:
        self.skip_space()
        root = self.value()
        self.skip_space()
        if self.at < len(self.text):
            self.fail(f"expected the end of the file after the closing bracket, found {self.found()}")
        return JsonDocument(root, tuple(self.problems))

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise ParseError(message, position=self.lines.position(self.at if at is None else at))

    def found(self) -> str:
        if self.at >= len(self.text):
            return "the end of the file"
        word = _WORD.match(self.text, self.at)
        shown = word.group()[:30] if word else self.text[self.at]
        return repr(shown)

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def value(self, key_offset: int = -1) -> JsonNode:
        start, first = self.at, self.peek()
        result: Any
        if first == "{":
            result = self.object()
        elif first == "[":
            result = self.list()
        elif first == '"':
            result = self.string()
        elif first == "-" or first.isdigit():
            result = self.number()
        else:
            result = self.constant()
        return JsonNode(result, self.lines, start, key_offset)

    def enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"brackets are nested deeper than {MAX_DEPTH} levels")
        self.at += 1
        self.skip_space()

    def leave(self) -> None:
        self.at += 1
        self.depth -= 1

    def object(self) -> dict[str, JsonNode]:
        members: dict[str, JsonNode] = {}
        self.enter()
        while self.peek() != "}":
            if self.peek() != '"':
                self.fail(f'expected a key in double quotes or "}}", found {self.found()}')
            key_offset = self.at
            key = self.string()
            self.skip_space()
            if self.peek() != ":":
                self.fail(f'expected ":" after the key "{key[:60]}", found {self.found()}')
            self.at += 1
            self.skip_space()
            node = self.value(key_offset)
            if key in members:
                self.repeated(key, members[key], key_offset)
            else:
                members[key] = node
            self.separator("}")
        self.leave()
        return members

    def repeated(self, key: str, first: JsonNode, key_offset: int) -> None:
        line = first.key_position.line
        message = f'the key "{key[:60]}" is repeated (first given in line {line}). Keep one of them.'
        self.problems.append(Problem(message, self.lines.position(key_offset)))

    def list(self) -> list[JsonNode]:
        items: list[JsonNode] = []
        self.enter()
        while self.peek() != "]":
            items.append(self.value())
            self.separator("]")
        self.leave()
        return items

    def separator(self, closing: str) -> None:
        """Skip the comma between two items, or stop before the closing bracket."""
        self.skip_space()
        if self.peek() == closing:
            return
        if self.peek() != ",":
            self.fail(f'expected "," or "{closing}", found {self.found()}')
        comma = self.at
        self.at += 1
        self.skip_space()
        if self.peek() == closing:
            self.fail(f'the comma before "{closing}" has nothing after it. Remove the comma.', comma)

    def string(self) -> str:
        start = self.at
        self.at += 1
        parts: list[str] = []
        while True:
            match = _PLAIN_TEXT.match(self.text, self.at)
            assert match is not None
            parts.append(match.group())
            self.at = match.end()
            stop = self.peek()
            if stop == '"':
                self.at += 1
                return self.without_half_pairs("".join(parts), start)
            if stop == "\\":
                parts.append(self.escape())
            elif stop:
                self.fail(f"the control character {stop!r} must be written as an escape inside a string")
            else:
                self.fail("the string that begins here is never closed", start)

    def escape(self) -> str:
        """Read one escape; two escapes that form a surrogate pair become one character."""
        letter = self.text[self.at + 1 : self.at + 2]
        if letter in _ESCAPES:
            self.at += 2
            return _ESCAPES[letter]
        if letter != "u":
            self.fail(f"the escape {self.text[self.at : self.at + 2]!r} does not exist in JSON")
        code = self.hex4()
        if 0xD800 <= code < 0xDC00 and self.text.startswith("\\u", self.at):
            low = self.hex4()
            if 0xDC00 <= low < 0xE000:
                return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
            return chr(code) + chr(low)
        return chr(code)

    def hex4(self) -> int:
        digits = _HEX4.match(self.text, self.at + 2)
        if digits is None:
            self.fail("\\u needs four hexadecimal digits")
        self.at = digits.end()
        return int(digits.group(), 16)

    def without_half_pairs(self, text: str, start: int) -> str:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            self.fail("the string that begins here has half a surrogate pair, which is no character", start)
        return text

    def number(self) -> int | float:
        match = _NUMBER.match(self.text, self.at)
        word = _WORD.match(self.text, self.at)
        if match is None or (word is not None and word.end() > match.end()):
            self.fail(f"{self.found()} is not a JSON number")
        if match.end() - match.start() > MAX_NUMBER_LENGTH:
            self.fail(f"a number of {match.end() - match.start()} characters is too long (at most {MAX_NUMBER_LENGTH})")
        self.at = match.end()
        if match.group(1) is None and match.group(2) is None:
            return int(match.group())
        number = float(match.group())
        if number in (float("inf"), float("-inf")):
            self.fail(f"{match.group()[:30]} is too large for a number", match.start())
        return number

    def constant(self) -> bool | None:
        word = _WORD.match(self.text, self.at)
        if word is None or word.group() not in _CONSTANTS:
            self.fail(f"expected a value, found {self.found()}")
        self.at = word.end()
        return _CONSTANTS[word.group()]
