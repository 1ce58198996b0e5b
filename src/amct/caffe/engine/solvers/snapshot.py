"""Snapshots: the caffemodel and the solver state of one iteration, written both or neither, in Caffe's two formats."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.atomic import FileGroup, is_file, is_folder
from amct.caffe.engine import weights
from amct.caffe.engine.hdf5 import Hdf5File, hdf5_library
from amct.caffe.engine.wire import StoredBlob, StoredState, blob_parts, read_solver_state, state_parts
from amct.errors import ConfigError, FileError, ParseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import h5py

    from amct.caffe.engine.graph import NetGraph
    from amct.caffe.engine.messages import ProtoMessage

logger = logging.getLogger(__name__)

_HDF5 = 0


def check_snapshots(parameter: ProtoMessage) -> None:
    """Check before training that snapshots can be written.

    Raises:
        ConfigError: ``snapshot`` is set without ``snapshot_prefix``, or its folder does not exist.
    """
    if not parameter.snapshot:
        return
    if not parameter.snapshot_prefix:
        raise ConfigError("In solver params, snapshot is specified but snapshot_prefix is not")
    _check_folder(parameter.snapshot_prefix)


def _check_folder(prefix: str) -> None:
    folder = Path(prefix).parent
    if not is_folder(folder):
        raise ConfigError(
            f"Cannot write to snapshot prefix '{prefix}'.  Make sure that the directory exists and is writable: there "
            f"is no folder {folder.absolute()}"
        )


def snapshot_names(parameter: ProtoMessage, iteration: int) -> tuple[str, str]:
    """The caffemodel and the solver state of an iteration."""
    ending = ".h5" if parameter.snapshot_format == _HDF5 else ""
    stem = f"{parameter.snapshot_prefix}_iter_{iteration}"
    return f"{stem}.caffemodel{ending}", f"{stem}.solverstate{ending}"


def write_snapshot(graph: NetGraph, state: StoredState, parameter: ProtoMessage) -> tuple[str, str]:
    """Write ``<prefix>_iter_<n>.caffemodel`` and ``.solverstate`` (``.h5`` appended in HDF5), and return both names.

    Raises:
        ConfigError: There is no prefix, or its folder does not exist.
        FileError: A file cannot be written; then neither is changed.
    """
    if not parameter.snapshot_prefix:
        raise ConfigError("a snapshot needs snapshot_prefix in the solver, the start of its file names")
    _check_folder(parameter.snapshot_prefix)
    ending = ".h5" if parameter.snapshot_format == _HDF5 else ""
    what = "HDF5" if ending else "binary proto"
    model, solver_state = snapshot_names(parameter, state.iteration)
    state.learned_net = model
    logger.info("Snapshotting to %s file %s", what, model)
    logger.info("Snapshotting solver state to %s file %s", what, solver_state)
    with FileGroup() as files:
        if ending:
            weights.write_hdf5(graph, files.path(model), with_diff=parameter.snapshot_diff)
            _write_state_hdf5(files.path(solver_state), state)
        else:
            _write(files, model, weights.caffemodel_parts(graph, with_diff=parameter.snapshot_diff))
            history = [blob_parts(blob.shape, blob.values) for blob in state.history]
            _write(files, solver_state, state_parts(state.iteration, model, history, state.current_step))
    return model, solver_state


def _write(files: FileGroup, path: str, parts: Sequence[bytes | memoryview]) -> None:
    with files.open(path) as file:
        file.writelines(parts)


def _write_state_hdf5(path: Path, state: StoredState) -> None:
    with hdf5_library().File(path, "w") as file:
        for name, value in (("iter", state.iteration), ("current_step", state.current_step)):
            file.create_dataset(name, data=np.array([value], np.int32))
        _write_c_string(file, "learned_net", state.learned_net or "")
        group = file.create_group("history")
        for index, blob in enumerate(state.history):
            group.create_dataset(str(index), data=np.asarray(blob.values, np.float32).reshape(blob.shape))


def _write_c_string(file: h5py.File, name: str, text: str) -> None:
    """Write a zero-terminated string, as Caffe expects; h5py writes none by itself."""
    h5py = hdf5_library()
    content = text.encode() + b"\0"
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(len(content))
    kind.set_strpad(h5py.h5t.STR_NULLTERM)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR))
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(content, f"S{len(content)}"), mtype=kind)


def read_state(path: str) -> StoredState:
    """Read a solver state; the format is detected from the content.

    Raises:
        FileError: The file cannot be read.
        ParseError: It is not a solver state.
    """
    try:
        if weights.is_hdf5(path):
            return _read_state_hdf5(path)
        return read_solver_state(weights.read_file(path), path)
    except FileError as error:
        if is_file(path):
            raise
        raise FileError(f"File not found: {path} (the solver state; looked for in {Path.cwd()}): {error}") from error


def _read_state_hdf5(path: str) -> StoredState:
    with Hdf5File(path) as file:
        history = []
        for index in range(len(file.names("history"))):
            values = file.array("history", str(index))
            if values is None:
                raise ParseError(f'{path}: not an HDF5 solver state: "history" has no dataset "{index}"')
            history.append(StoredBlob(values.shape, values.reshape(-1)))
        return StoredState(
            iteration=_number(file, "iter", path),
            learned_net=file.text("learned_net"),
            history=history,
            current_step=_number(file, "current_step", path),
        )


def _number(file: Hdf5File, name: str, path: str) -> int:
    values = file.array(name)
    if values is None or values.size != 1 or values.dtype.kind not in "iu":
        raise ParseError(f'{path}: not an HDF5 solver state: it has no dataset "{name}" with one integer')
    return int(values.reshape(-1)[0])


def find_learned_net(state: StoredState, state_path: str) -> str:
    """The caffemodel that a state names: at the stored path, else in the folder of the state file.

    Raises:
        FileError: It is in neither place.
    """
    stored = state.learned_net or ""
    if is_file(stored):
        return stored
    beside = Path(state_path).parent / Path(stored).name
    if is_file(beside):
        logger.info("%s names %s, which does not exist; using %s", state_path, stored, beside)
        return str(beside)
    raise FileError(
        f'{state_path}: the caffemodel it names, "{stored}", is neither there (relative to the current folder, '
        f"{Path.cwd()}) nor next to the state file ({beside})"
    )


def history_tensors(state: StoredState, shapes: Sequence[tuple[int, ...]], source: str) -> list[torch.Tensor]:
    """The history of a state as tensors of the shapes a solver expects.

    Raises:
        ConfigError: Their number or a shape differs: the state is of another solver type or another net.
    """
    if len(state.history) != len(shapes):
        raise ConfigError(
            f"{source}: Incorrect length of history blobs: the file has {len(state.history)}, this solver needs "
            f"{len(shapes)}. Is it of another solver type or net?"
        )
    tensors = []
    for index, (blob, shape) in enumerate(zip(state.history, shapes, strict=True)):
        legacy = (1,) * (4 - len(shape)) + tuple(shape)
        if blob.shape != (legacy if blob.is_legacy else tuple(shape)) or blob.values.size != np.prod(shape):
            raise ConfigError(
                f"{source}: history blob {index} has shape {blob.shape} ({blob.values.size} values), this net needs "
                f"{tuple(shape)}. Is the state of another net?"
            )
        tensors.append(torch.from_numpy(np.array(blob.values, np.float32)).reshape(tuple(shape)))
    return tensors
