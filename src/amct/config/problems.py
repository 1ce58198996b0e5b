"""Collects all mistakes of a config file, so that they are reported together.

A reader creates one ``ProblemList``, passes it to the functions it calls, and calls ``raise_all`` at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.errors import ConfigError, ConfigTypeError, Position, Problem, did_you_mean

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
