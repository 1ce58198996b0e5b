"""Merges caffe.proto with AMCT's messages and a user's custom.proto. Python 3.6 and its standard library are enough.

* A message name or a LayerParameter field of the user that AMCT uses: an error that names both.
* A LayerParameter number of the user that caffe.proto uses under another name: an error that names both.
* A message, or a LayerParameter field, of the same name as in caffe.proto: the user's is used, with a note.
* ``required`` in the user's LayerParameter: an error, as no layer without that field could be read.

Of the .proto language (version 2, as Caffe uses it), messages, enums, nested types, oneof, defaults and packed fields
are read; other options are ignored. Imports, services, groups and extensions are errors, reported with their line.
"""

import argparse
import os
import re
import shutil
import sys
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

LAYER = "LayerParameter"
#: The messages of caffe.proto to which AMCT adds fields.
EXTENDED = (LAYER, "BlobProto", "BatchNormParameter")
MAX_DEPTH = 50
LABELS = ("optional", "required", "repeated")
KEPT_OPTIONS = ("default", "packed", "deprecated")
SCALARS = (
    "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "bytes", "uint32",
    "sfixed32", "sfixed64", "sint32", "sint64",
)  # fmt: skip


class ProtoError(Exception):
    """A .proto file cannot be parsed."""

    def __init__(self, message: str, source: str, line: int, column: int) -> None:
        super().__init__(f"{source}:{line}:{column}: {message}")
        self.message, self.source, self.line, self.column = message, source, line, column


