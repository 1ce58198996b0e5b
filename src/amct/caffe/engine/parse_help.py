"""Adds to mistakes in a prototxt the line and layer they are in, and what can be done about other Caffe forks."""

from __future__ import annotations

import re
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from amct.errors import ModelError, ParseError, Position

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from amct.errors import Problem

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
def located_in(prototxt: str | os.PathLike[str]) -> Iterator[None]:
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


def _position_of(name: str, prototxt: str | os.PathLike[str]) -> Position | None:
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
        "it, remove it; else describe its message in a custom.proto (custom_proto=..., --custom-proto), or register "
        f'the layer with its parameters: amct.extend.register_caffe_layer("{layer.type}", parameters=...).',
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
