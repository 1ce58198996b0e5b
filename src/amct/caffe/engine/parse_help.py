"""Adds to mistakes in a prototxt the layer they are in, and what can be done about messages of other Caffe forks."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from amct.errors import ParseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amct.errors import Problem

_TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\n\\])*"|'(?:\\.|[^'\n\\])*'|\w+|[{}:]""")
_UNKNOWN = re.compile(r"(?:V1)?LayerParameter has no field \W?(\w+_param)\b")


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


def _explained(problem: Problem, layers: list[_LayerText]) -> Problem:
    line = problem.position.line if problem.position is not None else 0
    layer = next((each for each in layers if each.first <= line <= each.last), None)
    if layer is None:
        return problem
    message = f'{problem.message} It is in layer "{layer.name}" of type "{layer.type}"'
    unknown = _UNKNOWN.match(problem.message)
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
