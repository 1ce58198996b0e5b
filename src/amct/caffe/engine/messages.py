"""The protobuf messages of Caffe, read from prototxt text or binary files.

A mistake in a prototxt names its line and its layer, and says what can be done about fields of other Caffe forks.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from amct.atomic import AnyPath, check_whole
from amct.errors import FileError, ModelError, ParseError, Position
from amct.schema import ExtraField, descriptor, message_class, parse_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amct.caffe.proto_merge import CustomSchema
    from amct.errors import Problem

#: A message of caffe.proto. Its class is created at run time from the descriptor set, so it has no static type.
ProtoMessage: TypeAlias = Any


_extra: tuple[ExtraField, ...] = ()
"""The parameters of layers of extensions, as fields of LayerParameter."""


def add_layer_parameters(field: str, settings: type[Any]) -> None:
    """Give LayerParameter a field for the parameters of a layer of an extension, with the fields of a dataclass.

    Messages made before and after do not mix: call it before any model is read.

    Raises:
        ArgumentError: LayerParameter has that field already.
        ArgumentTypeError: ``settings`` is not a dataclass, or a field has a type that a prototxt cannot hold.
    """
    global _extra
    added = (*_extra, ExtraField(container="caffe.LayerParameter", name=field, settings=settings))
    descriptor("caffe.LayerParameter", schema="caffe", extra=added)
    _extra = added


def remove_layer_parameters(field: str) -> None:
    """Remove a field that ``add_layer_parameters`` added; nothing happens when there is none."""
    global _extra
    _extra = tuple(each for each in _extra if each.name != field)


def layer_extensions() -> tuple[ExtraField, ...]:
    """The fields that ``add_layer_parameters`` added."""
    return _extra


@cache
def _class(name: str, extra: tuple[ExtraField, ...]) -> ProtoMessage:
    return message_class(f"caffe.{name}", schema="caffe", extra=extra)


def new_message(message: str, /, **fields: object) -> ProtoMessage:
    """Make a message of caffe.proto: ``new_message("LayerParameter", name="conv1")``."""
    return _class(message, _extra)(**fields)


def parse_message(text: str, name: str, source: str = "prototxt", schema: CustomSchema | None = None) -> ProtoMessage:
    """Read a message from prototxt text.

    Args:
        text: The prototxt.
        name: The message's name, for example NetParameter.
        source: The name of the text in error messages.
        schema: Messages merged with a user's custom.proto; by default those of this package.

    Raises:
        ParseError: The text is not a prototxt of that message, with line and column.
    """
    found = descriptor(f"caffe.{name}", schema="caffe", extra=_extra) if schema is None else schema.descriptor(name)
    try:
        return parse_text(text, found, source).to_message()
    except ParseError as error:
        raise with_layers_named(error, text) from None


def read_text_file(path: AnyPath) -> str:
    """Read a text file as UTF-8; invalid bytes (in comments) are replaced.

    Raises:
        FileError: There is no such file, or it cannot be read, or the save that writes it was interrupted.
    """
    check_whole(path)
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileError(f"Could not open file {path}: {error.strerror or error}") from error


_custom_messages: ContextVar[CustomSchema | None] = ContextVar("amct_custom_messages", default=None)
"""The messages by which files are read that are given none of their own."""


@contextmanager
def custom_messages(custom_proto: AnyPath) -> Iterator[None]:
    """Read all files inside the ``with`` block with a user's custom.proto, unless they are given another one.

    Raises:
        FileError, ParseError, ConfigError: It cannot be read, is not a .proto file, or conflicts.
    """
    from amct.caffe.proto_merge import load_custom_schema

    token = _custom_messages.set(load_custom_schema(custom_proto))
    try:
        yield
    finally:
        _custom_messages.reset(token)


def read_net_message(path: AnyPath, custom_proto: AnyPath | CustomSchema | None = None) -> ProtoMessage:
    """Read the prototxt of a net.

    Fields that are unknown here are looked up in a ``caffe_pb2.py`` of the Python path.

    Args:
        path: The prototxt.
        custom_proto: A user's custom.proto with further messages, or what was read of it; by default that of
            ``custom_messages``.

    Raises:
        FileError: The file cannot be read.
        ParseError: Its text is not such a message.
    """
    from amct.caffe.proto_merge import compiled_schema, load_custom_schema

    if isinstance(custom_proto, (str, os.PathLike)):
        custom_proto = load_custom_schema(custom_proto)
    schema = custom_proto or _custom_messages.get()
    text = read_text_file(path)
    try:
        return parse_message(text, "NetParameter", str(path), schema)
    except ParseError:
        compiled = compiled_schema() if schema is None else None
        if compiled is None:
            raise
        with suppress(ParseError):
            return parse_message(text, "NetParameter", str(path), compiled)
        raise


_TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\n\\])*"|'(?:\\.|[^'\n\\])*'|\w+|[{}:]""")
_UNKNOWN = re.compile(r"(?:V1)?LayerParameter has no field \W?(\w+_param)\b")
_UNKNOWN_FIELD = re.compile(r"\w+ has no field (?!.*Did you mean)")
_NAMED_LAYER = re.compile(r"""(?:^|[ (])layer (?:"(.+?)"|'(.+?)')""")


