"""The batches of a check: kept while a calibration runs, read beside a record, or random numbers.

``<record>.check.npz`` is written with the record at the end of AMCT's calibration, for ``save_model``, which may run in
another process. It holds the inputs of the first batch by name and the SHA-256 of the record that it belongs to, and no
Python objects. It is read with the distrust that a file of unknown origin deserves: a wrong form, a wrong size or
another record means that random numbers are used instead.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import helper
from torch import Tensor
from torch.utils import _pytree as pytree

from amct.atomic import read_bytes
from amct.errors import FileError, ModelError
from amct.export.onnx.messages import MODEL_LIMIT_VARIABLE, model_limit
from amct.memory import gibibytes
from amct.numerics.observer import is_dense
from amct.printable import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray
    from onnx import ModelProto

logger = logging.getLogger(__name__)

CALIBRATION, RANDOM = "a calibration batch", "random inputs"
LARGEST_BATCH = 16_000_000
"""Bytes of a batch that is kept beside a record."""
MOST_SAMPLES = 16
"""A check needs no more samples than this, where the model does not fix their number."""
MOST_BATCHES = 8
"""A check needs no more batches than this."""
_RECORD, _NAMES, _INPUT = "record_sha256", "names", "input_"
_LARGEST_HEADERS = 1_000_000
_SEED = 20240607
_UNKNOWN_SIZE = 1
_DRAWN_BYTES = 8  # random numbers are drawn as float64 or int64


def batch_path(record: str | os.PathLike[str]) -> Path:
    """The path of the kept batch: ``<record>.check.npz``."""
    return Path(f"{os.fspath(record)}.check.npz")


def _arrays(batch: Any) -> list[Any]:  # noqa: ANN401  any tree of arrays and tensors
    """Its arrays and tensors; sparse and nested ones, which have no size in bytes, are refused where they are read."""
    leaves = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, (Tensor, np.ndarray)))
    return [leaf for leaf in leaves if isinstance(leaf, np.ndarray) or is_dense(leaf)]


def batch_size(batch: Any) -> tuple[int, int]:  # noqa: ANN401  as above
    """The samples of a batch, by the first axis of its largest array, and the bytes of all its arrays."""
    arrays = _arrays(batch)
    largest = max(arrays, key=lambda array: array.nbytes, default=None)
    samples = int(largest.shape[0]) if largest is not None and largest.ndim else 1
    return samples, sum(array.nbytes for array in arrays)


def first_samples(batch: Any, *, most: int | None = None, largest: int | None = None) -> Any:  # noqa: ANN401  as above
    """The first samples of a batch, at most so many and of so many bytes; None if not even one fits.

    The first axis counts the samples if all arrays have the same size there; otherwise the batch cannot be divided.
    """
    total = batch_size(batch)[1]
    fits = largest is None or total <= largest
    counts = {array.shape[0] if array.ndim else 0 for array in _arrays(batch)}
    samples = min(counts, default=0)
    if len(counts) != 1 or samples < 1:
        return batch if fits else None
    wanted = samples if largest is None or fits else samples * largest // total
    wanted = wanted if most is None else min(wanted, most)
    if wanted == samples:
        return batch
    return pytree.tree_map_only((Tensor, np.ndarray), lambda array: array[:wanted], batch) if wanted else None


def with_samples(batch: Any, count: int, first: int = 0) -> Any:  # noqa: ANN401  as above
    """So many samples of a batch that can be divided, from one on; behind the last one comes the first one again."""

    def chosen(array: Any) -> Any:  # noqa: ANN401  a tensor or an array
        return array[np.arange(first, first + count) % max(array.shape[0], 1)]

    return pytree.tree_map_only((Tensor, np.ndarray), chosen, batch)


def of_size(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """The samples of batches in batches of one size, the last one of each filled with its first samples."""
    for batch in batches:
        for first in range(0, batch_size(batch)[0], count):
            yield with_samples(batch, count, first)


def copied(batch: Any) -> Any:  # noqa: ANN401  as above
    """A copy of a batch, outside of any graph of gradients."""
    return pytree.tree_map_only(
        (Tensor, np.ndarray), lambda each: each.detach().clone() if isinstance(each, Tensor) else each.copy(), batch
    )


def kept_inputs(inputs: Mapping[str, NDArray[Any]], *, divisible: bool) -> dict[str, NDArray[Any]] | None:
    """A copy of a batch to be kept beside a record; None if it is too large, also as first samples if divisible."""
    small = first_samples(dict(inputs), largest=LARGEST_BATCH) if divisible else dict(inputs)
    return None if small is None or batch_size(small)[1] > LARGEST_BATCH else dict(copied(small))


class KeptBatches:
    """Copies of the first batches that pass by, for the check of the saved files, in a fixed budget of memory.

    Attributes:
        kept: The copies as arguments of the model: the first batch, and further ones as far as the budget goes.
        passed: How many batches passed by.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.passed = 0
        self._samples = self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether no further batch will be kept."""
        return self._samples >= MOST_SAMPLES or len(self.kept) >= MOST_BATCHES

    def passing(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches."""
        return map(self._count, batches)  # no frame keeps a batch while the model runs

    def _count(self, batch: Any) -> Any:  # noqa: ANN401  the door's arguments
        self.passed += 1
        return self.notice(batch)

    def notice(self, batch: Any) -> Any:  # noqa: ANN401  the door's arguments
        """Keep a copy of a batch if it fits; returns the batch."""
        if self.is_full:
            return batch
        samples, size = batch_size(batch)
        fits = self._samples + samples <= MOST_SAMPLES and self._bytes + size <= LARGEST_BATCH
        if fits or not self.kept:
            self.kept.append(copied(batch))
            self._samples += samples
            self._bytes += size
        return batch


