"""Record files: text in the layout of AMCT's documents, and protobuf's binary form, of both dialects.

``.txt`` is text and ``.bin`` is binary; for other names the form is detected from the content. Reading and writing a
text file written by AMCT or by this package reproduces it byte by byte. Older files of the Caffe dialect have the
factors of a single input directly in ``value``: they are read as factors of input 0 and written in ``record_d``.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from amct import atomic
from amct.errors import ParseError, Problem, RecordParseError, RecordValueError
from amct.record.prune import Attribute, PruneNode, PruneRecord, onnx_type
from amct.record.records import (
    AnyRecord,
    CaffeLayerRecord,
    CaffeRecord,
    DataFactors,
    KvCacheRecord,
    LayerRecord,
    Record,
    RecordDialect,
)
from amct.schema import descriptor, format_text, message_class, parse_text, read_binary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from google.protobuf.message import Message

    from amct.atomic import AnyPath
    from amct.errors import Position
    from amct.record.prune import AttributeType, AttributeValue
    from amct.schema import Schema, TextMessage


Form = Literal["text", "binary"]

_RecordT = TypeVar("_RecordT", Record, CaffeRecord)

_MESSAGES: dict[type[AnyRecord], tuple[str, Schema]] = {
    Record: ("AMCTPytorchProto.ScaleOffsetRecord", "pytorch"),
    CaffeRecord: ("AMCTCaffeProto.ScaleOffsetRecord", "caffe_config"),
}
"""The message of a record in each dialect."""

_LAYER_FIELDS = {each.name: each.name for each in fields(LayerRecord)}
_KV_FIELDS = {"scale": "scale", "offset": "offset"}
_CAFFE_FIELDS = {each.name: each.name for each in fields(CaffeLayerRecord) if each.name != "record_d"}
_OLD_INPUT_FIELDS = {
    "scale_d": "scale",
    "offset_d": "offset",
    "channels": "channels",
    "height": "height",
    "width": "width",
}
_INPUT_FIELDS = {**_OLD_INPUT_FIELDS, "index": "index", "num_bits_d": "num_bits"}
_ATTRIBUTE_FIELDS: dict[AttributeType, str] = {
    "FLOAT": "f",
    "INT": "i",
    "STRING": "s",
    "FLOATS": "floats",
    "INTS": "ints",
    "STRINGS": "strings",
}

_KINDS: dict[RecordDialect, type[AnyRecord]] = {"pytorch": Record, "caffe": CaffeRecord}
_BINARY_SUFFIXES = frozenset({".bin", ".pb", ".binpb"})
#: Control characters that do not occur in text; every binary record has some of them as tags.
_NOT_TEXT = bytes(code for code in range(32) if chr(code) not in "\t\n\v\f\r")


def read_record(path: AnyPath) -> Record:
    """Read a record file in the PyTorch dialect, text or binary.

    Raises:
        FileError: The file does not exist or cannot be read.
        RecordParseError: It is not a record file of this dialect; the message has line and column.
    """
    return _read(atomic.read_bytes(path), str(path), Record, form_of(path))


def read_caffe_record(path: AnyPath) -> CaffeRecord:
    """Read a record file in the Caffe dialect, text or binary; errors as in ``read_record``."""
    return _read(atomic.read_bytes(path), str(path), CaffeRecord, form_of(path))


def read_any_record(path: AnyPath, *, dialect: RecordDialect | None = None) -> AnyRecord:
    """Read a record file; without ``dialect`` it is detected from the content.

    Raises:
        RecordParseError: The file is not a record, or it is binary, fits both dialects and ``dialect`` is not given.
    """
    data = atomic.read_bytes(path)
    form = form_of(path) or ("binary" if _looks_binary(data) else "text")
    kind = _kind_of(data, str(path), form) if dialect is None else _KINDS[dialect]
    record: AnyRecord = _read(data, str(path), kind, form)  # type: ignore[type-var]  # one of both
    return record


def parse_record(content: str | bytes, source: str = "<record>") -> Record:
    """Read a record in the PyTorch dialect from text, or from bytes of either form."""
    return _read(content, source, Record, None)


def parse_caffe_record(content: str | bytes, source: str = "<record>") -> CaffeRecord:
    """Read a record in the Caffe dialect from text, or from bytes of either form."""
    return _read(content, source, CaffeRecord, None)


def format_record(record: AnyRecord) -> str:
    """Return the text of a record, in the layout of AMCT's documents."""
    return format_text(_message_of(record))


