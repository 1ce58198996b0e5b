"""The messages and enum values of this package's caffe.proto, under the module name that scripts import.

No code is generated: attributes are looked up in the descriptor set on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.schema import descriptor, message_class

if TYPE_CHECKING:
    from google.protobuf.descriptor import FileDescriptor
    from google.protobuf.message import Message

_file: FileDescriptor = descriptor("caffe.NetParameter", schema="caffe").file
DESCRIPTOR = _file


def __getattr__(name: str) -> type[Message] | int:
    if name in _file.message_types_by_name:
        found: type[Message] | int = message_class(f"caffe.{name}", schema="caffe")
    else:
        found = _enum_value(name)
    globals()[name] = found
    return found


def _enum_value(name: str) -> int:
    for enum in _file.enum_types_by_name.values():
        if name in enum.values_by_name:
            number: int = enum.values_by_name[name].number
            return number
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    values = [name for enum in _file.enum_types_by_name.values() for name in enum.values_by_name]
    return sorted([*globals(), *_file.message_types_by_name, *values])
