"""Weights: read from and written to caffemodels (binary, all versions) and HDF5, or filled when they are first read."""

from __future__ import annotations

import logging
import math
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from amct.atomic import AnyPath, FileGroup, check_whole, open_write
from amct.caffe.engine.hdf5 import Hdf5File, hdf5_library
from amct.caffe.engine.wire import StoredBlob, blob_parts, layer_parts, read_blob, read_weights
from amct.errors import FileError, ModelError, ParseError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from amct.caffe.engine.blob import Blob, Shape
    from amct.caffe.engine.graph import LayerNode, NetGraph
    from amct.caffe.engine.layer import Layer
    from amct.caffe.engine.messages import ProtoMessage

    NumberArray = npt.NDArray[np.generic]

logger = logging.getLogger(__name__)

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
WEIGHTS_GROUP = "data"
"""The group of an HDF5 caffemodel that holds the weights."""
_BLOB_NUMBER = re.compile("[0-9]{1,9}")


@contextmanager
def opened(path: AnyPath) -> Iterator[BinaryIO]:
    """A file to be read, which is whole.

    Raises:
        FileError: It cannot be read, or the save that writes it was interrupted.
    """
    check_whole(path)
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise FileError(f"Could not open file {path}: {error.strerror or error}") from error


def read_file(path: AnyPath) -> bytes:
    """The bytes of a file."""
    with opened(path) as file:
        return file.read()


def is_hdf5(path: AnyPath) -> bool:
    """Whether a file is HDF5, by its first bytes."""
    with opened(path) as file:
        return file.read(len(HDF5_SIGNATURE)) == HDF5_SIGNATURE


def stored_layers(path: AnyPath, names: Iterable[str]) -> Iterator[tuple[str, dict[int, StoredBlob]]]:
    """The layers of a caffemodel, or of an HDF5 file those with these names, with their blobs by number.

    A parameter that layers share is in an HDF5 file only under its owner.

    Raises:
        FileError: The file cannot be read.
        ParseError: It is neither a caffemodel nor HDF5.
    """
    if not is_hdf5(path):
        for layer in read_weights(read_file(path), str(path)):
            yield layer.name, dict(enumerate(layer.blobs))
        return
    with Hdf5File(path) as file:
        if not file.has(WEIGHTS_GROUP):
            raise ParseError(f'{path}: not an HDF5 caffemodel: it has no group "{WEIGHTS_GROUP}"')
        for name in names:
            blobs = {}
            for number in file.names(WEIGHTS_GROUP, name):
                values = file.array(WEIGHTS_GROUP, name, number) if _BLOB_NUMBER.fullmatch(number) else None
                if values is not None:
                    blobs[int(number)] = StoredBlob(values.shape, values.reshape(-1))
            if file.has(WEIGHTS_GROUP, name):
                yield name, blobs


def load(graph: NetGraph, path: AnyPath) -> None:
    """Copy the weights of a file into the layers of the same name; other layers of the file are ignored.

    Raises:
        FileError, ParseError: As for ``stored_layers``.
        ModelError: A layer has another number of blobs or other shapes than the file.
    """
    nodes: dict[str, LayerNode] = {}
    for node in graph.nodes:
        nodes.setdefault(node.layer.name, node)
    ignored: list[str] = []
    for name, blobs in stored_layers(path, nodes):
        if name in nodes:
            _copy_layer(graph, nodes[name], blobs, str(path))
        else:
            ignored.append(name)
    if ignored:
        logger.info("%s: ignoring source layer(s) %s: the net has none of that name", path, ", ".join(ignored))


def _copy_layer(graph: NetGraph, node: LayerNode, blobs: dict[int, StoredBlob], source: str) -> None:
    layer = node.layer
    layer.fit_stored([blobs[index].shape for index in sorted(blobs)])
    needed = {index for index in range(len(layer.blobs)) if _is_owner(graph, node, index)}
    if not needed <= blobs.keys() or max(blobs, default=-1) >= len(layer.blobs):
        raise _wrong_count(layer, len(blobs), source)
    for index, stored in blobs.items():
        _copy_blob(layer, index, stored, source)


def copy_messages(layer: Layer, blobs: Sequence[ProtoMessage], source: str) -> None:
    """Fill a layer's parameters from BlobProto messages (weights inside the prototxt).

    Raises:
        ModelError: Number of blobs or shapes differ.
    """
    if len(blobs) != len(layer.blobs):
        raise _wrong_count(layer, len(blobs), source)
    for index, message in enumerate(blobs):
        _copy_blob(layer, index, read_blob(message.SerializeToString(), source), source)


