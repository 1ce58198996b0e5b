"""Resolves the type names of a file as protoc does: from the innermost message outwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.descriptor_pb2 import FieldDescriptorProto

from amct.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto


def resolve_types(file: FileDescriptorProto, source: str) -> None:
    """Replace type names by full names, in place, and set whether each is a message or an enum.

    Raises:
        ConfigError: The type of a field is not defined.
    """
    kinds: dict[str, int] = {}
    prefix = f".{file.package}" if file.package else ""
    for enum in file.enum_type:
        kinds[f"{prefix}.{enum.name}"] = FieldDescriptorProto.TYPE_ENUM
    for message in file.message_type:
        _collect(message, prefix, kinds)
    for message in file.message_type:
        _resolve(message, f"{prefix}.{message.name}", kinds, source)


def _collect(message: DescriptorProto, scope: str, kinds: dict[str, int]) -> None:
    name = f"{scope}.{message.name}"
    kinds[name] = FieldDescriptorProto.TYPE_MESSAGE
    for enum in message.enum_type:
        kinds[f"{name}.{enum.name}"] = FieldDescriptorProto.TYPE_ENUM
    for nested in message.nested_type:
        _collect(nested, name, kinds)


def _resolve(message: DescriptorProto, scope: str, kinds: dict[str, int], source: str) -> None:
    for field in message.field:
        if not field.type_name:
            continue
        full = _lookup(field.type_name, scope, kinds)
        if full is None:
            known = [name.rpartition(".")[2] for name in kinds]
            raise ConfigError(
                f"{source}: {message.name}.{field.name}: the type {field.type_name.lstrip('.')} is not defined."
                f"{did_you_mean(field.type_name, known)} Write a message of that name into the file"
            )
        field.type_name = full
        field.type = kinds[full]  # type: ignore[assignment]
    for nested in message.nested_type:
        _resolve(nested, f"{scope}.{nested.name}", kinds, source)


def _lookup(name: str, scope: str, kinds: dict[str, int]) -> str | None:
    if name.startswith("."):
        return name if name in kinds else None
    while scope:
        candidate = f"{scope}.{name}"
        if candidate in kinds:
            return candidate
        scope = scope.rpartition(".")[0]
    return f".{name}" if f".{name}" in kinds else None
