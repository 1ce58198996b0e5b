"""Conversion between protobuf messages and records of the PyTorch dialect."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from amct.errors import Problem, RecordParseError
from amct.record.layers import KvCacheRecord, LayerRecord
from amct.record.messages import EntryReader, Positions, fill_message, message_error, set_fields
from amct.record.prune import Attribute, AttributeValue, PruneNode, PruneRecord, onnx_type
from amct.record.records import Record
from amct.schema import message_class

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from amct.errors import Position
    from amct.record.prune import AttributeType

MESSAGE = "AMCTPytorchProto.ScaleOffsetRecord"

_LAYER_FIELDS = tuple(field.name for field in fields(LayerRecord))
_SLOTS: dict[AttributeType, str] = {
    "FLOAT": "f",
    "INT": "i",
    "STRING": "s",
    "FLOATS": "floats",
    "INTS": "ints",
    "STRINGS": "strings",
}


def record_from_message(message: Any, source: str, positions: Positions) -> Record:  # noqa: ANN401 - generated class
    """Convert a message to a record.

    Raises:
        RecordParseError: An entry has no key or no value, or the value of an attribute contradicts its type.
    """
    layers: dict[str, LayerRecord] = {}
    kv_cache: dict[str, KvCacheRecord] = {}
    reader = EntryReader(positions, list(positions.warnings), [])
    for name, part, content, _ in reader.entries(message, "value", "kv_cache_value"):
        if part == "value":
            layers[name] = _layer(name, content, positions, reader.warnings)
        else:
            kv_cache[name] = KvCacheRecord(**set_fields(content, ("scale", "offset")))
    problems = reader.problems
    prune = tuple(_prune(chain, positions.prune(index), problems) for index, chain in enumerate(message.prune_record))
    if problems:
        raise RecordParseError.from_problems(problems)
    return Record(
        layers,
        kv_cache,
        prune,
        order=tuple(dict.fromkeys(entry.key for entry in message.record)),
        source=source,
        warnings=tuple(reader.warnings),
        positions=positions.fields,
    )


def record_to_message(record: Record) -> Message:
    """Convert a record to a message.

    Raises:
        RecordValueError: A number does not fit its field.
    """
    message: Any = message_class(MESSAGE, schema="pytorch")()
    for name in record.names:
        with message_error(f'layer "{name}"'):
            entry = message.record.add(key=name)
            if name in record.layers:
                entry.value.SetInParent()
                fill_message(entry.value, record.layers[name], _LAYER_FIELDS)
            if name in record.kv_cache:
                entry.kv_cache_value.SetInParent()
                fill_message(entry.kv_cache_value, record.kv_cache[name], ("scale", "offset"))
    for chain in record.prune:
        target = message.prune_record.add()
        for node in chain.producers:
            _fill_node(target.producer.add(), node)
        for node in chain.consumers:
            _fill_node(target.consumer.add(), node)
        if chain.selective is not None:
            _fill_node(target.selective_prune, chain.selective)
    return message  # type: ignore[no-any-return]  # generated class


def _layer(name: str, value: Any, positions: Positions, warnings: list[Problem]) -> LayerRecord:  # noqa: ANN401 - generated class
    content = set_fields(value, _LAYER_FIELDS)
    dst_type = content.get("dst_type")
    for own in ("act_type", "wts_type"):
        if dst_type is not None and content.get(own, dst_type) != dst_type:
            message = f'layer "{name}": dst_type {dst_type} overrides {own} {content[own]}'
            warnings.append(Problem(message, positions.field(name, own)))
            content[own] = dst_type
    return LayerRecord(**content)


def _prune(chain: Any, where: Position | None, problems: list[Problem]) -> PruneRecord:  # noqa: ANN401 - generated class
    return PruneRecord(
        producers=tuple(_node(node, where, problems) for node in chain.producer),
        consumers=tuple(_node(node, where, problems) for node in chain.consumer),
        selective=_node(chain.selective_prune, where, problems) if chain.HasField("selective_prune") else None,
    )


def _node(node: Any, where: Position | None, problems: list[Problem]) -> PruneNode:  # noqa: ANN401 - generated class
    attributes = []
    for message in node.attr:
        kind = _attribute_type(message)
        mistake = _attribute_mistake(message, kind)
        if mistake:
            problems.append(Problem(f'node "{node.name}": attribute "{message.name}" {mistake}', where))
            continue
        value = _value(message, kind)
        if message.name == "type" and isinstance(value, str):
            value = onnx_type(value)
        attributes.append(Attribute(name=message.name, type=kind, value=value))
    return PruneNode(name=node.name, attributes=tuple(attributes))


def _attribute_type(message: Any) -> AttributeType:  # noqa: ANN401 - generated class
    """Return the declared type of an attribute, or the type of its value if none is declared."""
    if message.HasField("type"):
        names: dict[int, AttributeType] = {number: name for name, number in message.AttrType.items()}
        return names[message.type]
    return next((kind for kind, slot in _SLOTS.items() if _is_set(message, slot)), "UNDEFINED")


def _attribute_mistake(message: Any, kind: AttributeType) -> str:  # noqa: ANN401 - generated class
    present = [other for other, slot in _SLOTS.items() if _is_set(message, slot)]
    scalar_missing = kind in ("FLOAT", "INT", "STRING") and kind not in present
    if not scalar_missing and all(other == kind for other in present):
        return ""
    found = " and ".join(_SLOTS[other] for other in present) or "no value"
    return f"is of type {kind} but has {found}"


def _is_set(message: Any, slot: str) -> bool:  # noqa: ANN401 - generated class
    return bool(getattr(message, slot)) if slot.endswith("s") and slot != "s" else bool(message.HasField(slot))


def _value(message: Any, kind: AttributeType) -> AttributeValue:  # noqa: ANN401 - generated class
    if kind == "UNDEFINED":
        return None
    raw = getattr(message, _SLOTS[kind])
    if kind == "STRING":
        return _text(raw)
    if kind == "STRINGS":
        return tuple(_text(item) for item in raw)
    return tuple(raw) if kind in ("FLOATS", "INTS") else raw


def _fill_node(target: Any, node: PruneNode) -> None:  # noqa: ANN401 - generated class
    target.name = node.name
    for attribute in node.attributes:
        with message_error(f'node "{node.name}", attribute "{attribute.name}"'):
            message = target.attr.add(name=attribute.name, type=attribute.type)
            if attribute.type == "UNDEFINED":
                continue
            slot, value = _SLOTS[attribute.type], attribute.value
            if isinstance(value, tuple):
                getattr(message, slot).extend(_bytes(item) if isinstance(item, str) else item for item in value)
            else:
                setattr(message, slot, _bytes(value) if isinstance(value, str) else value)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
