"""The algorithm in one block of a config, with the given values and their positions.

A block stands in a simple config (``.cfg``), in a full JSON config, or is part of a Python object.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amct.config.checks import check_settings, show
from amct.config.json_reader import JsonNode, read_json
from amct.config.registry import find_algorithm
from amct.config.simple_config import DEFAULT, Level, Named, Origin, check_layer_names, without_repeats
from amct.errors import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from amct.config.checks import ProblemList, Settings
    from amct.config.layers import LayerInfo, LayerList
    from amct.config.registry import Algorithm
    from amct.config.simple_config import Choice
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
    given: Mapping[str, Any] = field(default_factory=dict)
    positions: Mapping[str, Position] = field(default_factory=dict)
    origin: Origin = DEFAULT
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


_PARTS = {
    "acts_quant_algo": "activations",
    "wts_quant_algo": "weights",
    "RetrainDataAlgorithm": "activations",
    "RetrainWeightAlgorithm": "weights",
    "filter_prune_algo": "prune",
    "n_out_of_m_prune_algo": "prune",
}
"""The fields of a ``LayerConfig`` or ``RetrainEntry`` that correspond to the oneofs of a ``.cfg``."""
_TRUE_WHERE_POSSIBLE = frozenset({"channel_wise", "asymmetric"})
"""Settings that are true by default if the layer supports them: only false counts as given."""


def read_algorithm(choice: Choice, oneof: str, algorithms: tuple[Algorithm, ...]) -> AlgorithmBlock:
    """The algorithm that a block chooses in a oneof (the last one in the file), or that a Python object has."""
    if choice.entry is not None:
        part = _PARTS[oneof]
        return _typed_block(getattr(choice.entry, part), part, choice.origin, algorithms)
    block = choice.block
    chosen = block.which(oneof) if block is not None else None
    if block is None or chosen is None:
        return AlgorithmBlock(algorithm=algorithms[0], origin=choice.origin)
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
        return AlgorithmBlock(algorithm=algorithm, origin=origin)
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


def read_json_object(data: str | bytes, source: str, problems: ProblemList) -> JsonNode:
    """Read a JSON file whose top level is an object; repeated keys are reported.

    Raises:
        ParseError: The file is not JSON.
        ConfigTypeError: Its top level is not an object.
    """
    document = read_json(data, source)
    problems.extend(document.problems)
    if not is_object(document.root, "the config", problems):
        problems.raise_all()
    return document.root


def is_object(node: JsonNode, what: str, problems: ProblemList) -> bool:
    """Whether a node is an object; a problem is added if it is not."""
    if not node.is_object:
        problems.add_wrong_type(f"{what} must be an object in braces, got {show(node.plain())}", node.position)
    return node.is_object


def known_members(node: JsonNode, known: Collection[str], what: str, problems: ProblemList) -> Mapping[str, JsonNode]:
    """The members of an object whose keys are known; the others are reported with the nearest known key."""
    members = {}
    for key, member in node.value.items():
        if key in known:
            members[key] = member
        else:
            problems.add_unknown(f"{what}: the key", key, known, member.key_position)
    return members


def read_bool(members: Mapping[str, JsonNode], key: str, default: bool, what: str, problems: ProblemList) -> bool:
    """Read a boolean member; any other value is reported."""
    if key not in members:
        return default
    value = members[key].value
    if isinstance(value, bool):
        return value
    problems.add_wrong_type(
        f"{what}.{key} must be true or false, got {show(members[key].plain())}", members[key].position
    )
    return default


def check_members(
    settings: Callable[..., Settings],
    members: Mapping[str, JsonNode],
    problems: ProblemList,
    *,
    block: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
) -> Settings | None:
    """Convert members of an object, by settings field, to settings; see ``check_settings``."""

    def locate(path: tuple[str | int, ...]) -> Position | None:
        first = members.get(str(path[0])) if path else None
        return first.at(path[1:]).position if first is not None else None

    values = {key: node.plain() for key, node in members.items()}
    return check_settings(settings, values, locate, problems, block=block, names=names)


def read_algorithm_block(
    node: JsonNode,
    algorithms: tuple[Algorithm, ...],
    name_key: str | None,
    what: str,
    problems: ProblemList,
) -> AlgorithmBlock | None:
    """The algorithm of a JSON block with the values that the block sets; None if it has no known algorithm.

    Args:
        node: The block.
        algorithms: The algorithms it may name; the first one is the default.
        name_key: The key that names the algorithm, or None if there is only one.
        what: The name of the block in messages, such as ``conv1.weight_quant_params``.
        problems: Collects every mistake of the block.
    """
    if not is_object(node, what, problems):
        return None
    algorithm = _chosen(node, algorithms, name_key, what, problems)
    if algorithm is None:
        return None
    given: dict[str, Any] = {}
    nodes: dict[str, JsonNode] = {}
    for key, member in node.value.items():
        if key == name_key:
            continue
        if key in algorithm.keys:
            given[key], nodes[key] = member.plain(), member
        else:
            _report_foreign(key, member, algorithm, algorithms, what, problems)
    fields = {algorithm.field_of(key): node for key, node in nodes.items()}
    names = {algorithm.field_of(key): key for key in nodes}
    if check_members(algorithm.settings, fields, problems, block=what, names=names) is None:
        # The caller checks the layer type next, with the values of correct type only.
        given = {key: value for key, value in given.items() if type(value) is type(algorithm.default_of(key))}
    return AlgorithmBlock(
        algorithm=algorithm,
        given=given,
        positions={key: member.position for key, member in nodes.items()},
        origin=Origin(Level.FILE, node.key_position),
        position=node.key_position,
    )


def _chosen(
    node: JsonNode, algorithms: tuple[Algorithm, ...], name_key: str | None, what: str, problems: ProblemList
) -> Algorithm | None:
    named = node.value.get(name_key)
    if named is None:
        return algorithms[0]
    algorithm = find_algorithm(algorithms, named.value)
    if algorithm is None:
        names = [item.name for item in algorithms]
        message = f"{what}.{name_key} must be {' or '.join(names)}, got {show(named.plain())}."
        if isinstance(named.value, str):
            problems.add(message + problems.nearest(named.value, names), named.position)
        else:
            problems.add_wrong_type(message, named.position)
    return algorithm


def _report_foreign(
    key: str,
    member: JsonNode,
    algorithm: Algorithm,
    algorithms: tuple[Algorithm, ...],
    what: str,
    problems: ProblemList,
) -> None:
    """Report a key that the algorithm does not support, and the algorithm that does, if any."""
    owner = next((other for other in algorithms if key in other.keys), None)
    if owner is None:
        known = {name for item in algorithms for name in item.keys}
        problems.add_unknown(f"{what}: the key", key, known, member.key_position)
    else:
        problems.add(
            f'{what}: the key "{key}" belongs to {owner.name}, but the block is of {algorithm.name}. Remove it.',
            member.key_position,
        )


def find_layer(
    name: str,
    node: JsonNode,
    model: LayerList,
    types: Collection[str],
    global_keys: tuple[str, ...],
    problems: ProblemList,
    *,
    switch_key: str = "quant_enable",
) -> LayerInfo | None:
    """The layer that a top-level key names; None, with a problem added, if it cannot be quantized.

    The file may name a layer that cannot be quantized if it switches the layer off.
    """
    layer = model.find(name)
    if layer is None:
        problems.add_unknown("the layer or global field", name, (*global_keys, *model.names), node.key_position)
        return None
    if layer.type in types and layer.refusal is None:
        return layer
    switch = node.value.get(switch_key) if node.is_object else None
    if switch is None or switch.value is not False:
        reason = layer.refusal or f"its type {layer.type} is not supported"
        problems.add(f'the layer "{name}" cannot be quantized: {reason}. Remove it.', node.key_position)
    return None


def check_skip_fusion(
    node: JsonNode | None, model: LayerList, fusible_types: Collection[str], problems: ProblemList
) -> None:
    """Report names in ``skip_fusion_layers`` that are repeated, unknown or of a type that is never folded."""
    if node is None or not node.is_list:
        return
    names = [Named(item.value, item.position) for item in node.value if isinstance(item.value, str)]
    unique = without_repeats(names, "skip_fusion_layers", problems)
    check_layer_names(unique, "skip_fusion_layers", model, fusible_types, problems, verb="fused with BatchNorm")
