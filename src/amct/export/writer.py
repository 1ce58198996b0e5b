"""Writes exported models: file names from a save path, large tensors in separate files, all files or none.

=====================================  =================================================================================
``save_path`` "out/net"                out/net_deploy_model.onnx, out/net_fake_quant_model.onnx,
                                       out/net_qdq_model.onnx, out/net_quant.json, out/net_record.txt
"out/" or ""                           out/deploy_model.onnx, …; deploy_model.onnx, … in the current folder
a model of 2 000 000 000 bytes or      its largest tensors in files of their own, ``<tensor>_deploy.external``,
more                                   ``<tensor>_fakequant.external``, ``<tensor>_qdq.external``
=====================================  =================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto, TensorProto

from amct.arguments import LONGEST_NAME
from amct.atomic import FileGroup
from amct.errors import ArgumentError, ExportError
from amct.export.onnx.file_parts import initializer_bytes, model_parts
from amct.export.onnx.messages import copy_fields, tensor_array
from amct.export.save_path import SavePath, warn_of_replaced
from amct.model.quant_json import write_quant_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from amct.model.quant_json import QuantJson

EXTERNAL_THRESHOLD = 2_000_000_000
"""A serialized model of at least this size is split; protobuf's own limit is 2^31 bytes."""
OPSETS = range(16, 22)
"""Opsets that users can choose."""


def check_opset(opset: int) -> None:
    """Check a user-chosen opset.

    Raises:
        ArgumentError: it is not one of 16..21.
    """
    if opset not in OPSETS:
        raise ArgumentError(f"opset: expected {OPSETS[0]}..{OPSETS[-1]}, got {opset}")


def save_models(
    save_path: SavePath,
    files: Mapping[str, ModelProto | bytes] | Iterable[tuple[str, ModelProto | bytes]],
    *,
    after_each: Callable[[FileGroup, str], None] | None = None,
    others: Mapping[Path, bytes] | None = None,
    document: QuantJson | Callable[[], QuantJson] | None = None,
    external_threshold: int = EXTERNAL_THRESHOLD,
) -> list[Path]:
    """Write the files of one save as one group: after a kill or an error, all files are old or all are new.

    Args:
        save_path: folder and prefix.
        files: models (or the bytes of other exported files) by file name without the prefix; they are not changed. An
            iterable may make each when it is asked for, so that one is in memory at a time.
        after_each: called with the name of each file when it is written, under its temporary name.
        others: further files of the group, by path.
        document: the content of ``<prefix>_quant.json``, which lists the other files with their SHA-256; or a function
            that makes it when they are written.
        external_threshold: the serialized size from which tensors are stored in separate files.

    Returns:
        The files, in the order of writing.

    Raises:
        ExportError: a model cannot be made small enough.
        FileError: a file cannot be written; none was.
    """
    written: list[Path] = []
    with FileGroup() as group:
        for name, content in files.items() if isinstance(files, Mapping) else files:
            written += add_file(group, save_path.file(name), content, name, external_threshold)
            del content  # the next one is made now
            if after_each is not None:
                after_each(group, name)
        for path, data in (others or {}).items():
            group.write_bytes(path, data)
            written.append(path)
        if document is not None:
            listed = document() if callable(document) else document
            write_quant_json(group, save_path.quant_json, listed)
            written.append(save_path.quant_json)
        warn_of_replaced(group.written())
    return written


def save_model(
    path: Path, model: ModelProto, *, external_suffix: str = ".external", external_threshold: int = EXTERNAL_THRESHOLD
) -> list[Path]:
    """Write one model and, if it is large, the files of its tensors; returns their paths.

    Raises:
        ExportError: it cannot be made small enough.
        FileError: a file cannot be written; none was.
    """
    with FileGroup() as group:
        written = _write_model(group, path, model, external_suffix, external_threshold)
        warn_of_replaced(group.written())
    return written


