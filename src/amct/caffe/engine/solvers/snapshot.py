"""Snapshots: the caffemodel and the solver state of one iteration, written both or neither, in Caffe's two formats."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.atomic import FileGroup
from amct.caffe.engine import weights
from amct.caffe.engine.wire import StoredBlob, StoredState, blob_parts, read_solver_state, state_parts
from amct.errors import ConfigError, FileError, ParseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import h5py

    from amct.caffe.engine.build.graph import Graph
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
    if not folder.is_dir():
        raise ConfigError(
            f"Cannot write to snapshot prefix '{prefix}'.  Make sure that the directory exists and is writable: there "
            f"is no folder {folder.absolute()}"
        )


def write_snapshot(graph: Graph, state: StoredState, parameter: ProtoMessage) -> tuple[str, str]:
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
    stem = f"{parameter.snapshot_prefix}_iter_{state.iteration}"
    model, solver_state = f"{stem}.caffemodel{ending}", f"{stem}.solverstate{ending}"
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
        for part in parts:
            file.write(part)


def _write_state_hdf5(path: Path, state: StoredState) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, value in (("iter", state.iteration), ("current_step", state.current_step)):
            file.create_dataset(name, data=np.array([value], np.int32))
        _write_c_string(file, "learned_net", state.learned_net or "")
        group = file.create_group("history")
        for index, blob in enumerate(state.history):
            group.create_dataset(str(index), data=np.asarray(blob.values, np.float32).reshape(blob.shape))


def _write_c_string(file: h5py.File, name: str, text: str) -> None:
    """Write a zero-terminated string, as Caffe expects; h5py writes none by itself."""
    import h5py

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
        raise FileError(f"File not found: {path} (the solver state; looked for in {Path.cwd()}): {error}") from error


def _read_state_hdf5(path: str) -> StoredState:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            group = file["history"]
            arrays = [group[str(index)][()] for index in range(len(group))]
            name = file["learned_net"][()] if "learned_net" in file else None
            return StoredState(
                iteration=int(file["iter"][0]),
                learned_net=name.decode() if isinstance(name, bytes) else name,
                history=[StoredBlob(array.shape, array.reshape(-1)) for array in arrays],
                current_step=int(file["current_step"][0]),
            )
    except (KeyError, OSError, AttributeError, IndexError, ValueError, TypeError) as error:
        raise ParseError(f"{path}: not an HDF5 solver state: {error}") from error


def find_learned_net(state: StoredState, state_path: str) -> str:
    """The caffemodel that a state names: at the stored path, else in the folder of the state file.

    Raises:
        FileError: It is in neither place.
    """
    stored = state.learned_net or ""
    if Path(stored).is_file():
        return stored
    beside = Path(state_path).parent / Path(stored).name
    if beside.is_file():
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
