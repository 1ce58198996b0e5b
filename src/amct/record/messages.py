"""Conversion between protobuf messages and dataclasses, shared by both dialects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct.errors import Position, Problem, RecordValueError

if TYPE_CHECKING:
    from amct.schema import TextMessage


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Positions of the parts of a text file; a binary file has none."""

    entries: Sequence[Position] = ()
    chains: Sequence[Position] = ()
    fields: Mapping[tuple[str, str], Position] = dataclasses.field(default_factory=dict)
    warnings: Sequence[Problem] = ()

    def entry(self, index: int) -> Position | None:
        """Return the position of the ``index``-th entry."""
        return self.entries[index] if self.entries else None

    def field(self, layer: str, name: str) -> Position | None:
        """Return the position of a field of a layer."""
        return self.fields.get((layer, name))

    def prune(self, index: int) -> Position | None:
        """Return the position of the ``index``-th chain."""
        return self.chains[index] if self.chains else None


def positions_of(text: TextMessage) -> Positions:
    """Return the positions of each layer and of the last occurrence of each of its fields."""
    entries: list[TextMessage] = text.all("record")
    fields: dict[tuple[str, str], Position] = {}
    for entry in entries:
        name = entry.get("key", "")
        fields[name, ""] = entry.position
        for part in ("value", "kv_cache_value"):
            block = entry.get(part) if part in entry.table.fields else None
            if block is not None:
                last = {occurrence.name: occurrence for occurrence in block.fields}
                fields.update({(name, key): occurrence.position for key, occurrence in last.items()})
    chains = text.all("prune_record") if "prune_record" in text.table.fields else []
    return Positions(
        entries=[entry.position for entry in entries],
        chains=[chain.position for chain in chains],
        fields=fields,
        warnings=text.warnings,
    )


@dataclass(frozen=True)
class EntryReader:
    """Reads the entries of a record message; problems are collected, so that they are reported together."""

    positions: Positions
    warnings: list[Problem]
    problems: list[Problem]

    def entries(self, message: Any, *parts: str) -> Iterator[tuple[str, str, Any, Position | None]]:  # noqa: ANN401 - generated class
        """Yield layer name, part, content and position of each of an entry's ``parts``; it must have at least one."""
        seen = set()
        for index, entry in enumerate(message.record):
            where = self.positions.entry(index)
            present = [part for part in parts if entry.HasField(part)]
            if not entry.key or not present:
                missing = " or ".join(parts) if entry.key else "key"
                self.problems.append(Problem(f"record number {index + 1} has no {missing}", where))
                continue
            for part in present:
                if (entry.key, part) in seen:
                    self.warnings.append(Problem(f'layer "{entry.key}" is given again; the last entry is used', where))
                seen.add((entry.key, part))
                yield entry.key, part, getattr(entry, part), where


def set_fields(message: Any, names: Mapping[str, str] | Iterable[str]) -> dict[str, Any]:  # noqa: ANN401 - generated class
    """Return the set fields of a message by their names in the dataclass (``names``: file name to dataclass name)."""
    ours = names if isinstance(names, Mapping) else {name: name for name in names}
    present = {descriptor.name: value for descriptor, value in message.ListFields()}
    return {
        ours[name]: value if isinstance(value, int | float | str) else tuple(value)
        for name, value in present.items()
        if name in ours
    }


def fill_message(message: Any, source: object, names: Mapping[str, str] | Iterable[str]) -> None:  # noqa: ANN401 - generated class
    """Set the fields of a message from a dataclass; None, empty tuples and False are left out."""
    ours = names if isinstance(names, Mapping) else {name: name for name in names}
    for name, own in ours.items():
        value = getattr(source, own)
        if isinstance(value, tuple):
            getattr(message, name).extend(value)
        elif value is not None and value is not False:
            setattr(message, name, value)


@contextmanager
def message_error(where: str) -> Iterator[None]:
    """Convert the error for a number that does not fit its field to a ``RecordValueError`` prefixed with ``where``."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise RecordValueError(f"{where}: {error}") from error
