"""Which block of a config applies to a layer, and its position in the file.

An override replaces the block of ``common_config`` as a whole and inherits nothing from it. The order is
layer > type > common > built-in default. ``Origin`` records the block that applies, so that every effective setting
can be traced to its line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from amct.config.layers import LayerInfo
    from amct.config.problems import ProblemList
    from amct.config.settings import LayerConfig
    from amct.errors import Position
    from amct.schema import TextMessage


class Level(Enum):
    """The kind of origin of a setting; the value is its text in messages."""

    LAYER = "override of this layer"
    TYPE = "override of this layer type"
    COMMON = "common block"
    GLOBAL = "global field"
    ARGUMENT = "argument of the call"
    FILE = "config file"  # a full JSON config, where every layer has its own block
    RULE = "rule of the layer type"
    DEFAULT = "built-in default"


@dataclass(frozen=True)
class Origin:
    """The level and position of the origin of a setting."""

    level: Level
    position: Position | None = None

    def __str__(self) -> str:
        return f"{self.level.value} ({self.position})" if self.position else self.level.value


DEFAULT = Origin(Level.DEFAULT)


@dataclass(frozen=True)
class Choice:
    """The block that applies to a layer, and its origin: from a file, from a ``QuantConfig``, or only defaults."""

    block: TextMessage | None
    origin: Origin
    entry: LayerConfig | None = None


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """All blocks of a simple config."""

    common: Choice = Choice(None, DEFAULT)
    by_type: Mapping[str, Choice] = field(default_factory=dict)
    by_layer: Mapping[str, Choice] = field(default_factory=dict)

    def choose(self, layer: LayerInfo) -> Choice:
        """The block of the layer, else of its type, else the common one, else none."""
        return self.by_layer.get(layer.name) or self.by_type.get(layer.type) or self.common

    def all(self) -> Iterable[Choice]:
        """Every block of the file once: common, types, layers."""
        yield self.common
        yield from self.by_type.values()
        yield from self.by_layer.values()


def read_common(message: TextMessage, name: str) -> Choice:
    """The common block of a simple config, such as its ``common_config``."""
    if not message.has(name):
        return Choice(None, DEFAULT)
    return Choice(message.get(name), Origin(Level.COMMON, message.where(name)))


def read_overrides(
    entries: Iterable[TextMessage], key: str, block_field: str | None, problems: ProblemList
) -> dict[str, Choice]:
    """The overrides of a simple config by layer name or type; a repeated name is a mistake.

    Args:
        entries: The repeated override messages.
        key: ``layer_name`` or ``layer_type``.
        block_field: The field that holds the block; None: the entry itself is the block (retraining).
        problems: Collects the repeated names.
    """
    level = Level.LAYER if key == "layer_name" else Level.TYPE
    chosen: dict[str, Choice] = {}
    for entry in entries:
        name = entry.get(key)
        if name in chosen:
            first = chosen[name].origin.position
            where = f" (first in line {first.line})" if first else ""
            problems.add(f'{key} "{name}" is overridden more than once{where}. Keep one override.', entry.where(key))
        else:
            chosen[name] = Choice(entry.get(block_field) if block_field else entry, Origin(level, entry.position))
    return chosen
