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

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto, TensorProto

from amct.arguments import LONGEST_NAME
from amct.atomic import FileGroup
from amct.errors import ExportError
from amct.export.formats import ExportedModel, file_name
from amct.export.onnx.kept_weights import copy_fields, initializer_bytes, model_parts, tensor_array

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from amct.export.formats import Exported
    from amct.export.request import SavePath

logger = logging.getLogger(__name__)

EXTERNAL_THRESHOLD = 2_000_000_000
"""A serialized model of at least this size is split; protobuf's own limit is 2^31 bytes."""
_NAMES_SHOWN = 3


def save_model(
    path: Path, model: ModelProto, *, external_suffix: str = ".external", external_threshold: int | None = None
) -> list[Path]:
    """Write one model and, if it is large, the files of its tensors; returns their paths.

    Args:
        path: the path of the model.
        model: the model; it is not changed.
        external_suffix: the end of the names of the files of tensors.
        external_threshold: the serialized size from which there are such files; None: that of all saves.

    Raises:
        ExportError: it cannot be made small enough.
        FileError: a file cannot be written; none was.
    """
    with FileGroup() as group:
        written = _write_model(group, path, model, external_suffix, external_threshold or EXTERNAL_THRESHOLD)
        warn_of_replaced(group.written())
    return written


def add_exported(group: FileGroup, where: SavePath, name: str, exported: Exported) -> list[Path]:
    """Write what an exporter made in one format as part of a group; returns the paths of its files.

    Raises:
        ExportError: a model cannot be made small enough.
    """
    if isinstance(exported, ExportedModel):
        file = file_name(name)
        suffix = f"_{Path(file).stem.removesuffix('_model').replace('_', '')}.external"
        return _write_model(group, where.file(file), exported.model, suffix, EXTERNAL_THRESHOLD)
    for file, parts in exported.files.items():
        with group.open(where.file(file)) as stream:
            stream.writelines(parts)
    return [where.file(file) for file in exported.files]


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
    with group.open(path) as stream:
        for part in model_parts(_with_external(model, moved)):
            stream.write(part)
    for index, name in moved.items():
        with group.open(path.parent / name) as stream:
            stream.write(_raw_bytes(model.graph.initializer[index]))
    return [path, *(path.parent / name for name in moved.values())]


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


def warn_of_replaced(paths: Iterable[Path]) -> None:
    """Log one line that names the first few of the files that exist already."""
    existing = [path for path in paths if path.exists()]
    if not existing:
        return
    names = ", ".join(path.name for path in existing[:_NAMES_SHOWN])
    more = f" and {len(existing) - _NAMES_SHOWN} more" if len(existing) > _NAMES_SHOWN else ""
    verb = "exists and is replaced" if len(existing) == 1 else "exist and are replaced"
    logger.warning("%s: %s%s %s", existing[0].parent, names, more, verb)
