"""Conversion between protobuf messages and records of the Caffe dialect.

Older files have the factors of a single input directly in ``value``: they are read as factors of input 0 and written
in ``record_d``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.errors import Problem, RecordParseError
from amct.record.layers import CaffeLayerRecord, DataFactors
from amct.record.messages import EntryReader, Positions, fill_message, message_error, set_fields
from amct.record.records import CaffeRecord
from amct.schema import message_class

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from amct.errors import Position

MESSAGE = "AMCTCaffeProto.ScaleOffsetRecord"

_LAYER_FIELDS = ("scale_w", "offset_w", "shift_bit", "skip_fusion", "object_layer", "num_bits_w")
_OLD_FIELDS = {
    "scale_d": "scale",
    "offset_d": "offset",
    "channels": "channels",
    "height": "height",
    "width": "width",
}
_INPUT_FIELDS = {**_OLD_FIELDS, "index": "index", "num_bits_d": "num_bits"}


def record_from_message(message: Any, source: str, positions: Positions) -> CaffeRecord:  # noqa: ANN401 - generated class
    """Convert a message to a record.

    Raises:
        RecordParseError: An entry has no key or no value, or two ``record_d`` for one input.
    """
    layers: dict[str, CaffeLayerRecord] = {}
    reader = EntryReader(positions, list(positions.warnings), [])
    for name, _, value, where in reader.entries(message, "value"):
        layers[name] = _layer(name, value, reader, where)
    if reader.problems:
        raise RecordParseError.from_problems(reader.problems)
    return CaffeRecord(layers, source=source, warnings=tuple(reader.warnings), positions=positions.fields)


def record_to_message(record: CaffeRecord) -> Message:
    """Convert a record to a message.

    Raises:
        RecordValueError: A number does not fit its field.
    """
    message: Any = message_class(MESSAGE, schema="caffe_config")()
    for name, layer in record.items():
        with message_error(f'layer "{name}"'):
            entry = message.record.add(key=name)
            entry.value.SetInParent()
            fill_message(entry.value, layer, _LAYER_FIELDS)
            for factors in layer.record_d:
                fill_message(entry.value.record_d.add(), factors, _INPUT_FIELDS)
    return message  # type: ignore[no-any-return]  # generated class


def _layer(name: str, value: Any, reader: EntryReader, where: Position | None) -> CaffeLayerRecord:  # noqa: ANN401 - generated class
    inputs = [DataFactors(**set_fields(factors, _INPUT_FIELDS)) for factors in value.record_d]
    indices = [factors.index for factors in inputs]
    if len(set(indices)) != len(indices):
        message = f'layer "{name}" has two record_d for one input; the indices are {indices}'
        reader.problems.append(Problem(message, where))
        return CaffeLayerRecord()
    old = set_fields(value, _OLD_FIELDS)
    if old and 0 in indices:
        ignored = [field for field, own in _OLD_FIELDS.items() if own in old]
        message = f'layer "{name}": {", ".join(ignored)} outside record_d are ignored: record_d has input 0'
        reader.warnings.append(Problem(message, reader.positions.field(name, ignored[0])))
    elif old:
        inputs.insert(0, DataFactors(index=0, **old))
    if value.shift_bit:
        message = f'layer "{name}": shift_bit is not used and has no effect'
        reader.warnings.append(Problem(message, reader.positions.field(name, "shift_bit")))
    return CaffeLayerRecord(record_d=tuple(inputs), **set_fields(value, _LAYER_FIELDS))
