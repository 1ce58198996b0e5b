"""Lists of layer names and layer types in a config; reports repeated, unknown and unsuitable names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.config.precedence import Level, Origin
from amct.config.problems import shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from amct.config.layers import LayerInfo, LayerList
    from amct.config.precedence import Choice
    from amct.config.problems import ProblemList
    from amct.errors import Position
    from amct.schema import TextMessage


@dataclass(frozen=True)
class Named:
    """A name in a list, and its position (None for a function argument)."""

    name: str
    position: Position | None = None


class SkipList:
    """The layers and types that a config switches off, with the position of each."""

    def __init__(self, layers: Iterable[Named] = (), types: Iterable[Named] = ()) -> None:
        self._origins: dict[tuple[str, str], Origin] = {}
        for kind, names in (("layer", layers), ("type", types)):
            for named in names:
                level = Level.GLOBAL if named.position else Level.ARGUMENT
                self._origins.setdefault((kind, named.name), Origin(level, named.position))

    def find(self, layer: LayerInfo) -> Origin | None:
        """The entry that switches off a layer or its type; None if it is on."""
        return self._origins.get(("layer", layer.name)) or self._origins.get(("type", layer.type))


def named(choices: Mapping[str, Choice]) -> tuple[Named, ...]:
    """The names of overrides, with their positions."""
    return tuple(Named(name, choice.origin.position) for name, choice in choices.items())


def read_names(message: TextMessage, field: str) -> tuple[Named, ...]:
    """The names of a repeated string field, in file order."""
    return tuple(Named(name, message.where(field, index)) for index, name in enumerate(message.all(field)))


def without_repeats(
    names: Iterable[Named], field: str, problems: ProblemList, *, only_warn: bool = False
) -> tuple[Named, ...]:
    """Each name once; a repeated name is a mistake, or a warning with ``only_warn``."""
    kept: dict[str, Named] = {}
    for named in names:
        if named.name in kept:
            message = f'"{shorten(named.name)}" is repeated in {field}. Name it once.'
            (problems.warn if only_warn else problems.add)(message, named.position)
        kept.setdefault(named.name, named)
    return tuple(kept.values())


def check_layer_names(
    names: Iterable[Named],
    field: str,
    layers: LayerList,
    types: Collection[str],
    problems: ProblemList,
    *,
    verb: str = "quantized",
) -> None:
    """Report names that are not in the model and layers whose type cannot be ``verb``."""
    for named in names:
        layer = layers.find(named.name)
        if layer is None:
            problems.add_unknown(f"{field}: the layer", named.name, layers.names, named.position)
        elif layer.type not in types:
            problems.add(
                f'{field}: the layer "{layer.name}" is of type {layer.type}, which cannot be {verb}.{_listing(types)}',
                named.position,
            )


def check_type_names(
    names: Iterable[Named], field: str, types: Collection[str], problems: ProblemList, *, verb: str = "quantized"
) -> None:
    """Report layer types that cannot be ``verb``."""
    for named in names:
        if named.name not in types:
            hint = problems.nearest(named.name, types) or _listing(types)
            problems.add(f'{field}: the layer type "{shorten(named.name)}" cannot be {verb}.{hint}', named.position)


def _listing(types: Collection[str]) -> str:
    """The types that a user can choose from, if they are few enough to list."""
    return f" Types that can: {', '.join(types)}." if len(types) <= 12 else ""
