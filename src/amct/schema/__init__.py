"""The file formats of AMCT as protobuf messages, and a text reader that records the position of every field."""

from __future__ import annotations

from amct.schema._fields import shortest_float
from amct.schema._parser import parse_text
from amct.schema.pool import ExtraField, Schema, descriptor, file_protos, format_text, message_class, read_binary
from amct.schema.text import TextField, TextMessage

__all__ = [
    "ExtraField",
    "Schema",
    "TextField",
    "TextMessage",
    "descriptor",
    "file_protos",
    "format_text",
    "message_class",
    "parse_text",
    "read_binary",
    "shortest_float",
]