def write_record(record: AnyRecord, path: AnyPath, *, form: Form | None = None) -> None:
    """Write a record file, atomically; without ``form`` binary if the suffix is that of a binary file, otherwise text.

    Raises:
        FileError: The file cannot be written.
        RecordValueError: A number does not fit its field.
    """
    atomic.write_bytes(path, encode_record(record, form or form_of(path) or "text"))


def encode_record(record: AnyRecord, form: Form) -> bytes:
    """Return the bytes of a record file in the given form."""
    return _message_of(record).SerializeToString() if form == "binary" else format_record(record).encode()


def form_of(path: AnyPath) -> Form | None:
    """Return the form that the suffix of a file name implies; None if it implies none."""
    suffix = Path(path).suffix.lower()
    if suffix in _BINARY_SUFFIXES:
        return "binary"
    return "text" if suffix == ".txt" else None


def _read(content: str | bytes, source: str, kind: type[_RecordT], form: Form | None) -> _RecordT:
    name, schema = _MESSAGES[kind]
    try:
        if isinstance(content, bytes) and (form == "binary" or (form is None and _looks_binary(content))):
            message = read_binary(content, message_class(name, schema=schema), source)
            if _has_unknown_fields(message):
                dialect = "caffe" if kind is CaffeRecord else "pytorch"
                raise ParseError(
                    f"{source}: has fields that the {dialect} dialect does not have; is it another dialect?"
                )
            return _record_from_message(message, kind, source)
        text = parse_text(content, descriptor(name, schema=schema), source)
        message = text.to_message()
    except ParseError as error:
        raise RecordParseError.from_problems(error.problems) from error
    return _record_from_message(message, kind, source, text)


def _looks_binary(data: bytes) -> bool:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return False  # UTF-16: the text reader raises a clear error
    return len(data.translate(None, _NOT_TEXT)) != len(data)


def _kind_of(data: bytes, source: str, form: Form) -> type[AnyRecord]:
    if form == "text":
        only_caffe = (b"record_d", b"num_bits_w", b"object_layer")
        return CaffeRecord if any(word in data for word in only_caffe) else Record
    possible = [kind for kind in _MESSAGES if _could_be(data, kind)]
    if len(possible) > 1:
        raise RecordParseError(f"{source}: could be a pytorch or a caffe record; choose one with dialect")
    return possible[0] if possible else Record


def _could_be(data: bytes, kind: type[AnyRecord]) -> bool:
    name, schema = _MESSAGES[kind]
    try:
        return not _has_unknown_fields(read_binary(data, message_class(name, schema=schema), ""))
    except ParseError:
        return False


