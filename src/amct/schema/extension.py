"""Messages that an extension adds at run time: a dataclass becomes a message, and a field of an existing message.

``descriptor("caffe.NetParameter", schema="caffe", extra=(ExtraField(...),))`` gives the message type of a private copy
of the schema that has the fields. The shared schema is never changed.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from amct.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amct.schema.pool import ExtraField

_SCALARS: dict[Any, FieldDescriptorProto.Type.ValueType] = {
    bool: FieldDescriptorProto.TYPE_BOOL,
    int: FieldDescriptorProto.TYPE_INT64,
    float: FieldDescriptorProto.TYPE_DOUBLE,
    str: FieldDescriptorProto.TYPE_STRING,
}


def message_from_dataclass(settings: type[Any], name: str) -> DescriptorProto:
    """The message type with the fields of a dataclass, numbered from 1 in their order, with their defaults.

    ``bool``, ``int``, ``float``, ``str`` and ``Literal`` of one of these become optional fields, tuples and lists of
    them repeated fields. ``Annotated`` and ``| None`` are ignored.

    Raises:
        ArgumentTypeError: it is no dataclass, or a field has another type.
    """
    if not (isinstance(settings, type) and dataclasses.is_dataclass(settings)):
        raise ArgumentTypeError(f"settings: expected a dataclass, got {settings!r}")
    message = DescriptorProto(name=name)
    hints = typing.get_type_hints(settings, include_extras=True)
    for number, item in enumerate(dataclasses.fields(settings), start=1):
        scalar, repeated = _scalar_type(hints[item.name])
        if scalar not in _SCALARS:
            raise ArgumentTypeError(
                f"{settings.__name__}.{item.name}: expected bool, int, float, str, a Literal of them or a tuple of "
                f"them, got {hints[item.name]}"
            )
        label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
        field = message.field.add(name=item.name, number=number, type=_SCALARS[scalar], label=label)
        if not repeated and isinstance(item.default, (bool, int, float, str)):
            field.default_value = str(item.default).lower() if scalar is bool else str(scalar(item.default))
    return message


def _scalar_type(hint: Any) -> tuple[Any, bool]:  # noqa: ANN401 - a type hint has no type of its own
    """The Python type of one value of a field, and whether the field holds several."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _scalar_type(arguments[0])
    if origin in (Union, types.UnionType) and types.NoneType in arguments and len(arguments) == 2:
        return _scalar_type(next(each for each in arguments if each is not types.NoneType))
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        return (kinds.pop() if len(kinds) == 1 else None), False
    if origin in (tuple, list):
        kinds = {_scalar_type(each)[0] for each in arguments if each is not Ellipsis}
        return (kinds.pop() if len(kinds) == 1 else None), True
    return hint, False


def with_extra_fields(file: FileDescriptorProto, extra: Iterable[ExtraField]) -> FileDescriptorProto:
    """A copy of a parsed ``.proto`` file whose messages have the extra fields that are for this file.

    Raises:
        ArgumentError: the container already has a field of that name, or two names happen to have the same number.
    """
    copy = FileDescriptorProto()
    copy.CopyFrom(file)
    for message in copy.message_type:
        for each in extra:
            if each.container == f"{copy.package}.{message.name}":
                _add_field(message, each)
    return copy


def _add_field(message: DescriptorProto, extra: ExtraField) -> None:
    taken = next((field for field in message.field if extra.name == field.name or extra.number == field.number), None)
    if taken is not None:
        raise ArgumentError(
            f'{extra.container}: the field "{extra.name}" clashes with "{taken.name}"; register the extension '
            "under another name"
        )
    nested = "".join(part.capitalize() for part in extra.name.split("_"))
    message.nested_type.append(message_from_dataclass(extra.settings, nested))
    field = message.field.add(
        name=extra.name,
        number=extra.number,
        type=FieldDescriptorProto.TYPE_MESSAGE,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
        type_name=f".{extra.container}.{nested}",
    )
    if extra.oneof is not None:
        field.oneof_index = [oneof.name for oneof in message.oneof_decl].index(extra.oneof)