def _wrong_count(layer: Layer, stored: int, source: str) -> ModelError:
    return ModelError(
        f"{source}: Incompatible number of blobs for layer {layer.name}: the net has {len(layer.blobs)}, "
        f"the file {stored}. Is bias_term the same in both?"
    )


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as Caffe prints it: ``4 3 3 3 (108)``."""
    return f"{' '.join(map(str, shape))} ({math.prod(shape)})"


def _copy_blob(layer: Layer, index: int, stored: StoredBlob, source: str) -> None:
    blob = layer.blobs[index]
    fits = stored.shape == (blob.legacy_shape() if stored.is_legacy else blob.shape)
    if not fits:
        raise ModelError(
            f"{source}: Cannot copy param {index} weights from layer '{layer.name}'; shape mismatch.  Source param "
            f"shape is {shape_text(stored.shape)}; target param shape is {shape_text(blob.shape)}. To learn this "
            "layer's parameters from scratch rather than copying from a saved net, rename the layer."
        )
    if stored.values.size != blob.count:
        raise ParseError(
            f"{source}: layer '{layer.name}', blob {index}: shape {shape_text(stored.shape)} but {stored.values.size} "
            "values stored"
        )
    if layer.keeps_integers and np.issubdtype(stored.values.dtype, np.integer):
        blob.set_tensor(torch.from_numpy(np.array(stored.values)).reshape(blob.shape))
    else:
        set_values(blob, stored.values)


def set_values(blob: Blob, values: NumberArray) -> None:
    """Fill a blob from an array of as many numbers."""
    blob.set_tensor(torch.from_numpy(np.array(values, np.float32)).reshape(blob.shape))


# ------------------------------------------------------------------ writing


def caffemodel_parts(graph: NetGraph, *, with_diff: bool = False) -> list[bytes | memoryview]:
    """The net as a serialized NetParameter, in pieces: each layer, including automatic Splits, with its blobs."""
    from amct.caffe.engine.messages import new_message

    parts: list[bytes | memoryview] = [new_message("NetParameter", name=graph.name).SerializeToString()]
    for node in graph.nodes:
        blobs = [
            blob_parts(blob.shape, _plain(blob.tensor), _plain(blob.gradient) if with_diff else None)
            for blob in node.layer.blobs
        ]
        parts += layer_parts(node.layer.parameter.SerializeToString(), blobs)
    return parts


def _plain(tensor: torch.Tensor) -> NumberArray:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()


def save(graph: NetGraph, path: AnyPath, *, with_diff: bool = False) -> None:
    """Write a binary caffemodel.

    Raises:
        FileError: The file cannot be written.
    """
    with open_write(path) as file:
        file.writelines(caffemodel_parts(graph, with_diff=with_diff))


def save_hdf5(graph: NetGraph, path: AnyPath, *, with_diff: bool = False) -> None:
    """Write an HDF5 caffemodel: ``/data/<layer>/<index>``, shared parameters only under their owner.

    Raises:
        FileError: The file cannot be written.
    """
    with FileGroup() as files:
        write_hdf5(graph, files.path(path), with_diff=with_diff)


def write_hdf5(graph: NetGraph, path: Path, *, with_diff: bool = False) -> None:
    """Write an HDF5 caffemodel to this path directly, for a caller that commits several files together."""
    with hdf5_library().File(path, "w") as file:
        groups = [("data", False), *([("diff", True)] if with_diff else [])]
        for group_name, is_diff in groups:
            group = file.create_group(group_name)
            for node in graph.nodes:
                layer_group = group.require_group(node.layer.name)
                for index, blob in enumerate(node.layer.blobs):
                    if _is_owner(graph, node, index):
                        layer_group.create_dataset(str(index), data=_plain(blob.gradient if is_diff else blob.tensor))


def _is_owner(graph: NetGraph, node: LayerNode, index: int) -> bool:
    """Whether a parameter holds its values itself: it is not shared, or the first of those that share them."""
    owner = graph.owner_of.get((node.index, index))  # a table of values (``fit_stored``) has none
    return owner is None or owner.blob is node.layer.blobs[index]


# -- Caffe's fillers, which initialize parameters ----------------------------------------------------------------------
#
# A blob is filled on first read, so that loading weights from a file costs no random numbers.


FAN_IN, FAN_OUT = 0, 1
BILINEAR_AXES = 4


def lazy_fill(blob: Blob, filler: ProtoMessage | None, owner: str, default: float = 0.0) -> None:
    """Fill ``blob`` on its first read.

    The seed is drawn from torch's generator now, so that the values do not depend on the order of reads.

    Raises:
        ModelError: The filler's type is unknown, or it does not fit the shape.
    """
    shape = blob.shape
    if filler is None or filler.type == "constant":
        value = default if filler is None else filler.value
        if value != 0.0:
            blob.values.initialize_by(lambda: torch.full(shape, value))
        return
    fill = filler_function(filler, shape, owner)
    seed = int(torch.randint(2**62, ()).item())
    blob.values.initialize_by(lambda: fill(torch.Generator().manual_seed(seed)))


def filler_function(filler: ProtoMessage, shape: Shape, owner: str) -> Callable[[torch.Generator], torch.Tensor]:
    """The function that creates a filled tensor of ``shape`` from a random generator.

    Raises:
        ModelError: The filler's type is unknown, or it does not fit the shape.
    """
    make = _FILLERS.get(filler.type)
    if make is None:
        raise ModelError(
            f'layer "{owner}": Unknown filler name: "{filler.type}".{did_you_mean(filler.type, _FILLERS)}'
            f" Known: {', '.join(sorted(_FILLERS))}"
        )
    if filler.sparse != -1 and filler.type != "gaussian":
        raise ModelError(f'layer "{owner}": sparsity is only supported by the gaussian filler, not by "{filler.type}"')
    if filler.type == "uniform" and filler.min > filler.max:
        raise ModelError(f'layer "{owner}": uniform filler: min {filler.min} must not be above max {filler.max}')
    if filler.type == "bilinear":
        _check_bilinear(shape, owner)
    return lambda generator: make(filler, shape, generator)


def _constant(filler: ProtoMessage, shape: Shape, _: torch.Generator) -> torch.Tensor:
    return torch.full(shape, filler.value)


def _uniform(filler: ProtoMessage, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape).uniform_(filler.min, filler.max, generator=generator)


def _gaussian(filler: ProtoMessage, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(shape).normal_(filler.mean, filler.std, generator=generator)
    if filler.sparse >= 0 and shape:
        kept = filler.sparse / shape[0]
        values *= torch.bernoulli(torch.full(shape, min(kept, 1.0)), generator=generator)
    return values


def _positive_unitball(_: ProtoMessage, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(shape).uniform_(0, 1, generator=generator)
    rows = values.view(shape[0], -1)
    rows /= rows.sum(1, keepdim=True)
    return values


def _fan(filler: ProtoMessage, shape: Shape) -> float:
    total = math.prod(shape)
    fan_in = total / shape[0] if shape and shape[0] else 1.0
    fan_out = total / shape[1] if len(shape) > 1 and shape[1] else float(total)
    if filler.variance_norm == FAN_IN:
        return fan_in
    return fan_out if filler.variance_norm == FAN_OUT else (fan_in + fan_out) / 2


def _xavier(filler: ProtoMessage, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    limit = math.sqrt(3.0 / _fan(filler, shape))
    return torch.empty(shape).uniform_(-limit, limit, generator=generator)


def _msra(filler: ProtoMessage, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape).normal_(0.0, math.sqrt(2.0 / _fan(filler, shape)), generator=generator)


def _check_bilinear(shape: Shape, owner: str) -> None:
    if len(shape) != BILINEAR_AXES or shape[2] != shape[3]:
        raise ModelError(
            f'layer "{owner}": the bilinear filler needs a blob of 4 axes with square kernels, got {shape}'
        )


def _bilinear(_filler: ProtoMessage, shape: Shape, _: torch.Generator) -> torch.Tensor:
    size = shape[3]
    factor = math.ceil(size / 2)
    centre = (size - 1) / (2.0 * factor)
    line = 1 - (torch.arange(size) / factor - centre).abs()
    return (line[:, None] * line[None, :]).expand(shape).contiguous()


_FILLERS = {
    "constant": _constant,
    "uniform": _uniform,
    "gaussian": _gaussian,
    "positive_unitball": _positive_unitball,
    "xavier": _xavier,
    "msra": _msra,
    "bilinear": _bilinear,
}
