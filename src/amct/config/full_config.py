"""The full config: the content of the JSON file, with the origin of every value.

``FullConfig`` is the step between a simple config (``.cfg``) and a plan. It is created by expanding a simple config for
a model or by reading a JSON file; ``to_json`` writes it with AMCT's keys in AMCT's order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amct.errors import Position, Problem


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


@dataclass(frozen=True, kw_only=True)
class LayerBlock:
    """The JSON block of one layer.

    Attributes:
        name: The layer.
        type: Its type name.
        data: The block as it is written.
        origins: The origin of each value, by its dotted key (``activation_quant_params.num_bits``); an empty key is for
            the whole block, a key that ends in a dot for a part with another origin.
        implied: Effective values that are not written, by their dotted keys.
    """

    name: str
    type: str
    data: dict[str, Any]
    origins: dict[str, Origin] = field(default_factory=dict)
    implied: dict[str, Any] = field(default_factory=dict)

    def origin(self, key: str) -> Origin:
        """The origin of a value; the built-in default if it has none."""
        return self.origins.get(key, DEFAULT)

    def block_origin(self, key: str) -> Origin:
        """The block of the file that applies to a value, whether or not the block sets it."""
        own = self.origins.get(f"{key.partition('.')[0]}.")
        return own or self.origin("")


@dataclass(frozen=True, kw_only=True)
class FullConfig:
    """A whole JSON config: global fields, then layers, both in the order they are written."""

    source: str
    fields: Mapping[str, Any]
    layers: tuple[LayerBlock, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data, in the order it is written."""
        return {**self.fields, **{layer.name: layer.data for layer in self.layers}}

    def to_json(self) -> str:
        """The text of the config file."""
        return format_json(self.to_dict())


@dataclass(frozen=True)
class ExplainedSetting:
    """One effective setting and its origin.

    Attributes:
        layer: The layer, empty for global fields.
        type: Its type.
        key: The dotted key in the JSON.
        value: The effective value.
        origin: The origin of the value.
        block: The block that applies to the layer as a whole. A value that it does not set is a built-in default,
            even if a block of lower precedence sets it.
    """

    layer: str
    type: str
    key: str
    value: Any
    origin: Origin
    block: Origin


def explain(config: FullConfig) -> tuple[ExplainedSetting, ...]:
    """Every effective setting of a config, in file order, with the file and line it comes from."""
    rows = []
    for key, value in _leaves(config.fields):
        origin = config.origins.get(key, DEFAULT)
        rows.append(ExplainedSetting("", "", key, value, origin, origin))
    for layer in config.layers:
        values = [*_leaves(layer.data), *layer.implied.items()]
        rows += [
            ExplainedSetting(layer.name, layer.type, key, value, layer.origin(key), layer.block_origin(key))
            for key, value in values
        ]
    return tuple(rows)


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not an object, by its dotted key; objects in a list are numbered."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for index, item in enumerate(value):
                yield from _leaves(item, f"{prefix}{key}[{index}].")
        else:
            yield f"{prefix}{key}", value


def format_json(data: Mapping[str, Any]) -> str:
    r"""The text of a config file in AMCT's layout, without a newline at the end; keys keep the order of ``data``.

    >>> format_json({"batch_num": 2, "skip_fusion_layers": []})
    '{\n    "batch_num":2,\n    "skip_fusion_layers":[]\n}'
    """
    return json.dumps(data, indent=4, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
