"""The blocks of a full JSON config: objects with known keys, algorithms and layers."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amct.config.checks import check_settings, show
from amct.config.json.reader import JsonNode, read_json
from amct.config.precedence import Level, Origin
from amct.config.registry import find_algorithm
from amct.config.text.algorithm_blocks import AlgorithmBlock
from amct.config.text.names import Named, check_layer_names, without_repeats

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from amct.config.checks import Settings
    from amct.config.layers import LayerInfo, LayerList
    from amct.config.problems import ProblemList
    from amct.config.registry import Algorithm
    from amct.errors import Position


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