class MergeError(Exception):
    """Files conflict; ``problems`` has a sentence for each conflict."""

    def __init__(self, problems: List[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Field:
    """A field of a message: ``choice`` is the oneof that it belongs to, ``options`` are as they are written."""

    def __init__(self, label: str, kind: str, name: str, number: int, choice: Optional[str] = None) -> None:
        self.label, self.kind, self.name, self.number, self.choice = label, kind, name, number, choice
        self.options: Dict[str, str] = {}


Enum = NamedTuple("Enum", [("name", str), ("values", List[Tuple[str, int]])])


class Message:
    """A message; a file is one without a name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fields: List[Field] = []
        self.enums: List[Enum] = []
        self.messages: List[Message] = []
        self.choices: List[str] = []

    def message(self, name: str) -> "Optional[Message]":
        """The message of this name inside of this one."""
        return next((message for message in self.messages if message.name == name), None)

    def field(self, name: str) -> Optional[Field]:
        """The field of this name."""
        return next((field for field in self.fields if field.name == name), None)


class ProtoFile(Message):
    """A .proto file."""

    def __init__(self, source: str) -> None:
        super().__init__("")
        self.source, self.package = source, ""

    @property
    def layer_fields(self) -> List[Field]:
        """The fields of LayerParameter."""
        layer = self.message(LAYER)
        return layer.fields if layer is not None else []


# -- Reading -----------------------------------------------------------------------------------------------------------

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
_LARGEST_NUMBER = 2**29 - 1
_RESERVED_NUMBERS = range(19000, 20000)
_SKIPPED = ("option", "reserved", "extensions")
_REFUSED = ("import", "service", "extend", "group", "map")

Token = NamedTuple("Token", [("kind", str), ("text", str), ("offset", int)])


def read_file(path: str) -> ProtoFile:
    """Parse a .proto file; an OSError, a UnicodeDecodeError or a ProtoError says why it cannot be."""
    with open(path, encoding="utf-8") as file:
        return parse(file.read(), path)


def parse(text: str, source: str) -> ProtoFile:
    """Parse the text of a .proto file; type names are not resolved."""
    return _Parser(text, source).file()


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.tokens = list(self.split())
        self.next = 0

    def split(self) -> Iterator[Token]:
        offset = 0
        while offset < len(self.text):
            match = _TOKEN.match(self.text, offset)
            if match is None:
                raise self.error(f"unexpected character {self.text[offset]!r}", Token("", "", offset))
            if match.lastgroup != "space":
                yield Token(str(match.lastgroup), match.group(), offset)
            offset = match.end()
        yield Token("end", "", len(self.text))

    def error(self, message: str, token: Token) -> ProtoError:
        before = self.text[: token.offset]
        return ProtoError(message, self.source, before.count("\n") + 1, token.offset - before.rfind("\n"))

    @property
    def current(self) -> Token:
        return self.tokens[self.next]

    def take(self) -> Token:
        token = self.tokens[self.next]
        self.next += token.kind != "end"
        return token

    def expect(self, kind: str, text: Optional[str] = None) -> Token:
        token = self.current
        if token.kind != kind or (text is not None and token.text != text):
            found = "the end of the file" if token.kind == "end" else repr(token.text)
            raise self.error(f"expected {text or f'a {kind}'}, found {found}", token)
        return self.take()

    def accept(self, text: str) -> bool:
        found = self.current.text == text and self.current.kind in ("name", "sign")
        self.next += found
        return found

    def file(self) -> ProtoFile:
        file = ProtoFile(self.source)
        while self.current.kind != "end":
            word = self.current
            if self.statement(file, 0):
                continue
            self.expect("name")
            if word.text == "package":
                file.package = self.expect("name").text
                self.expect("sign", ";")
            elif word.text == "syntax":
                self.expect("sign", "=")
                syntax = self.expect("string")
                if syntax.text[1:-1] != "proto2":
                    raise self.error(f"only proto2, which Caffe uses, is supported; found {syntax.text}", syntax)
                self.expect("sign", ";")
            else:
                raise self.error(f'expected message, enum, package or syntax, found "{word.text}"', word)
        return file

    def statement(self, owner: Message, depth: int) -> bool:
        """Read what files and messages both can hold; tell whether there was such a thing."""
        word = self.current
        if word.text in _REFUSED:
            raise self.error(f'"{word.text}" is not supported in a custom.proto: write messages and enums only', word)
        if self.accept(";"):
            return True
        if self.accept("message"):
            owner.messages.append(self.message(depth))
        elif self.accept("enum"):
            owner.enums.append(self.enum())
        elif word.text in _SKIPPED:
            self.skip_to(";")
        else:
            return False
        return True

    def skip_to(self, sign: str) -> None:
        while not self.accept(sign):
            if self.take().kind == "end":
                self.expect("sign", sign)

    def message(self, depth: int) -> Message:
        name = self.expect("name")
        if depth > MAX_DEPTH:
            raise self.error(f"messages are nested more than {MAX_DEPTH} deep", name)
        message = Message(name.text)
        self.expect("sign", "{")
        while not self.accept("}"):
            word = self.current
            if self.statement(message, depth + 1):
                continue
            if self.accept("oneof"):
                self.oneof(message)
            elif word.text in LABELS:
                self.take()
                self.field(message, word.text)
            elif word.kind == "end":
                self.expect("sign", "}")
            else:
                raise self.error(f'a field starts with optional, required or repeated; found "{word.text}"', word)
        return message

    def oneof(self, message: Message) -> None:
        message.choices.append(self.expect("name").text)
        self.expect("sign", "{")
        while not self.accept("}"):
            self.field(message, "optional", message.choices[-1])

    def field(self, message: Message, label: str, choice: Optional[str] = None) -> None:
        kind = self.current
        if kind.text == "group":
            self.statement(message, 0)  # which refuses it
        self.expect("name")
        name = self.expect("name")
        self.expect("sign", "=")
        token = self.current
        number = self.whole()
        if not 1 <= number <= _LARGEST_NUMBER or number in _RESERVED_NUMBERS:
            raise self.error(f"a field number is 1 to {_LARGEST_NUMBER}, not 19000 to 19999; found {number}", token)
        for other in message.fields:
            if other.number == number or other.name == name.text:
                raise self.error(
                    f"{message.name}: field {name.text} = {number} has the name or number of "
                    f"{other.name} = {other.number}",
                    name,
                )
        field = Field(label, kind.text, name.text, number, choice)
        if self.accept("["):
            self.options(field)
        self.expect("sign", ";")
        message.fields.append(field)

    def options(self, field: Field) -> None:
        while True:
            is_custom = self.accept("(")
            name = self.expect("name").text
            if is_custom:
                self.expect("sign", ")")
            self.expect("sign", "=")
            sign = "-" if self.accept("-") else ""
            value = self.take()
            if value.kind not in ("name", "number", "string"):
                raise self.error(f"expected a value, found {value.text!r}", value)
            if name in KEPT_OPTIONS and not is_custom:
                field.options[name] = sign + value.text
            if not self.accept(","):
                break
        self.expect("sign", "]")

    def whole(self) -> int:
        token = self.expect("number")
        try:
            return int(token.text, 0)
        except ValueError:
            raise self.error(f"expected a whole number, found {token.text}", token) from None

    def enum(self) -> Enum:
        enum = Enum(self.expect("name").text, [])
        self.expect("sign", "{")
        while not self.accept("}"):
            if self.accept(";"):
                continue
            name = self.expect("name")
            if name.text in _SKIPPED:
                self.skip_to(";")
                continue
            self.expect("sign", "=")
            sign = -1 if self.accept("-") else 1
            token = self.current
            number = sign * self.whole()
            if not -(2**31) <= number < 2**31:
                raise self.error(f"expected a number of 32 bits, found {number}", token)
            enum.values.append((name.text, number))
            if self.accept("["):
                self.skip_to("]")
            self.expect("sign", ";")
        if not enum.values:
            raise self.error(f"enum {enum.name} has no values", self.current)
        return enum


# -- Writing -----------------------------------------------------------------------------------------------------------


def to_text(file: ProtoFile) -> str:
    """The file as text, enums and messages in order; comments are not kept."""
    lines = ['syntax = "proto2";', ""]
    if file.package:
        lines += [f"package {file.package};", ""]
    for enum in file.enums:
        lines += [*_enum_lines(enum, ""), ""]
    for message in file.messages:
        lines += [*_message_lines(message, ""), ""]
    return "\n".join(lines)


def _message_lines(message: Message, indent: str) -> Iterator[str]:
    yield f"{indent}message {message.name} {{"
    inner = indent + "  "
    for enum in message.enums:
        yield from _enum_lines(enum, inner)
    for nested in message.messages:
        yield from _message_lines(nested, inner)
    written = set()
    for field in message.fields:
        if field.choice is None:
            yield f"{inner}{field.label} {_field_text(field)}"
        elif field.choice not in written:
            written.add(field.choice)
            yield f"{inner}oneof {field.choice} {{"
            for each in message.fields:
                if each.choice == field.choice:
                    yield f"{inner}  {_field_text(each)}"
            yield f"{inner}}}"
    yield f"{indent}}}"


def _field_text(field: Field) -> str:
    options = ", ".join(f"{name} = {value}" for name, value in field.options.items())
    return f"{field.kind} {field.name} = {field.number}{f' [{options}]' if options else ''};"


def _enum_lines(enum: Enum, indent: str) -> Iterator[str]:
    yield f"{indent}enum {enum.name} {{"
    for name, number in enum.values:
        yield f"{indent}  {name} = {number};"
    yield f"{indent}}}"


# -- Merging -----------------------------------------------------------------------------------------------------------


def merge(base: ProtoFile, own: ProtoFile, custom: Optional[ProtoFile] = None) -> List[str]:
    """Add AMCT's messages and those of the user to a caffe.proto, in place.

    Args:
        base: A caffe.proto, with AMCT's messages or without.
        own: amct_custom.proto. A message that ``base`` has too gets the fields that it lacks.
        custom: The user's custom.proto.

    Returns:
        Notes for the user.

    Raises:
        MergeError: They conflict; all conflicts are listed.
    """
    if base.message(LAYER) is None:
        raise MergeError([f"{base.source}: not a caffe.proto: it has no message {LAYER}"])
    notes: List[str] = []
    if custom is not None:
        problems = [*_clashes_with_own(custom, own), *_clashing_numbers(custom, base, own)]
        if problems:
            raise MergeError(problems)
        notes = [*_join_layer_fields(base, custom.layer_fields), *_join_types(base, custom)]
    problems = list(_add_own(base, own))
    if problems:
        raise MergeError(problems)
    return notes


def _place(file: ProtoFile, field: Field) -> str:
    return f"{file.source}: {LAYER} field {field.name} = {field.number}"


def _clashes_with_own(custom: ProtoFile, own: ProtoFile) -> Iterator[str]:
    taken = {message.name for message in own.messages if message.name not in EXTENDED}
    for message in custom.messages:
        if message.name in taken:
            yield (
                f"{custom.source}: message {message.name} clashes with AMCT's own message {message.name}: give yours "
                "another name"
            )
    for field in custom.layer_fields:
        if field.label == "required":
            yield f"{_place(custom, field)} is required: no layer without it could be read; write optional"
        for other in own.layer_fields:
            if field.name == other.name or field.number == other.number:
                yield (
                    f"{_place(custom, field)} clashes with AMCT's own field {other.name} = {other.number}: give yours "
                    f"another {'name' if field.name == other.name else 'number'}"
                )


def _clashing_numbers(custom: ProtoFile, base: ProtoFile, own: ProtoFile) -> Iterator[str]:
    numbers_of_own = [field.number for field in own.layer_fields]
    for field in custom.layer_fields:
        for other in base.layer_fields:
            if field.number == other.number and field.name != other.name and other.number not in numbers_of_own:
                yield (
                    f"{_place(custom, field)} has the number of caffe.proto's field {other.name} = {other.number}: "
                    "give yours another number, best one below 5000 that is free"
                )


def _join_layer_fields(base: ProtoFile, fields: List[Field]) -> Iterator[str]:
    layer = base.message(LAYER)
    assert layer is not None, "merge checks it"
    for field in fields:
        other = layer.field(field.name)
        if other is not None:
            layer.fields.remove(other)
            if other.number != field.number:
                yield (
                    f"{LAYER} field {field.name} = {field.number} of the custom proto replaces caffe.proto's "
                    f"{other.name} = {other.number}"
                )
        layer.fields.append(field)


def _join_types(base: ProtoFile, custom: ProtoFile) -> Iterator[str]:
    for message in custom.messages:
        other = base.message(message.name)
        if message.name == LAYER:
            continue
        if other is not None:
            base.messages.remove(other)
            yield f"message {message.name} of the custom proto replaces the one in caffe.proto"
        base.messages.append(message)
    for enum in custom.enums:
        known = [each for each in base.enums if each.name == enum.name]
        for each in known:
            base.enums.remove(each)
            yield f"enum {enum.name} of the custom proto replaces the one in caffe.proto"
        base.enums.append(enum)


def _add_own(base: ProtoFile, own: ProtoFile) -> Iterator[str]:
    for message in own.messages:
        known = base.message(message.name)
        if known is None:
            base.messages.append(message)
            continue
        for field in message.fields:
            taken = [each for each in known.fields if field.name == each.name or field.number == each.number]
            if not taken:
                known.fields.append(field)
            elif (taken[0].name, taken[0].number) != (field.name, field.number):
                yield (
                    f"{base.source}: {message.name} field {taken[0].name} = {taken[0].number} clashes with AMCT's own "
                    f"field {field.name} = {field.number}: this caffe.proto is of a fork that cannot be patched"
                )


def replace_with_backup(path: str, text: str) -> None:
    """Write a file; what it held before is kept beside it with ``.bak`` behind its name."""
    if os.path.exists(path):
        shutil.copyfile(path, path + ".bak")
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def main() -> int:
    """Merge files as the arguments say."""
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description="Merge caffe.proto with AMCT's messages and your custom.proto.")
    parser.add_argument("--custom_proto", help="your .proto file with layers of your own")
    parser.add_argument("--caffe_proto", default=os.path.join(here, "caffe.proto"), help="default: the one beside this")
    parser.add_argument("output", help="the .proto file to write; one that is there is kept as .bak")
    arguments = parser.parse_args()
    try:
        base, own = read_file(arguments.caffe_proto), read_file(os.path.join(here, "amct_custom.proto"))
        custom = read_file(arguments.custom_proto) if arguments.custom_proto else None
        for note in merge(base, own, custom):
            print(f"[INFO]{note}")
        replace_with_backup(arguments.output, to_text(base))
    except (OSError, UnicodeDecodeError, ProtoError, MergeError) as error:
        for line in str(error).splitlines():
            print(f"[ERROR]{line}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
