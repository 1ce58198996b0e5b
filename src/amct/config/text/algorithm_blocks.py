"""The algorithm in a block of a simple config, with the given values and their positions."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct.config.checks import check_settings
from amct.config.precedence import DEFAULT, Level, Origin
from amct.errors import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.config.precedence import Choice
    from amct.config.problems import ProblemList
    from amct.config.registry import Algorithm
    from amct.schema import TextMessage


@dataclass(frozen=True, kw_only=True)
class AlgorithmBlock:
    """One algorithm with the values that a file sets.

    Attributes:
        algorithm: The chosen algorithm; the first one of its kind if the block names none.
        given: The JSON keys that the file sets, with their JSON values.
        positions: The position of each of these values.
        origin: The origin of the whole block.
        position: The position of the algorithm's name; None if the block names none.
    """

    algorithm: Algorithm
    given: Mapping[str, Any]
    positions: Mapping[str, Position]
    origin: Origin
    position: Position | None = None

    def value(self, key: str) -> Any:  # noqa: ANN401  a JSON value
        """The value of a JSON key, or its built-in default."""
        return self.given[key] if key in self.given else self.algorithm.default_of(key)

    def origin_of(self, key: str) -> Origin:
        """The origin of the value of a JSON key."""
        return Origin(self.origin.level, self.positions[key]) if key in self.given else DEFAULT

    def origins(self, prefix: str, name_key: str | None) -> dict[str, Origin]:
        """The origin of each value, by its dotted key below ``prefix``; ``name_key`` holds the algorithm's name."""
        origins = {f"{prefix}.{key}": self.origin_of(key) for key in self.algorithm.setting_keys(name_key)}
        if name_key is not None and self.position is not None:
            origins[f"{prefix}.{name_key}"] = Origin(self.origin.level, self.position)
        return origins

    def write(
        self,
        prefix: str,
        name_key: str,
        origins: dict[str, Origin],
        changed: Mapping[str, Any],
        **values: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """The JSON block in written order; ``origins`` collects the origin of each value.

        Args:
            prefix: The key of the block in the layer's JSON.
            name_key: The key that holds the algorithm's name.
            origins: By dotted key.
            changed: By dotted key, values replaced by a rule of the layer type; keys of other blocks are ignored.
            values: Values that replace given values or defaults.
        """
        own = {key.partition(".")[2]: value for key, value in changed.items() if key.startswith(f"{prefix}.")}
        origins |= self.origins(prefix, name_key)
        origins |= {f"{prefix}.{key}": Origin(Level.RULE, self.positions.get(key)) for key in own}
        return self.to_json(name_key, **{**values, **own})

    def to_json(self, name_key: str | None, **changed: Any) -> dict[str, Any]:  # noqa: ANN401  JSON values
        """The JSON block in written order.

        Args:
            name_key: The key that holds the algorithm's name, or None if the dialect has none.
            changed: Values that replace given values or defaults.
        """
        block: dict[str, Any] = {}
        for key in self.algorithm.keys:
            if key == name_key:
                block[key] = self.algorithm.name
            elif key in changed:
                block[key] = changed[key]
            elif key not in self.algorithm.optional or key in self.given:
                block[key] = self.value(key)
        return block


_PARTS = {"acts_quant_algo": "activations", "wts_quant_algo": "weights"}
"""The fields of a ``LayerConfig`` that correspond to the oneofs of a ``.cfg``."""
_TRUE_WHERE_POSSIBLE = frozenset({"channel_wise", "asymmetric"})
"""Settings that are true by default if the layer supports them: only false counts as given."""


def read_algorithm(choice: Choice, oneof: str, algorithms: tuple[Algorithm, ...]) -> AlgorithmBlock:
    """The algorithm that a block chooses in a oneof (the last one in the file), or that a ``QuantConfig`` entry has."""
    if choice.entry is not None:
        part = _PARTS[oneof]
        return _typed_block(getattr(choice.entry, part), part, choice.origin, algorithms)
    block = choice.block
    chosen = block.which(oneof) if block is not None else None
    if block is None or chosen is None:
        return AlgorithmBlock(algorithm=algorithms[0], given={}, positions={}, origin=choice.origin)
    algorithm = next(item for item in algorithms if item.message == chosen)
    message: TextMessage = block.get(chosen)
    given: dict[str, Any] = {}
    positions: dict[str, Position] = {}
    for key in algorithm.keys:
        found = [_find(message, field) for field in algorithm.cfg_fields.get(key, (key,))]
        first = next((item for item in found if item is not None), None)
        if first is not None:
            given[key] = _value(algorithm, key, found)
            positions[key] = first[0].where(first[1])
    return AlgorithmBlock(
        algorithm=algorithm, given=given, positions=positions, origin=choice.origin, position=block.where(chosen)
    )


def _typed_block(settings: object, part: str, origin: Origin, algorithms: tuple[Algorithm, ...]) -> AlgorithmBlock:
    """Convert a settings object, whose class is already checked, to a block."""
    algorithm = next((each for each in algorithms if type(settings) is each.settings), algorithms[0])
    if settings is None:
        return AlgorithmBlock(algorithm=algorithm, given={}, positions={}, origin=origin)
    values = {key: getattr(settings, algorithm.field_of(key), None) for key in algorithm.keys}
    given = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if value is not None and not (value is True and algorithm.field_of(key) in _TRUE_WHERE_POSSIBLE)
    }
    place = f"{origin.position.source if origin.position else ''}.{part}"
    return AlgorithmBlock(
        algorithm=algorithm,
        given=given,
        positions={key: Position(f"{place}.{algorithm.field_of(key)}") for key in given},
        origin=origin,
        position=Position(place),
    )


def _find(message: TextMessage, field: str) -> tuple[TextMessage, str] | None:
    """The message that contains a field and the field's name there; None if the file does not set it.

    A dot separates an inner message from its field. JSON keys without a ``.cfg`` field are never set.
    """
    *outer, name = field.split(".")
    for step in outer:
        if not message.has(step):
            return None
        message = message.get(step)
    is_set = name in message.descriptor.fields_by_name and message.has(name)
    return (message, name) if is_set else None


def _value(algorithm: Algorithm, key: str, found: list[tuple[TextMessage, str] | None]) -> Any:  # noqa: ANN401  JSON
    if len(found) == 1:
        assert found[0] is not None
        message, name = found[0]
        if message.table.fields[name].repeated:
            return message.all(name)
        value = message.get(name)
        if key == "num_bits" and name == "dst_type":
            return int(value.removeprefix("INT"))
        return _as_float32(value) if key in algorithm.float32 else value
    defaults = algorithm.default_of(key)
    return [default if item is None else item[0].get(item[1]) for item, default in zip(found, defaults, strict=True)]


def _as_float32(value: float) -> float:
    """Round a number to float32: 6.1 becomes 6.099999904632568."""
    held: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return held


def check_block(block: AlgorithmBlock, name_key: str | None, problems: ProblemList) -> None:
    """Report values of a block that are out of range for every layer."""
    algorithm = block.algorithm
    values = {
        algorithm.field_of(key): block.value(key) for key in algorithm.setting_keys(name_key) if key in block.given
    }
    keys = {algorithm.field_of(key): key for key in block.given}
    check_settings(
        algorithm.settings,
        values,
        lambda path: block.positions.get(keys.get(str(path[0]), ""), block.position) if path else block.position,
        problems,
        block=algorithm.message,
    )
