"""Snapshots: the caffemodel and the solver state of one iteration, both or neither, in Caffe's two formats."""

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

    from amct.caffe.engine.graph import Graph
    from amct.caffe.engine.messages import ProtoMessage

logger = logging.getLogger(__name__)

_HDF5 = 0


def check_snapshots(parameter: ProtoMessage) -> None:
    """Find out before training starts whether snapshots can be written.

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
        raise ConfigError("a snapshot needs snapshot_prefix in the solver, the beginning of the names of its files")
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
            files.write_parts(model, weights.caffemodel_parts(graph, with_diff=parameter.snapshot_diff))
            files.write_parts(solver_state, _state_parts(state))
    return model, solver_state
