"""Checks the values of a config, and collects all its mistakes so that they are reported together.

A reader creates one ``ProblemList``, passes it to the functions it calls, and calls ``raise_all`` at the end.
pydantic checks the type and range of every field by the annotations in ``amct.numerics.settings``. It has no lines and
columns, so the caller passes a function that maps a path inside a block to a position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from amct.errors import ConfigError, ConfigTypeError, Position, Problem, did_you_mean
from amct.numerics.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SUGGESTIONS = 20
MAX_NAME_LENGTH = 200


class ProblemList:
    """The mistakes and the warnings found so far in one file."""

    def __init__(self) -> None:
        self._mistakes: dict[Problem, None] = {}  # a dict as an ordered set
        self._warnings: dict[tuple[str, Position | None], list[str]] = {}  # the affected layers of each warning
        self._wrong_type = False
        self._suggestions = 0

    def add(self, message: str, position: Position | None = None) -> None:
        """Add a mistake; the same mistake at the same position is added once."""
        self._mistakes[Problem(message, position)] = None

    def add_wrong_type(self, message: str, position: Position | None = None) -> None:
        """Add a value of the wrong type; the final error is then also a ``TypeError``."""
        self._wrong_type = True
        self.add(message, position)

    def add_unknown(self, what: str, name: str, known: Iterable[str], position: Position | None = None) -> None:
        """Add an unknown name, with a suggestion of the nearest known one."""
        self.add(f'{what} "{shorten(name)}" is unknown.{self.nearest(name, known)}', position)

    def nearest(self, name: str, known: Iterable[str]) -> str:
        """A sentence that suggests the nearest known name, or an empty string.

        Comparing names is slow, so only the first unknown names of a file get suggestions.
        """
        if self._suggestions >= MAX_SUGGESTIONS or len(name) > MAX_NAME_LENGTH:
            return ""
        self._suggestions += 1
        return did_you_mean(name, known)

    def extend(self, problems: Iterable[Problem]) -> None:
        """Add mistakes found elsewhere, such as the repeated keys of ``JsonDocument``."""
        self._mistakes.update(dict.fromkeys(problems))

    def warn(self, message: str, position: Position | None = None) -> None:
        """Add a warning; the same warning at the same position is added once."""
        self._warnings.setdefault((message, position), [])

    def warn_all(self, warnings: Iterable[Problem]) -> None:
        """Add warnings found elsewhere."""
        for warning in warnings:
            self.warn(warning.message, warning.position)

    def adjust(self, layer: str, message: str, position: Position | None, *, anywhere: bool = False) -> None:
        """Warn that a layer does not support the setting at ``position``; all such layers share one warning.

        With ``anywhere`` layers with different positions share it too; the first position is shown.
        """
        same = (key for key, layers in self._warnings.items() if anywhere and layers and key[0] == message)
        self._warnings.setdefault(next(same, (message, position)), []).append(layer)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The warnings so far, in the order they were found."""
        return tuple(
            Problem(f"{message}: {', '.join(layers)}" if layers else message, position)
            for (message, position), layers in self._warnings.items()
        )

    def __bool__(self) -> bool:
        return bool(self._mistakes)

    def raise_all(self) -> None:
        """Raise one error that lists all mistakes in file order; return if there are none.

        Raises:
            ConfigTypeError: At least one value has the wrong type.
            ConfigError: All other mistakes.
        """
        if not self._mistakes:
            return
        ordered = sorted(self._mistakes, key=_place)
        raise (ConfigTypeError if self._wrong_type else ConfigError).from_problems(ordered)


def _place(problem: Problem) -> tuple[str, int, int]:
    position = problem.position
    return (position.source, position.line, position.column) if position else ("", 0, 0)