def _has_unknown_fields(message: Message) -> bool:
    """Whether a binary message has fields that its type does not define."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return bool(known.ByteSize() != message.ByteSize())


def _record_from_message(
    message: Message, kind: type[_RecordT], source: str, text: TextMessage | None = None
) -> _RecordT:
    """Convert a message to a record; ``text`` is the text that the message was read from, with its positions.

    Raises:
        RecordParseError: An entry has no key or no value, or contradicts itself.
    """
    reader = _RecordReader() if text is None else _RecordReader.of(text)
    record: Any = (_read_pytorch if kind is Record else _read_caffe)(message, reader)
    if reader.problems:
        raise RecordParseError.from_problems(reader.problems)
    found: _RecordT = replace(record, source=source, warnings=tuple(reader.warnings), positions=reader.positions)
    return found


def _message_of(record: AnyRecord) -> Message:
    """Convert a record to a message.

    Raises:
        RecordValueError: A number does not fit its field.
    """
    name, schema = _MESSAGES[type(record)]
    message: Message = message_class(name, schema=schema)()
    if isinstance(record, CaffeRecord):
        _fill_caffe(message, record)
    else:
        _fill_pytorch(message, record)
    return message


@dataclass
class _RecordReader:
    """Reads the entries of a message; problems are collected, so that they are reported together.

    A binary file has no positions.
    """

    positions: dict[tuple[str, str], Position] = field(default_factory=dict)
    entry_positions: Sequence[Position] = ()
    chain_positions: Sequence[Position] = ()
    warnings: list[Problem] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def of(cls, text: TextMessage) -> _RecordReader:
        """A reader with the positions of each layer and of the last occurrence of each of its fields."""
        entries: list[TextMessage] = text.all("record")
        positions: dict[tuple[str, str], Position] = {}
        for entry in entries:
            name = entry.get("key", "")
            positions[name, ""] = entry.position
            for part in ("value", "kv_cache_value"):
                block = entry.get(part) if part in entry.table.fields else None
                if block is not None:
                    last = {occurrence.name: occurrence for occurrence in block.fields}
                    positions.update({(name, key): occurrence.position for key, occurrence in last.items()})
        chains = text.all("prune_record") if "prune_record" in text.table.fields else []
        return cls(
            positions, [entry.position for entry in entries], [each.position for each in chains], [*text.warnings]
        )

    def entries(self, message: Any, *parts: str) -> Iterator[tuple[str, str, Any, Position | None]]:  # noqa: ANN401 - generated class
        """Yield layer name, part, content and position of each of an entry's ``parts``; it must have at least one."""
        seen = set()
        for index, entry in enumerate(message.record):
            where = self.entry_positions[index] if self.entry_positions else None
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

    def warn(self, layer: str, name: str, message: str) -> None:
        """Add a warning about a field of a layer."""
        self.warnings.append(Problem(f'layer "{layer}": {message}', self.positions.get((layer, name))))


def _set_fields(message: Any, names: Mapping[str, str]) -> dict[str, Any]:  # noqa: ANN401 - generated class
    """Return the set fields of a message by their names in the dataclass (``names``: file name to dataclass name)."""
    present = {descriptor.name: value for descriptor, value in message.ListFields()}
    return {
        names[name]: value if isinstance(value, int | float | str) else tuple(value)
        for name, value in present.items()
        if name in names
    }


def _fill(message: Any, source: object, names: Mapping[str, str]) -> None:  # noqa: ANN401 - generated class
    """Set the fields of a message from a dataclass; None, empty tuples and False are left out."""
    message.SetInParent()
    for name, own in names.items():
        value = getattr(source, own)
        if isinstance(value, tuple):
            getattr(message, name).extend(value)
        elif value is not None and value is not False:
            setattr(message, name, value)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Convert the error for a number that does not fit its field to a ``RecordValueError`` prefixed with ``where``."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise RecordValueError(f"{where}: {error}") from error


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def _read_pytorch(message: Any, reader: _RecordReader) -> Record:  # noqa: ANN401 - generated class
    layers: dict[str, LayerRecord] = {}
    kv_cache: dict[str, KvCacheRecord] = {}
    for name, part, content, _ in reader.entries(message, "value", "kv_cache_value"):
        if part == "value":
            layers[name] = _layer(name, content, reader)
        else:
            kv_cache[name] = KvCacheRecord(**_set_fields(content, _KV_FIELDS))
    prune = []
    for index, chain in enumerate(message.prune_record):
        where = reader.chain_positions[index] if reader.chain_positions else None
        prune.append(
            PruneRecord(
                producers=tuple(_node(node, where, reader.problems) for node in chain.producer),
                consumers=tuple(_node(node, where, reader.problems) for node in chain.consumer),
                selective=_node(chain.selective_prune, where, reader.problems)
                if chain.HasField("selective_prune")
                else None,
            )
        )
    return Record(layers, kv_cache, tuple(prune), order=tuple(dict.fromkeys(entry.key for entry in message.record)))


def _layer(name: str, value: Any, reader: _RecordReader) -> LayerRecord:  # noqa: ANN401 - generated class
    content = _set_fields(value, _LAYER_FIELDS)
    dst_type = content.get("dst_type")
    for own in ("act_type", "wts_type"):
        if dst_type is not None and content.get(own, dst_type) != dst_type:
            reader.warn(name, own, f"dst_type {dst_type} overrides {own} {content[own]}")
            content[own] = dst_type
    return LayerRecord(**content)


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
    return next(iter(_types_with_values(message)), "UNDEFINED")


