"""Runs a file of a large model in a process of its own, with a limit of time: its memory is returned to the system.

``measured_in_child`` starts ``python -m amct.export.check.child folder``, whose folder has the files to run:

==================  ====================================================================================================
``task.json``       format of the file, and the nodes with packed weights
``file.onnx``       the written file; the files of its large tensors have their final names
``float.onnx``      the float model
``inputs.npz``      the batch
``expected.npz``    the outputs of the float model, unless the float file gives them
``result.json``     written by the child: the outcome, or the error
==================  ====================================================================================================
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from amct.errors import AmctError, ExportError, ModelError
from amct.export.check.integers import standard_model
from amct.export.check.losses import Similarity, output_similarity
from amct.export.check.running import LoadedModel, speed_of
from amct.export.formats import save_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto

LARGE = 500_000_000
"""Bytes of a float model whose files are run in a process of their own."""
LONGEST = 180.0
"""Seconds that the check of one file may take."""


class OutOfTimeError(AmctError):
    """A file was not checked within the limit of time."""


def measured_in_child(
    file: Path,
    beside: Mapping[str, Path],
    original: ModelProto,
    task: Mapping[str, Any],
    inputs: Mapping[str, NDArray[Any]],
    expected: Mapping[str, NDArray[Any]] | None,
) -> dict[str, Any]:
    """Run a file and compare it with the float model.

    Args:
        file: The file, under any name.
        beside: The files of its large tensors by their final names.
        original: The float model.
        task: The content of ``task.json``.
        inputs: The batch.
        expected: The outputs of the float model; None: the child runs it.

    Returns:
        The content of ``result.json``.

    Raises:
        OutOfTimeError: it took too long, or the child ended without a result.
    """
    with _folder(file.parent) as folder:
        _link(file, folder / "file.onnx")
        for name, path in beside.items():
            _link(path, folder / name)
        save_model(folder / "float.onnx", original, external_suffix=".float")
        (folder / "task.json").write_text(json.dumps(dict(task)))
        np.savez(folder / "inputs.npz", **_numbered(inputs))
        if expected is not None:
            np.savez(folder / "expected.npz", **_numbered(expected))
        found_in = os.pathsep.join(filter(None, sys.path))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "amct.export.check.child", str(folder.resolve())],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": found_in},
                capture_output=True,
                timeout=LONGEST,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise OutOfTimeError(f"it took more than {LONGEST:.0f} s") from error
        result = folder / "result.json"
        if not result.is_file():
            last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
            raise OutOfTimeError(f"the process that ran it ended with {done.returncode}: {last}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


@contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    """A folder in the same file system, so that large files are linked and not copied."""
    folder = Path(tempfile.mkdtemp(prefix=".check-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def _numbered(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    return {"names": np.array(list(arrays)), **{str(place): array for place, array in enumerate(arrays.values())}}


def _read_numbered(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path, allow_pickle=False) as arrays:
        return {str(name): arrays[str(place)] for place, name in enumerate(arrays["names"])}


# -- in the child ------------------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    """Run the task of a folder and write its result."""
    try:
        result = _result(folder)
    except ModelError as error:
        result = {"error": str(error)}
    except AmctError as error:
        result = {"not_checked": str(error)}
    (folder / "result.json").write_text(json.dumps(result))


def _result(folder: Path) -> dict[str, Any]:
    task = json.loads((folder / "task.json").read_text())
    inputs = _read_numbered(folder / "inputs.npz")
    given = folder / "expected.npz"
    model: ModelProto | Path = folder / "file.onnx"
    if task["format"] == "deploy":
        model = standard_model(onnx.load(folder / "file.onnx"), packed=task["packed"])
    timed = task["format"] == "qdq"
    file = LoadedModel(model, profile=timed)
    outputs = file.run(inputs)
    try:
        original = LoadedModel(folder / "float.onnx") if timed or not given.is_file() else None
        expected = original.run(inputs) if original is not None else {}
    except ModelError as error:
        raise ExportError(f"the float model cannot be run: {error}") from error
    if given.is_file():
        expected = _read_numbered(given)
    similarity, reasons = output_similarity(expected, outputs)
    result: dict[str, Any] = {"reasons": reasons, "similarity": None if similarity is None else asdict(similarity)}
    if timed and original is not None:
        result["speed"] = asdict(speed_of(file, original, inputs))
    return result


def similarity_of(result: Mapping[str, Any]) -> Similarity | None:
    """The similarity in the content of ``result.json``."""
    found = result.get("similarity")
    return None if found is None else Similarity(**found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