# -- beside a record ---------------------------------------------------------------------------------------------------


def encode_batch(inputs: Mapping[str, NDArray[Any]], record: bytes) -> bytes:
    """The content of ``<record>.check.npz`` for the content of a record."""
    stream = io.BytesIO()
    arrays: dict[str, Any] = {_RECORD: np.array(_sha256(record)), _NAMES: np.array(list(inputs))}
    arrays |= {f"{_INPUT}{index}": array for index, array in enumerate(inputs.values())}
    np.savez(stream, **arrays)
    return stream.getvalue()


def read_batch(record_file: str | os.PathLike[str]) -> dict[str, NDArray[Any]] | str:
    """The batch kept beside a record, or the reason why there is none that can be used."""
    path = batch_path(record_file)
    if not path.is_file():
        return f"{path.name} does not exist"
    try:
        if path.stat().st_size > LARGEST_BATCH + _LARGEST_HEADERS:
            return f"{path.name} is larger than a kept batch can be"
        return _decoded(read_bytes(path), read_bytes(record_file), path.name)
    except (OSError, FileError) as error:
        return f"{path.name} cannot be read: {error}"


def _decoded(content: bytes, record: bytes, name: str) -> dict[str, NDArray[Any]] | str:
    damaged = f"{name} is not a kept batch"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                return damaged  # stored entries cannot grow when they are read
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            if str(arrays[_RECORD]) != _sha256(record):
                return f"{name} belongs to another record"
            names = [str(each) for each in arrays[_NAMES].reshape(-1)]
            found = {each: arrays[f"{_INPUT}{index}"] for index, each in enumerate(names)}
    except Exception:  # noqa: BLE001  a damaged file may raise any error of zipfile, numpy and the tokenizer it uses
        return damaged
    # NumPy returns an entry that is no array as its bytes.
    if any(not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub" for array in found.values()):
        return damaged
    return found


Declared = Mapping[str, tuple[Sequence[int], np.dtype[Any]]]
"""Inputs of a model by name: shape and type; a size that is not positive may vary."""


def declared_inputs(model: ModelProto) -> Declared:
    """What an ONNX model says of its inputs.

    Raises:
        ModelError: It does not say their type.
    """
    tensors = {value.name: value.type.tensor_type for value in model.graph.input}
    known = set(helper.get_all_tensor_dtypes())
    if unknown := [name for name, tensor in tensors.items() if tensor.elem_type not in known]:
        raise ModelError(
            f'the ONNX model does not say the type of its input "{escaped(unknown[0])}": the file is damaged'
        )
    return {
        name: ([size.dim_value for size in tensor.shape.dim], helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        for name, tensor in tensors.items()
    }


def batch_beside(
    record_file: str | os.PathLike[str], declared: Declared, *, any_size: bool = False
) -> tuple[dict[str, NDArray[Any]], str]:
    """The inputs on which the files of a record are checked, and what they are: the kept batch, or random numbers.

    Args:
        record_file: The record.
        declared: The inputs of the model, which the batch must fit.
        any_size: Whether the model takes inputs of other shapes than declared.
    """
    found = read_batch(record_file)
    if not isinstance(found, str) and not _fits(found, declared, any_size=any_size):
        found = f"{batch_path(record_file).name} does not fit the inputs of the model"
    if isinstance(found, str):
        if declared:
            logger.info("the files are checked on random inputs, not on calibration data: %s", found)
        return seeded_batch(declared), RANDOM
    logger.info("the files are checked on the calibration batch in %s", batch_path(record_file))
    open_ended = all(sizes and sizes[0] == 0 for sizes, _ in declared.values())
    return first_samples(found, most=MOST_SAMPLES) if open_ended else found, CALIBRATION


def _fits(found: Mapping[str, NDArray[Any]], declared: Declared, *, any_size: bool) -> bool:
    if set(found) != set(declared) or any_size:
        return set(found) == set(declared)
    return all(
        array.dtype == declared[name][1]
        and array.ndim == len(declared[name][0])
        and all(size in (0, own) for size, own in zip(declared[name][0], array.shape, strict=True))
        for name, array in found.items()
    )


def seeded_batch(inputs: Declared) -> dict[str, NDArray[Any]]:
    """Random inputs, the same in every process: normally distributed numbers, or integers 0 and 1.

    Sizes that may vary are 1.

    Raises:
        ModelError: The inputs would need too much memory.
    """
    random = np.random.default_rng(_SEED)
    found: dict[str, NDArray[Any]] = {}
    total = 0
    for name, (sizes, dtype) in inputs.items():
        shape = [size if size > 0 else _UNKNOWN_SIZE for size in sizes]
        total += math.prod(shape) * max(dtype.itemsize, _DRAWN_BYTES)
        if total > model_limit():
            raise ModelError(
                f'input "{name}" has shape {shape}: with it the inputs need {gibibytes(total)}; the limit is '
                f"{gibibytes(model_limit())}. If this size is intended, set {MODEL_LIMIT_VARIABLE} to a larger number"
            )
        values = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
        found[name] = np.asarray(values).astype(dtype)
    return found


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
