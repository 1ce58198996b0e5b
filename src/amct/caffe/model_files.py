"""Serializes a model in memory as prototxt and caffemodel; blobs keep their data type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.messages import new_message
from amct.caffe.engine.wire import blob_parts, layer_parts
from amct.schema import format_text

if TYPE_CHECKING:
    import os

    from amct.atomic import FileGroup
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import CaffeModel


def write_model(
    group: FileGroup, model: CaffeModel, model_file: str | os.PathLike[str], weights_file: str | os.PathLike[str]
) -> None:
    """Write the prototxt and caffemodel of a model as part of a file group."""
    group.write_text(model_file, format_text(model.net))
    with group.open(weights_file) as file:
        for part in caffemodel_parts(model):
            file.write(part)


def caffemodel_parts(model: CaffeModel) -> list[bytes | memoryview]:
    """The net with its weights as a serialized NetParameter, in pieces."""
    parts: list[bytes | memoryview] = [new_message("NetParameter", name=model.net.name).SerializeToString()]
    for layer in model.net.layer:
        blobs = [_blob(tensor) for tensor in model.weights.get(layer.name, [])]
        parts += layer_parts(_head(layer), blobs)
    return parts


def _head(layer: ProtoMessage) -> bytes:
    """The names of a layer and its blobs, serialized; layer options are only in the prototxt."""
    head = new_message("LayerParameter", name=layer.name, type=layer.type, bottom=layer.bottom, top=layer.top)
    return bytes(head.SerializeToString())


def _blob(tensor: torch.Tensor) -> list[bytes | memoryview]:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point():
        return blob_parts(tuple(tensor.shape), tensor.numpy())
    message = new_message("BlobProto")
    message.shape.dim.extend(tensor.shape)
    if tensor.dtype in (torch.int8, torch.uint8):
        message.int8_data = tensor.numpy().tobytes()
    else:
        message.int32_data.extend(tensor.reshape(-1).tolist())
    return [message.SerializeToString()]
