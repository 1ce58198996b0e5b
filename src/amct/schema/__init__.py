"""The file formats of AMCT as protobuf messages, and a text reader that remembers where everything stood."""

from __future__ import annotations

from amct.schema.pool import Schema, descriptor, file_protos, message_class

__all__ = [
    "Schema",
    "descriptor",
    "file_protos",
    "message_class",
]
