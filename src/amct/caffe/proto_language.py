"""The .proto language (version 2, as Caffe uses it) to protobuf descriptors and back; protoc is not needed.

Messages, enums, nested types, oneof, defaults and packed fields are read; other options are ignored. Imports, services,
groups and extensions are errors, reported with their line.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from amct.errors import ParseError, Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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


MAX_DEPTH = 50
_LABELS = {
    "optional": FieldDescriptorProto.LABEL_OPTIONAL,
    "required": FieldDescriptorProto.LABEL_REQUIRED,
    "repeated": FieldDescriptorProto.LABEL_REPEATED,
}
SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in (
        "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "bytes", "uint32",
        "sfixed32", "sfixed64", "sint32", "sint64",
    )
}  # fmt: skip
_LARGEST_NUMBER = 2**29 - 1
_ENUM_LIMIT = 2**31
_RESERVED_NUMBERS = range(19000, 20000)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "0": "\0"}
_SKIPPED = ("option", "reserved", "extensions")
_REFUSED = ("import", "service", "extend", "group", "map")

Owner: TypeAlias = "FileDescriptorProto | DescriptorProto"


def read_proto(text: str, source: str) -> FileDescriptorProto:
    """Parse the text of a .proto file; type names are not resolved.

    Raises:
        ParseError: It is not such a file, with line and column.
    """
    stream = TokenStream(text, source)
    file = FileDescriptorProto(name=source, syntax="proto2")
    while stream.current.kind != "end":
        _file_statement(stream, file)
    return file


def _file_statement(stream: TokenStream, file: FileDescriptorProto) -> None:
    word = stream.expect("name") if stream.current.text != ";" else stream.take()
    if word.text == "message":
        _message(stream, file.message_type.add(), 0)
    elif word.text == "enum":
        _enum(stream, file.enum_type.add())
    elif word.text == "package":
        file.package = stream.expect("name").text
        stream.expect("sign", ";")
    elif word.text == "syntax":
        stream.expect("sign", "=")
        syntax = stream.expect("string")
        if syntax.text[1:-1] != "proto2":
            raise stream.error(f"only proto2, which Caffe uses, is supported; found {syntax.text}", syntax.offset)
        stream.expect("sign", ";")
    elif word.text in _SKIPPED:
        _skip(stream)
    elif word.text != ";":
        raise _refusal(stream, word)


def _refusal(stream: TokenStream, word: Token) -> Exception:
    if word.text in _REFUSED:
        return stream.error(
            f'"{word.text}" is not supported in a custom.proto: write messages and enums only', word.offset
        )
    return stream.error(f'expected message, enum, package or syntax, found "{word.text}"', word.offset)


def _skip(stream: TokenStream) -> None:
    while not stream.accept(";"):
        if stream.current.kind == "end":
            raise stream.error("expected ;, found the end of the file", stream.current.offset)
        stream.take()


def _message(stream: TokenStream, message: DescriptorProto, depth: int) -> None:
    name = stream.expect("name")
    if depth > MAX_DEPTH:
        raise stream.error(f"messages are nested more than {MAX_DEPTH} deep", name.offset)
    message.name = name.text
    stream.expect("sign", "{")
    while not stream.accept("}"):
        _message_statement(stream, message, depth)


def _message_statement(stream: TokenStream, message: DescriptorProto, depth: int) -> None:
    word = stream.current
    if word.text == ";":
        stream.take()
    elif word.text == "message":
        stream.take()
        _message(stream, message.nested_type.add(), depth + 1)
    elif word.text == "enum":
        stream.take()
        _enum(stream, message.enum_type.add())
    elif word.text == "oneof":
        stream.take()
        _oneof(stream, message)
    elif word.text in _LABELS:
        stream.take()
        _field(stream, message, _LABELS[word.text])
    elif word.text in _SKIPPED:
        _skip(stream)
    elif word.text in _REFUSED:
        raise _refusal(stream, word)
    elif word.kind == "end":
        stream.expect("sign", "}")
    else:
        raise stream.error(f'a field starts with optional, required or repeated; found "{word.text}"', word.offset)


def _oneof(stream: TokenStream, message: DescriptorProto) -> None:
    message.oneof_decl.add(name=stream.expect("name").text)
    index = len(message.oneof_decl) - 1
    stream.expect("sign", "{")
    while not stream.accept("}"):
        field = _field(stream, message, FieldDescriptorProto.LABEL_OPTIONAL)
        field.oneof_index = index


def _field(stream: TokenStream, message: DescriptorProto, label: int) -> FieldDescriptorProto:
    kind = stream.expect("name")
    if kind.text == "group":
        raise _refusal(stream, kind)
    name = stream.expect("name")
    stream.expect("sign", "=")
    token = stream.expect("number")
    number = _whole(stream, token)
    if not 1 <= number <= _LARGEST_NUMBER or number in _RESERVED_NUMBERS:
        raise stream.error(
            f"a field number is 1 to {_LARGEST_NUMBER}, not 19000 to 19999; found {number}", token.offset
        )
    for other in message.field:
        if other.number == number or other.name == name.text:
            raise stream.error(
                f"{message.name}: field {name.text} = {number} has the name or number of {other.name} = {other.number}",
                name.offset,
            )
    field = message.field.add(name=name.text, number=number)
    field.label = label  # type: ignore[assignment]
    if kind.text in SCALARS:
        field.type = SCALARS[kind.text]
    else:
        field.type_name = kind.text
    if stream.accept("["):
        _field_options(stream, field)
    stream.expect("sign", ";")
    return field


def _field_options(stream: TokenStream, field: FieldDescriptorProto) -> None:
    while True:
        name = _option_name(stream)
        stream.expect("sign", "=")
        value = _constant(stream)
        if name == "default":
            field.default_value = value
        elif name == "packed":
            field.options.packed = value == "true"
        elif name == "deprecated":
            field.options.deprecated = value == "true"
        if not stream.accept(","):
            break
    stream.expect("sign", "]")


def _option_name(stream: TokenStream) -> str:
    if stream.accept("("):
        name = stream.expect("name").text
        stream.expect("sign", ")")
        return f"({name})"
    return stream.expect("name").text


def _constant(stream: TokenStream) -> str:
    sign = "-" if stream.accept("-") else ""
    token = stream.take()
    if token.kind == "string":
        return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), token.text[1:-1])
    if token.kind == "number" and token.text[:2].lower() == "0x":
        return f"{sign}{int(token.text, 16)}"
    if token.kind not in ("name", "number"):
        raise stream.error(f"expected a value, found {token.text!r}", token.offset)
    return sign + token.text


def _whole(stream: TokenStream, token: Token) -> int:
    try:
        return int(token.text, 0)
    except ValueError:
        raise stream.error(f"expected a whole number, found {token.text}", token.offset) from None


def _enum(stream: TokenStream, enum: EnumDescriptorProto) -> None:
    enum.name = stream.expect("name").text
    stream.expect("sign", "{")
    while not stream.accept("}"):
        if stream.accept(";"):
            continue
        name = stream.expect("name")
        if name.text in _SKIPPED:
            _skip(stream)
            continue
        stream.expect("sign", "=")
        negative = stream.accept("-")
        token = stream.expect("number")
        number = -_whole(stream, token) if negative else _whole(stream, token)
        if not -_ENUM_LIMIT <= number < _ENUM_LIMIT:
            raise stream.error(f"expected a number of 32 bits, found {number}", token.offset)
        enum.value.add(name=name.text, number=number)
        if stream.accept("["):
            while not stream.accept("]"):
                if stream.take().kind == "end":
                    raise stream.error("expected ], found the end of the file", name.offset)
        stream.expect("sign", ";")
    if not enum.value:
        raise stream.error(f"enum {enum.name} has no values", stream.current.offset)


_LABEL_NAMES = {
    FieldDescriptorProto.LABEL_OPTIONAL: "optional",
    FieldDescriptorProto.LABEL_REQUIRED: "required",
    FieldDescriptorProto.LABEL_REPEATED: "repeated",
}
_SCALAR_NAMES = {number: name for name, number in SCALARS.items()}
_QUOTED = (FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BYTES)


def write_proto(file: FileDescriptorProto) -> str:
    """The file as text, messages and enums in order; comments are not kept."""
    lines = ['syntax = "proto2";', ""]
    if file.package:
        lines += [f"package {file.package};", ""]
    for enum in file.enum_type:
        lines += [*_enum_lines(enum, ""), ""]
    for message in file.message_type:
        lines += [*_message_lines(message, "", file.package), ""]
    return "\n".join(lines)


def _message_lines(message: DescriptorProto, indent: str, scope: str) -> Iterator[str]:
    yield f"{indent}message {message.name} {{"
    inner = indent + "  "
    for enum in message.enum_type:
        yield from _enum_lines(enum, inner)
    for nested in message.nested_type:
        yield from _message_lines(nested, inner, scope)
    written: set[int] = set()
    for field in message.field:
        if not field.HasField("oneof_index"):
            yield f"{inner}{_LABEL_NAMES[field.label]} {_field_line(field, scope)}"
        elif field.oneof_index not in written:
            written.add(field.oneof_index)
            yield from _oneof_lines(message, field.oneof_index, inner, scope)
    yield f"{indent}}}"


def _oneof_lines(message: DescriptorProto, index: int, indent: str, scope: str) -> Iterator[str]:
    yield f"{indent}oneof {message.oneof_decl[index].name} {{"
    for field in message.field:
        if field.HasField("oneof_index") and field.oneof_index == index:
            yield f"{indent}  {_field_line(field, scope)}"
    yield f"{indent}}}"


def _field_line(field: FieldDescriptorProto, scope: str) -> str:
    kind = _SCALAR_NAMES.get(field.type) or field.type_name.removeprefix(f".{scope}." if scope else ".")
    options = []
    if field.HasField("default_value"):
        quoted = field.type in _QUOTED
        options.append(f"default = {json.dumps(field.default_value) if quoted else field.default_value}")
    if field.options.HasField("packed"):
        options.append(f"packed = {str(field.options.packed).lower()}")
    if field.options.deprecated:
        options.append("deprecated = true")
    ending = f" [{', '.join(options)}]" if options else ""
    return f"{kind} {field.name} = {field.number}{ending};"


def _enum_lines(enum: EnumDescriptorProto, indent: str) -> Iterator[str]:
    yield f"{indent}enum {enum.name} {{"
    for value in enum.value:
        yield f"{indent}  {value.name} = {value.number};"
    yield f"{indent}}}"