def add_file(
    group: FileGroup,
    path: Path,
    content: ModelProto | bytes,
    name: str,
    external_threshold: int = EXTERNAL_THRESHOLD,
) -> list[Path]:
    """Write one exported file as part of a group, as ``add_model``; returns the paths of its files."""
    if isinstance(content, bytes):
        group.write_bytes(path, content)
        return [path]
    return add_model(group, path, content, name, external_threshold)


def add_model(
    group: FileGroup, path: Path, model: ModelProto, name: str, external_threshold: int = EXTERNAL_THRESHOLD
) -> list[Path]:
    """Write one model as part of a group; returns the paths of its files.

    Args:
        group: the file group.
        path: the path of the model.
        model: the model; it is not changed.
        name: its file name without the prefix, after which files of large tensors are named.
        external_threshold: the serialized size from which tensors are stored in separate files.

    Raises:
        ExportError: it cannot be made small enough.
    """
    suffix = f"_{Path(name).stem.removesuffix('_model').replace('_', '')}.external"
    return _write_model(group, path, model, suffix, external_threshold)


def _write_model(group: FileGroup, path: Path, model: ModelProto, suffix: str, threshold: int) -> list[Path]:
    rest = _bare_size(model) + sum(initializer_bytes(tensor) for tensor in model.graph.initializer)
    moved: dict[int, str] = {}
    sizes = enumerate(model.graph.initializer) if rest >= threshold else ()
    for size, index in sorted(((_data_size(tensor), index) for index, tensor in sizes), reverse=True):
        if rest < threshold:
            break
        tensor = model.graph.initializer[index]
        moved[index] = _external_name(tensor.name, suffix, moved.values())
        rest -= size
    if rest >= threshold:
        raise ExportError(
            f'"{path}": {rest} bytes remain besides the tensors that can be stored apart; the limit is {threshold}'
        )
    written = [path]
    for index, name in moved.items():
        with group.open(path.parent / name) as stream:
            stream.write(_raw_bytes(model.graph.initializer[index]))
        written.append(path.parent / name)
    with group.open(path) as stream:
        for part in model_parts(_with_external(model, moved)):
            stream.write(part)
    return written


def _with_external(model: ModelProto, moved: Mapping[int, str]) -> ModelProto:
    """The model with some tensors replaced by references to files; the model itself if there are none."""
    if not moved:
        return model
    slim = ModelProto()
    copy_fields(model, slim, skip={"graph"})
    copy_fields(model.graph, slim.graph, skip={"initializer"})
    for index, tensor in enumerate(model.graph.initializer):
        kept = slim.graph.initializer.add()
        if index not in moved:
            kept.CopyFrom(tensor)
            continue
        kept.name, kept.data_type = tensor.name, tensor.data_type
        kept.dims.extend(tensor.dims)
        kept.data_location = TensorProto.EXTERNAL
        for key, value in (("location", moved[index]), ("offset", "0"), ("length", str(_data_size(tensor)))):
            kept.external_data.add(key=key, value=value)
    return slim


def _bare_size(model: ModelProto) -> int:
    """Serialized size of everything but the initializers, without serializing those."""
    bare = ModelProto()
    copy_fields(model, bare, skip={"graph"})
    copy_fields(model.graph, bare.graph, skip={"initializer"})
    return bare.ByteSize()


def _data_size(tensor: TensorProto) -> int:
    return len(tensor.raw_data) if tensor.HasField("raw_data") else int(tensor_array(tensor).nbytes)


def _raw_bytes(tensor: TensorProto) -> bytes | memoryview:
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    array = np.asarray(tensor_array(tensor), order="C")
    return array.reshape(-1).data.cast("B") if array.size else b""


def _external_name(tensor: str, suffix: str, taken: Collection[str]) -> str:
    """A unique file name for a tensor; characters that file systems do not allow become "_"."""
    base = re.sub(r"[^\w.\-]", "_", tensor).lstrip(".")[: LONGEST_NAME - len(suffix) - 8] or "tensor"
    name, number = f"{base}{suffix}", 1
    while name in taken:
        name, number = f"{base}_{number}{suffix}", number + 1
    return name
