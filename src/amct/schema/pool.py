"""Message types from the committed descriptor set, each family in a descriptor pool of its own.

Private pools do not clash with the messages of another library in the same program, such as Caffe's ``caffe_pb2``. The
descriptor set is read when the first message type is requested.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from amct.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import Message

Schema = Literal["pytorch", "caffe_config", "caffe"]

DESCRIPTOR_SET = "descriptors.binpb"

#: Which family each ``*.proto`` file of this folder belongs to; ``scripts/build_schema.py`` holds them together.
FAMILIES: MappingProxyType[str, Schema] = MappingProxyType(
    {
        "basic_info.proto": "pytorch",
        "calibration_config.proto": "pytorch",
        "quant_calibration_config.proto": "pytorch",
        "retrain_config.proto": "pytorch",
        "scale_offset_record.proto": "pytorch",
        "caffe_calibration_config.proto": "caffe_config",
        "caffe_retrain_config.proto": "caffe_config",
        "caffe_scale_offset_record.proto": "caffe_config",
        "caffe.proto": "caffe",
    }
)

FIRST_NUMBER = 2**28
"""Field numbers from here to 2^29 - 1 belong to extensions; no ``.proto`` of this package uses them."""


@dataclass(frozen=True, kw_only=True)
class ExtraField:
    """A field that an extension adds to a message, such as ``toy_quantize { k: 3.0 }``.

    Attributes:
        container: The message that gets the field, with its package: ``AMCTPytorchProto.CalibrationConfig``.
        name: The name of the field.
        settings: The dataclass whose fields become those of the field's message.
        oneof: The oneof of the container that the field joins; None: the field stands alone.
    """

    container: str
    name: str
    settings: type[Any]
    oneof: str | None = None

    @property
    def number(self) -> int:
        """The field number: it follows from the name, so it is the same in every program."""
        return FIRST_NUMBER + zlib.crc32(self.name.encode()) % FIRST_NUMBER


@cache
def file_protos(schema: Schema) -> tuple[FileDescriptorProto, ...]:
    """The parsed ``.proto`` files of one family, imports before their users.

    They can be copied, extended (``with_extra_fields``) and loaded into a pool of the caller's own (``pool_of``).
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    if schema not in FAMILIES.values():
        raise ArgumentError(f"schema must be one of {', '.join(sorted(set(FAMILIES.values())))}, got {schema!r}")
    everything = FileDescriptorSet.FromString(resources.files(__package__).joinpath(DESCRIPTOR_SET).read_bytes())
    return tuple(file for file in everything.file if FAMILIES[file.name] == schema)


def pool_of(files: Iterable[FileDescriptorProto]) -> DescriptorPool:
    """A new descriptor pool with these files and nothing else; imports come before their users."""
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


@lru_cache(maxsize=64)
def _pool(schema: Schema, extra: tuple[ExtraField, ...]) -> DescriptorPool:
    if not extra:
        return pool_of(file_protos(schema))
    from amct.schema.extension import with_extra_fields

    return pool_of(with_extra_fields(file, extra) for file in file_protos(schema))


@lru_cache(maxsize=1024)
def descriptor(full_name: str, *, schema: Schema, extra: tuple[ExtraField, ...] = ()) -> Descriptor:
    """Return the descriptor of a message type, for example ``descriptor("caffe.NetParameter", schema="caffe")``.

    Args:
        full_name: The message type with its package.
        schema: The family it belongs to.
        extra: Fields of extensions; the message type then belongs to a private copy of the family that has them.

    Raises:
        ArgumentError: The family or the message type is unknown, or an extra field clashes with one of the schema.
    """
    try:
        return _pool(schema, extra).FindMessageTypeByName(full_name)
    except KeyError:
        known = [
            f"{file.package}.{message.name}" if file.package else message.name
            for file in file_protos(schema)
            for message in file.message_type
        ]
        raise ArgumentError(
            f"schema {schema!r} has no message type {full_name!r}.{did_you_mean(full_name, known)}"
        ) from None


def message_class(full_name: str, *, schema: Schema, extra: tuple[ExtraField, ...] = ()) -> type[Message]:
    """Return the protobuf class of a message type, for example ``AMCTPytorchProto.AMCTConfig`` of ``pytorch``."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(descriptor(full_name, schema=schema, extra=extra))