def _attribute_mistake(message: Any, kind: AttributeType) -> str:  # noqa: ANN401 - generated class
    present = _types_with_values(message)
    scalar_missing = kind in ("FLOAT", "INT", "STRING") and kind not in present
    if not scalar_missing and all(other == kind for other in present):
        return ""
    found = " and ".join(_ATTRIBUTE_FIELDS[other] for other in present) or "no value"
    return f"is of type {kind} but has {found}"


def _types_with_values(message: Any) -> list[AttributeType]:  # noqa: ANN401 - generated class
    return [
        kind
        for kind, name in _ATTRIBUTE_FIELDS.items()
        if (getattr(message, name) if kind.endswith("S") else message.HasField(name))
    ]


def _value(message: Any, kind: AttributeType) -> AttributeValue:  # noqa: ANN401 - generated class
    if kind == "UNDEFINED":
        return None
    raw = getattr(message, _ATTRIBUTE_FIELDS[kind])
    if kind == "STRING":
        return _text(raw)
    if kind == "STRINGS":
        return tuple(_text(item) for item in raw)
    return tuple(raw) if kind in ("FLOATS", "INTS") else raw


def _fill_pytorch(message: Any, record: Record) -> None:  # noqa: ANN401 - generated class
    for name in record.names:
        with _naming(f'layer "{name}"'):
            entry = message.record.add(key=name)
            if name in record.layers:
                _fill(entry.value, record.layers[name], _LAYER_FIELDS)
            if name in record.kv_cache:
                _fill(entry.kv_cache_value, record.kv_cache[name], _KV_FIELDS)
    for chain in record.prune:
        target = message.prune_record.add()
        for node in chain.producers:
            _fill_node(target.producer.add(), node)
        for node in chain.consumers:
            _fill_node(target.consumer.add(), node)
        if chain.selective is not None:
            _fill_node(target.selective_prune, chain.selective)


def _fill_node(target: Any, node: PruneNode) -> None:  # noqa: ANN401 - generated class
    target.name = node.name
    for attribute in node.attributes:
        with _naming(f'node "{node.name}", attribute "{attribute.name}"'):
            message = target.attr.add(name=attribute.name, type=attribute.type)
            if attribute.type == "UNDEFINED":
                continue
            name, value = _ATTRIBUTE_FIELDS[attribute.type], attribute.value
            if isinstance(value, tuple):
                getattr(message, name).extend(_bytes(item) if isinstance(item, str) else item for item in value)
            else:
                setattr(message, name, _bytes(value) if isinstance(value, str) else value)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# -- Caffe -------------------------------------------------------------------------------------------------------------


def _read_caffe(message: Any, reader: _RecordReader) -> CaffeRecord:  # noqa: ANN401 - generated class
    return CaffeRecord(
        {name: _caffe_layer(name, value, reader, where) for name, _, value, where in reader.entries(message, "value")}
    )


def _caffe_layer(name: str, value: Any, reader: _RecordReader, where: Position | None) -> CaffeLayerRecord:  # noqa: ANN401 - generated class
    inputs = [DataFactors(**_set_fields(factors, _INPUT_FIELDS)) for factors in value.record_d]
    indices = [factors.index for factors in inputs]
    if len(set(indices)) != len(indices):
        message = f'layer "{name}" has two record_d for one input; the indices are {indices}'
        reader.problems.append(Problem(message, where))
        return CaffeLayerRecord()
    old = _set_fields(value, _OLD_INPUT_FIELDS)
    if old and 0 in indices:
        ignored = [field for field, own in _OLD_INPUT_FIELDS.items() if own in old]
        reader.warn(name, ignored[0], f"{', '.join(ignored)} outside record_d are ignored: record_d has input 0")
    elif old:
        inputs.insert(0, DataFactors(index=0, **old))
    if value.shift_bit:
        reader.warn(name, "shift_bit", "shift_bit is not used and has no effect")
    return CaffeLayerRecord(record_d=tuple(inputs), **_set_fields(value, _CAFFE_FIELDS))


def _fill_caffe(message: Any, record: CaffeRecord) -> None:  # noqa: ANN401 - generated class
    for name, layer in record.items():
        with _naming(f'layer "{name}"'):
            entry = message.record.add(key=name)
            _fill(entry.value, layer, _CAFFE_FIELDS)
            for factors in layer.record_d:
                _fill(entry.value.record_d.add(), factors, _INPUT_FIELDS)