@dataclass(frozen=True)
class _LayerText:
    """A layer of a prototxt: its lines, counted from 1, its name and its type."""

    first: int
    last: int
    name: str
    type: str


def with_layers_named(error: ParseError, text: str) -> ParseError:
    """The same error; each mistake also says in which layer it is, and how an unknown ``xxx_param`` can be read."""
    layers = list(_layers(text))
    problems = [_explained(problem, layers) for problem in error.problems]
    named = ParseError.from_problems(problems)
    assert isinstance(named, ParseError)
    return named


@contextmanager
def located_in(prototxt: AnyPath) -> Iterator[None]:
    """Errors that name a layer of this prototxt also say in which line it is.

    A message that names a file already is left as it is: it is about that file.
    """
    try:
        yield
    except ModelError as error:
        message = str(error.args[0])
        found = _NAMED_LAYER.search(message)
        if error.position is not None or found is None or re.match(r"\S+: ", message):
            raise
        position = _position_of(found[1] or found[2], prototxt)
        if position is None:
            raise
        raise type(error)(message, position=position) from error


def _position_of(name: str, prototxt: AnyPath) -> Position | None:
    try:
        text = Path(prototxt).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    line = next((layer.first for layer in _layers(text) if layer.name == name), None)
    return None if line is None else Position(str(prototxt), line, 1)


def _explained(problem: Problem, layers: list[_LayerText]) -> Problem:
    line = problem.position.line if problem.position is not None else 0
    layer = next((each for each in layers if each.first <= line <= each.last), None)
    if layer is None:
        if _UNKNOWN_FIELD.match(problem.message) is None:
            return problem
        return replace(
            problem, message=f"{problem.message} If it is of another Caffe and changes no result, remove it."
        )
    message = f'{problem.message} It is in layer "{layer.name}" of type "{layer.type}"'
    unknown = _UNKNOWN.match(problem.message)
    if unknown is None and _UNKNOWN_FIELD.match(problem.message):
        return replace(problem, message=f"{message}. If it is of another Caffe and changes no result, remove it.")
    if unknown is None:
        return replace(problem, message=f"{message}.")
    return replace(
        problem,
        message=f"{message}: {unknown[1]} belongs to another Caffe than those known here. If the layer runs without "
        "it, remove it; else describe its message in a custom.proto (custom_proto=..., --custom-proto) or a rebuilt "
        "caffe_pb2.py in PYTHONPATH, or register the layer with its parameters, in a module for --import: "
        f'amct.extend.register_caffe_layer("{layer.type}", parameters=...).',
    )


def _layers(text: str) -> Iterator[_LayerText]:
    """The layers of a prototxt, found by its braces only: the text has mistakes."""
    lines = [found.start() for found in re.finditer("\n", text)]
    depth, word, start, key = 0, "", 0, ""
    layer: dict[str, str] | None = None
    for token in _TOKEN.finditer(text):
        value = token[0]
        if value == "{":
            if depth == 0:
                layer = {} if word in ("layer", "layers") else None
            depth += 1
        elif value == "}":
            depth = max(0, depth - 1)
            if depth == 0 and layer is not None:
                first, last = (bisect_left(lines, offset) + 1 for offset in (start, token.start()))
                yield _LayerText(first, last, layer.get("name", ""), layer.get("type", ""))
                layer = None
        elif value == ":":
            key = word
        elif not value.startswith("#"):
            if depth == 1 and layer is not None and key in ("name", "type"):
                layer[key] = value.strip("\"'")
            if depth == 0:
                start = token.start()
            word, key = value, ""
