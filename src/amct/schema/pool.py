"""Message types from the committed descriptor set, each family in a descriptor pool of its own.

Private pools let a program that also loads, say, a real Caffe's ``caffe_pb2`` live beside ours: names and numbers may
be the same without a clash. Nothing is read before the first message type is asked for.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from amct.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
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


@cache
def file_protos(schema: Schema) -> tuple[FileDescriptorProto, ...]:
    """The parsed ``.proto`` files of one family, imports before their users.

    They can be copied, extended (``custom_proto``) and loaded into a pool of the caller's own.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    if schema not in FAMILIES.values():
        raise ArgumentError(f"schema must be one of {', '.join(sorted(set(FAMILIES.values())))}, got {schema!r}")
    everything = FileDescriptorSet.FromString(resources.files(__package__).joinpath(DESCRIPTOR_SET).read_bytes())
    return tuple(file for file in everything.file if FAMILIES[file.name] == schema)


@cache
def _pool(schema: Schema) -> DescriptorPool:
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for file in file_protos(schema):
        pool.AddSerializedFile(file.SerializeToString())
    return pool


@cache
def descriptor(full_name: str, *, schema: Schema) -> Descriptor:
    """Return the descriptor of a message type, for example ``descriptor("caffe.NetParameter", schema="caffe")``.

    Raises:
        ArgumentError: The family or the message type is unknown.
    """
    try:
        return _pool(schema).FindMessageTypeByName(full_name)
    except KeyError:
        known = [
            f"{file.package}.{message.name}" if file.package else message.name
            for file in file_protos(schema)
            for message in file.message_type
        ]
        raise ArgumentError(
            f"schema {schema!r} has no message type {full_name!r}.{did_you_mean(full_name, known)}"
        ) from None


def message_class(full_name: str, *, schema: Schema) -> type[Message]:
    """Return the protobuf class of a message type, for example ``AMCTPytorchProto.AMCTConfig`` of ``pytorch``."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(descriptor(full_name, schema=schema))
