"""The parser of protobuf's text format.

Nearly every line of a real file is ``name: value``, ``name {`` or ``}``; one regular expression reads such a statement
as a whole. Everything else (lists, escapes, strings in pieces, comments in unusual places, mistakes) is read token by
token. There is no recursion: open blocks are a list, so nesting is limited by a number and not by the stack.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from amct.errors import ParseError, Problem, did_you_mean
from amct.schema._fields import BadValueError, FieldInfo, anything, shown, table_of, unescape
from amct.schema.text import (
    CLOSE,
    CLOSERS,
    DOUBLE_QUOTED,
    NAME,
    NUMBER,
    OPEN,
    SINGLE_QUOTED,
    STATEMENT,
    TOKEN,
    WORD,
    SourceText,
    TextField,
    TextMessage,
    described,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from google.protobuf.descriptor import Descriptor

_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class _Block:
    """An open block, and the state to restore when it closes."""

    outer: TextMessage
    outer_lookup: Callable[[str], FieldInfo | None]
    closer: str
    field: TextField
    list_field: FieldInfo | None


def parse_text(text: str | bytes, descriptor: Descriptor, source: str, *, max_depth: int = 100) -> TextMessage:
    """Read a message in protobuf's text format; ``source`` is the file's name for positions.

    Mistakes in names and values are collected and reported together (up to 20); a mistake in the grammar ends the
    reading at once.

    Raises:
        ParseError: Not text, not the format's grammar, an unknown field or enum name, a value its field cannot hold,
            a required field missing, or blocks nested deeper than ``max_depth``.
    """
    return _Parser(SourceText(text, source), descriptor, max_depth).parse()


class _Parser:
    def __init__(self, source: SourceText, descriptor: Descriptor, max_depth: int) -> None:
        self._source = source
        self._text = source.text
        self._max_depth = max_depth
        self._at = 0
        self._token_start = 0
        self._top = TextMessage(descriptor, source, 0)
        self._message = self._top
        self._lookup: Callable[[str], FieldInfo | None] = table_of(descriptor).fields.get
        self._blocks: list[_Block] = []
        self._with_required: list[TextMessage] = [self._top] if table_of(descriptor).required else []
        self._problems: list[Problem] = []
        self._warnings: list[Problem] = []

    def parse(self) -> TextMessage:
        self._read_statements()
        if not self._problems:  # a wrong value would be reported as missing too
            self._check_required()
        if self._problems:
            raise ParseError.from_problems(self._problems)
        self._top.warnings = self._warnings
        return self._top

    def _check_required(self) -> None:
        for message in self._with_required:
            missing = [name for name in message.table.required if name not in message.effective]
            if missing:
                self._problem(message.offset, f"{message.table.name} needs {' and '.join(missing)}")

    # ------------------------------------------------------------------ statements

    def _read_statements(self) -> None:
        match, text = STATEMENT.match, self._text
        while True:
            found = match(text, self._at)
            if found is None:
                if not self._read_unusual_statement():
                    return
                continue
            self._at = found.end()
            kind = found.lastindex or 0
            if kind == CLOSE:
                self._close(found[CLOSE], found.start(CLOSE))
                continue
            name, offset = found[NAME], found.start(NAME)
            info = self._lookup(name) or self._unknown(name, offset)
            if kind == OPEN:
                self._open(info, offset, found[OPEN])
                continue
            try:
                if kind == NUMBER:
                    value = info.number(found[NUMBER])
                elif kind == WORD:
                    value = info.word(found[WORD])
                else:
                    value = _plain_string(info, found[kind])
            except BadValueError as problem:
                quote = kind in (DOUBLE_QUOTED, SINGLE_QUOTED)
                self._problem(found.start(kind) - quote, f"{name} {problem}")
            else:
                self._add(info, value, offset)

    def _read_unusual_statement(self) -> bool:
        """Read one statement token by token; false at the end of the file."""
        before = self._at
        kind, token = self._next()
        if kind == "end":
            if self._blocks:
                self._fail_unclosed()
            return False
        if token in (";", ",") and before and self._text[before - 1] not in ";,{<":
            return True
        if token == "[":
            self._fail("extensions and Any are not part of this format; a field name was expected")
        if kind != "word":
            self._fail(f"expected a field name, got {described(kind, token)}")
        offset = self._token_start
        info = self._lookup(token) or self._unknown(token, offset)
        has_colon = self._accept(":")
        kind, following = self._next()
        if following in CLOSERS:
            self._open(info, offset, following)
        elif following == "[":
            self._read_list(info)
        elif not has_colon:
            self._fail(f'expected ":" or "{{" after {shown(token)}, got {described(kind, following)}')
        else:
            self._read_scalar(info, offset, kind, following)
            self._accept_separator()
        return True

    # ------------------------------------------------------------------ values

    def _read_scalar(self, info: FieldInfo, offset: int, kind: str, token: str) -> None:
        """Read a value whose first token is given, and add it."""
        start = self._token_start
        try:
            if kind == "string":
                value = self._read_string(info, token)
            else:
                sign = "-" if token == "-" else ""
                if sign:
                    kind, token = self._next()
                if kind not in ("word", "number"):
                    self._fail(f"{info.name} takes {info.expected}, got {described(kind, token)}")
                value = (info.word if kind == "word" else info.number)(sign + token)
        except BadValueError as problem:
            self._problem(start + problem.offset, f"{info.name} {problem}")
        else:
            self._add(info, value, offset)

    def _read_string(self, info: FieldInfo, token: str) -> str | bytes:
        """Read the pieces of a string; neighbours are one string."""
        start = self._token_start
        pieces = []
        while True:
            try:
                pieces.append(unescape(token[1:-1]))
            except BadValueError as problem:
                raise BadValueError(str(problem), self._token_start - start + 1 + problem.offset) from None
            following = TOKEN.match(self._text, self._at)
            if following is None or following.lastgroup != "string":
                break
            _, token = self._next()
        content = b"".join(pieces)
        if info.kind in ("bytes", "anything"):
            return content
        if info.kind != "string":
            raise BadValueError(f"takes {info.expected}, got a quoted string")
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadValueError(
                f"is text, but its escapes give the byte 0x{content[error.start]:02x}: not UTF-8"
            ) from None

    def _read_list(self, info: FieldInfo) -> None:
        if not info.repeated:
            self._problem(self._token_start, f"{info.name} takes {info.expected}, not a list: it is not repeated")
            info = anything(info.name)
        if self._accept("]"):
            self._accept_separator()
            return
        while True:
            kind, token = self._next()
            if token in CLOSERS:
                self._open(info, self._token_start, token, list_field=info)
                return
            self._read_scalar(info, self._token_start, kind, token)
            if not self._list_goes_on():
                return

    def _list_goes_on(self) -> bool:
        kind, token = self._next()
        if token == ",":
            return True
        if token != "]":
            self._fail(f'expected "," or "]" in the list, got {described(kind, token)}')
        self._accept_separator()
        return False

    def _add(self, info: FieldInfo, value: object, offset: int) -> None:
        field = TextField(info.name, value, self._source, offset)
        message = self._message
        message.fields.append(field)
        if not info.repeated:
            effective = message.effective
            if info.oneof is not None or info.name in effective:
                self._replace(info, field)
            effective[info.name] = field

    def _replace(self, info: FieldInfo, field: TextField) -> None:
        """Warn when a field is given again, or replaces another member of its oneof."""
        message = self._message
        earlier = message.effective.get(info.name)
        if earlier is not None:
            what = "the two blocks are merged" if info.kind == "message" else "the last value is used"
            self._warn(field, f"{info.name} is given again, first at {earlier.position}: {what}")
        elif info.oneof is not None:
            rival = message.which(info.oneof)
            if rival is not None:
                place = message.effective.pop(rival).position
                self._warn(field, f"{info.name} replaces {rival} given at {place}: only one of them can be set")

    # ------------------------------------------------------------------ blocks

    def _open(self, info: FieldInfo, offset: int, bracket: str, list_field: FieldInfo | None = None) -> None:
        if len(self._blocks) >= self._max_depth:
            self._fail(f"blocks nest deeper than {self._max_depth}", offset)
        if info.message is None and info.kind != "anything":
            self._problem(offset, f"{info.name} takes {info.expected}, got a block {bracket} {CLOSERS[bracket]}")
            info = anything(info.name)
        outer, outer_lookup = self._message, self._lookup
        if info.message is None:
            self._message = TextMessage(outer.descriptor, self._source, offset)
            self._lookup = anything
        else:
            self._message = self._inner_message(info, offset)
            self._lookup = table_of(info.message).fields.get
        opened = TextField(info.name, None, self._source, offset)
        self._blocks.append(_Block(outer, outer_lookup, CLOSERS[bracket], opened, list_field))

    def _inner_message(self, info: FieldInfo, offset: int) -> TextMessage:
        """The message a block goes into: the one already there when a field that is not repeated comes again."""
        assert info.message is not None
        earlier = None if info.repeated else self._message.effective.get(info.name)
        if earlier is not None:
            self._add(info, earlier.value, offset)
            message: TextMessage = earlier.value
            return message
        message = TextMessage(info.message, self._source, offset)
        self._add(info, message, offset)
        if table_of(info.message).required:
            self._with_required.append(message)
        return message

    def _close(self, bracket: str, offset: int) -> None:
        if not self._blocks:
            self._fail(f'"{bracket}" closes nothing: no block is open here', offset)
        block = self._blocks.pop()
        if block.closer != bracket:
            self._fail(
                f'expected "{block.closer}" for the block opened at {block.field.position}, got "{bracket}"', offset
            )
        self._message, self._lookup = block.outer, block.outer_lookup
        if block.list_field is not None:
            self._at = offset + 1
            if self._list_goes_on():
                kind, token = self._next()
                if token not in CLOSERS:
                    self._fail(f'expected "{{" for the next item of the list, got {described(kind, token)}')
                self._open(block.list_field, self._token_start, token, list_field=block.list_field)

    # ------------------------------------------------------------------ tokens

    def _next(self) -> tuple[str, str]:
        found = TOKEN.match(self._text, self._at)
        assert found is not None
        assert found.lastgroup is not None
        kind = found.lastgroup
        self._token_start, self._at = found.start(kind), found.end()
        token = found[kind]
        if kind == "bad":
            if token in "\"'":
                self._fail(f"the string that begins here has no closing {token} on its line")
            self._fail(f"unexpected character {token!r}")
        return kind, token

    def _accept(self, *tokens: str) -> bool:
        found = TOKEN.match(self._text, self._at)
        assert found is not None
        if found.lastgroup == "sign" and found["sign"] in tokens:
            self._at = found.end()
            return True
        return False

    def _accept_separator(self) -> None:
        self._accept(";", ",")

    # ------------------------------------------------------------------ mistakes

    def _unknown(self, name: str, offset: int) -> FieldInfo:
        """Report an unknown field; its value is then read as anything, so that later mistakes are found too."""
        table = self._message.table
        for block in reversed(self._blocks):
            if name in block.outer.table.fields:
                self._fail(
                    f"{table.name} has no field {shown(name)}, but {block.outer.table.name} has: is it in the wrong "
                    f'place, or is a "{self._blocks[-1].closer}" missing before it? The block of '
                    f"{self._blocks[-1].field.name} opened at {self._blocks[-1].field.position} is still open",
                    offset,
                )
        self._problem(offset, f"{table.name} has no field {shown(name)}.{_nearest(name, table.fields)}")
        return anything(name)

    def _warn(self, field: TextField, message: str) -> None:
        self._warnings.append(Problem(message, field.position))

    def _problem(self, offset: int, text: str) -> None:
        self._problems.append(Problem(text, self._source.position(offset)))
        if len(self._problems) >= _MOST_PROBLEMS:
            raise ParseError.from_problems(self._problems)

    def _fail(self, text: str, offset: int | None = None) -> NoReturn:
        position = self._source.position(self._token_start if offset is None else offset)
        raise ParseError.from_problems([*self._problems, Problem(text, position)])

    def _fail_unclosed(self) -> NoReturn:
        block = self._blocks[-1]
        self._fail(f'the file ends before the "{block.closer}" of this block of {block.field.name}', block.field.offset)


def _nearest(name: str, known: Iterable[str]) -> str:
    """The known name most similar to ``name``; if none is similar, all known names where they are few."""
    names = list(known)
    comparable = name[:100]  # comparing costs the square of the length
    hint = did_you_mean(comparable, names)
    if hint or not names:
        return hint
    if len(names) <= 15:
        return f" Its fields are {', '.join(names)}."
    return f" The nearest is {difflib.get_close_matches(comparable, names, n=1, cutoff=0.0)[0]}."


def _plain_string(info: FieldInfo, content: str) -> str | bytes:
    if info.kind == "string":
        return content
    if info.kind in ("bytes", "anything"):
        return content.encode("utf-8")
    raise BadValueError(f"takes {info.expected}, got a quoted string")
