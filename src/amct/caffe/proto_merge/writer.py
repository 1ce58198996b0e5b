"""Writes descriptors as the text of a .proto file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto

from amct.caffe.proto_merge.reader import SCALARS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor_pb2 import FileDescriptorProto

_LABEL_NAMES = {
    FieldDescriptorProto.LABEL_OPTIONAL: "optional",
    FieldDescriptorProto.LABEL_REQUIRED: "required",
    FieldDescriptorProto.LABEL_REPEATED: "repeated",
}
_SCALAR_NAMES = {number: name for name, number in SCALARS.items()}
_QUOTED = (FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BYTES)


def write_proto(file: FileDescriptorProto) -> str:
    """The file as text, messages and enums in order; comments are not kept."""
    lines = ['syntax = "proto2";', ""]
    if file.package:
        lines += [f"package {file.package};", ""]
    for enum in file.enum_type:
        lines += [*_enum(enum, ""), ""]
    for message in file.message_type:
        lines += [*_message(message, "", file.package), ""]
    return "\n".join(lines)


def _message(message: DescriptorProto, indent: str, scope: str) -> Iterator[str]:
    yield f"{indent}message {message.name} {{"
    inner = indent + "  "
    for enum in message.enum_type:
        yield from _enum(enum, inner)
    for nested in message.nested_type:
        yield from _message(nested, inner, scope)
    written: set[int] = set()
    for field in message.field:
        if not field.HasField("oneof_index"):
            yield f"{inner}{_LABEL_NAMES[field.label]} {_field(field, scope)}"
        elif field.oneof_index not in written:
            written.add(field.oneof_index)
            yield from _oneof(message, field.oneof_index, inner, scope)
    yield f"{indent}}}"


def _oneof(message: DescriptorProto, index: int, indent: str, scope: str) -> Iterator[str]:
    yield f"{indent}oneof {message.oneof_decl[index].name} {{"
    for field in message.field:
        if field.HasField("oneof_index") and field.oneof_index == index:
            yield f"{indent}  {_field(field, scope)}"
    yield f"{indent}}}"


def _field(field: FieldDescriptorProto, scope: str) -> str:
    kind = _SCALAR_NAMES.get(field.type) or field.type_name.removeprefix(f".{scope}." if scope else ".")
    options = []
    if field.HasField("default_value"):
        quoted = field.type in _QUOTED
        options.append(f"default = {json.dumps(field.default_value) if quoted else field.default_value}")
    if field.options.HasField("packed"):
        options.append(f"packed = {str(field.options.packed).lower()}")
    if field.options.deprecated:
        options.append("deprecated = true")
    ending = f" [{', '.join(options)}]" if options else ""
    return f"{kind} {field.name} = {field.number}{ending};"


def _enum(enum: EnumDescriptorProto, indent: str) -> Iterator[str]:
    yield f"{indent}enum {enum.name} {{"
    for value in enum.value:
        yield f"{indent}  {value.name} = {value.number};"
    yield f"{indent}}}"