def shorten(value: object, limit: int = 60) -> str:
    """Format a value for a message; long text is shortened."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


Settings = TypeVar("Settings")
Path = tuple[str | int, ...]
Locate = Callable[[Path], Position | None]

_WRONG_TYPE = {
    "int_type": "an integer",
    "float_type": "a number",
    "decimal_type": "a number with a decimal point",
    "bool_type": "true or false",
    "string_type": "a string in double quotes",
    "tuple_type": "a list of two numbers",
    "list_type": "a list",
    "dict_type": "an object in braces",
    "dataclass_type": "an object in braces",
}
_OUT_OF_RANGE = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def check_settings(
    settings: Callable[..., Settings],
    values: Mapping[str, Any],
    locate: Locate,
    problems: ProblemList,
    *,
    block: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
) -> Settings | None:
    """Convert the values of one block to a settings object.

    Args:
        settings: A dataclass whose annotations give types and ranges; fields not in ``values`` take its defaults.
        values: The block, by the names of the dataclass fields.
        locate: Returns the position of the value at a path inside the block.
        problems: Collects every mistake.
        block: The name of the block in messages, such as ``conv1.weight_quant_params``.
        names: The names of fields in the file, if they differ.

    Returns:
        The settings, or None if the block has a mistake, which is then in ``problems``.
    """
    try:
        checked: Settings = _adapter(settings).validate_python(dict(values))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            first, *rest = detail["loc"] or ("",)
            spelled = _spell((names.get(str(first), first), *rest))
            name = ".".join(part for part in (block, spelled) if part)
            _report(settings, detail, locate, problems, name)
        return None
    return checked


def checked_settings(settings: Callable[..., Settings], values: Mapping[str, Any], *, block: str = "") -> Settings:
    """Convert values without positions to a settings object.

    Raises:
        ConfigError: a value is invalid; all mistakes are listed.
    """
    problems = ProblemList()
    checked = check_settings(settings, values, nowhere, problems, block=block)
    problems.raise_all()
    assert checked is not None
    return checked


def nowhere(_: Path) -> None:
    """The position of values that come from no file."""


@cache
def _adapter(settings: Callable[..., Any]) -> TypeAdapter[Any]:
    assert isinstance(settings, type)
    return TypeAdapter(settings)


def _report(
    settings: Callable[..., Any], detail: Mapping[str, Any], locate: Locate, problems: ProblemList, name: str
) -> None:
    path, context = tuple(detail["loc"]), detail.get("ctx", {})
    kind = str(detail["type"]).replace("_parsing", "_type").replace("int_from_float", "int_type")
    given = detail["input"]
    if kind == "value_error" and isinstance(context.get("error"), SettingsError):
        broken: SettingsError = context["error"]
        problems.add(f"{name}: {broken}" if name else str(broken), locate((broken.field,)))
    elif kind == "unexpected_keyword_argument":
        nearest = problems.nearest(str(path[-1]), _defaults(settings))
        problems.add(f'the key "{shorten(name)}" is unknown.{nearest}', locate(path))
    elif kind == "too_long" or (kind == "missing" and isinstance(path[-1], int)):
        problems.add_wrong_type(f"{name.partition('[')[0]} must be {_WRONG_TYPE['tuple_type']}", locate(path[:1]))
    elif kind in _WRONG_TYPE:
        expected = "list_type" if kind == "tuple_type" and _defaults(settings).get(str(path[0])) == () else kind
        problems.add_wrong_type(f"{name} must be {_WRONG_TYPE[expected]}, got {show(given)}", locate(path))
    elif kind in _OUT_OF_RANGE:
        words, key = _OUT_OF_RANGE[kind]
        problems.add(f"{name} must be {words} {context[key]:g}, got {show(given)}", locate(path))
    elif kind == "literal_error":
        message = f"{name} must be {context['expected']}, got {show(given)}"
        same_type = type(given) is type(_defaults(settings)[str(path[0])])
        report = problems.add if same_type else problems.add_wrong_type
        report(message, locate(path))
    else:
        problems.add(f"{name}: {detail['msg']}, got {show(given)}", locate(path))


def _defaults(settings: Callable[..., Any]) -> dict[str, Any]:
    """The fields of a settings class with their defaults."""
    assert isinstance(settings, type)
    return {field.name: field.default for field in dataclasses.fields(settings)}


def _spell(path: Path) -> str:
    """Format a path: ``search_range[0]``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


def show(value: object) -> str:
    """Format a value as JSON, shortened if long: ``true``, ``"two"``, ``1.5``, ``an object``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, str):
        return f'"{shorten(value)}"'
    if isinstance(value, Mapping):
        return "an object"
    return shorten(value)
