"""A reader of prototxt files that knows of AMCT's messages what the guide says, and nothing else.

It stands for the chip's converter: one unknown field, and the file does not parse.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from amct.caffe.pycaffe.proto import caffe_pb2

BOOL, FLOAT, INT32, STRING, UINT32 = (
    getattr(FieldDescriptorProto, f"TYPE_{name}") for name in ("BOOL", "FLOAT", "INT32", "STRING", "UINT32")
)
#: The fields that the guide prints.
QUANT = {
    "with_offset": (1, BOOL), "scale": (2, FLOAT), "offset": (3, INT32), "object_layer": (4, STRING),
    "index": (5, UINT32), "num_bits_d": (6, INT32),
}  # fmt: skip
#: The guide names the message or the layer and prints no fields: those that this package gives it.
NAMED_ONLY = {
    "DeQuantParameter": ("object_layer", "channel_wise"),
    "LSTMQuantParameter": ("object_layer", "num_bits_d", "scale_w"),
    "AntiQuantParameter": ("scale", "offset", "object_layer", "index", "num_bits_d"),
}
#: LayerParameter fields from this number up to the next hundred are AMCT's.
OWN = range(200_000, 200_100)


@cache
def _net():
    file = FileDescriptorProto()
    caffe_pb2.DESCRIPTOR.CopyToProto(file)
    known = {"QuantParameter", *NAMED_ONLY}
    layer = next(message for message in file.message_type if message.name == "LayerParameter")
    own = {field.type_name.rpartition(".")[2]: field for field in layer.field if field.number in OWN}
    for name, field in own.items():
        if name not in known:
            layer.field.remove(field)
    for message in list(file.message_type):
        if message.name in own and message.name not in known:
            file.message_type.remove(message)
        elif message.name == "QuantParameter":
            del message.field[:]
            for name, (number, kind) in QUANT.items():
                message.field.add(name=name, number=number, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL)
        elif message.name in NAMED_ONLY:
            fields = [field for field in message.field if field.name in NAMED_ONLY[message.name]]
            del message.field[:]
            message.field.extend(fields)
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("caffe.NetParameter"))


def read_as_converter(path):
    """Parse a prototxt; an error if it has a field that is not the guide's."""
    return text_format.Parse(Path(path).read_text(), _net()())
