"""The attributes of the modules that protoc would generate, from the descriptor set: scripts import them by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from amct.schema.pool import FAMILIES, message_class, pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.descriptor import FileDescriptor


def generated_names(module: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module that stands for a ``.proto`` file of this package.

    It has the file's messages, enums and enum values, and ``DESCRIPTOR``; each is made on first use.

    Args:
        module: The module's ``__name__``.
        file: The name of the ``.proto`` file.
    """
    schema = FAMILIES[file]

    def described() -> FileDescriptor:
        return pool(schema).FindFileByName(file)

    def find(name: str) -> Any:  # noqa: ANN401  a class or a number
        from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

        proto = described()
        if name == "DESCRIPTOR":
            return proto
        if name in proto.message_types_by_name:
            return message_class(proto.message_types_by_name[name].full_name, schema=schema)
        if name in proto.enum_types_by_name:
            return EnumTypeWrapper(proto.enum_types_by_name[name])
        for enum in proto.enum_types_by_name.values():
            if name in enum.values_by_name:
                return enum.values_by_name[name].number
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def getattribute(name: str) -> Any:  # noqa: ANN401  as above
        value = find(name)
        setattr(sys.modules[module], name, value)
        return value

    def directory() -> list[str]:
        proto = described()
        values = [value for enum in proto.enum_types_by_name.values() for value in enum.values_by_name]
        names = (*proto.message_types_by_name, *proto.enum_types_by_name, *values, "DESCRIPTOR")
        return sorted({*vars(sys.modules[module]), *names})

    return getattribute, directory
