"""HDF5Data: arrays from HDF5 files that are listed in a text file; HDF5Output: two blobs to an HDF5 file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.atomic import is_file, is_folder
from amct.caffe.engine.data_layers.data import PrefetchLayer
from amct.caffe.engine.hdf5 import Hdf5File, hdf5_library
from amct.caffe.engine.layer import Layer, Shape, register
from amct.caffe.engine.weights import is_hdf5
from amct.errors import FileError, ParseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from amct.caffe.engine.blob import Blob
    from amct.caffe.engine.data_layers.data import Arrays

    Rows = npt.NDArray[np.float32]

logger = logging.getLogger(__name__)


def _shapes(arrays: list[Rows]) -> list[Shape]:
    """The shape of one row of each top."""
    return [array.shape[1:] for array in arrays]


def _parts(
    files: list[str], arrays: list[Rows], tops: list[str], shuffle: Callable[[Any], object]
) -> Iterator[tuple[list[Rows], npt.NDArray[np.intp]]]:
    """The arrays of one file after the other, the first ones given, each with the order of its rows; endless."""
    place = 0
    while True:
        order = np.arange(len(arrays[0]))
        shuffle(order)
        yield arrays, order
        if len(files) == 1:
            continue
        place = (place + 1) % len(files)
        if place == 0:
            shuffle(files)
        before, arrays = _shapes(arrays), _load(files[place], tops)
        if _shapes(arrays) != before:
            raise ParseError(
                f"{files[place]}: its rows have shapes {_shapes(arrays)}, the previous file {before}: all files of "
                "one HDF5Data layer need the same shapes"
            )


def _row_batches(
    parts: Iterator[tuple[list[Rows], npt.NDArray[np.intp]]], shapes: list[Shape], batch_size: int
) -> Iterator[Arrays]:
    """Batches of rows, which may come from several parts."""
    arrays, order = next(parts)
    while True:
        batch = [np.empty((batch_size, *shape), np.float32) for shape in shapes]
        filled = 0
        while filled < batch_size:
            if not len(order):
                arrays, order = next(parts)
            rows, order = np.split(order, [batch_size - filled])
            for target, array in zip(batch, arrays, strict=True):
                target[filled : filled + len(rows)] = array[rows]
            filled += len(rows)
        yield batch


def _load(path: str, tops: list[str]) -> list[Rows]:
    """The datasets of a file, which have as many rows each."""
    logger.debug("Loading HDF5 file: %s", path)
    arrays = read_datasets(path, tops)
    lengths = {name: len(array) for name, array in zip(tops, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        raise ParseError(f"{path}: all datasets must have the same number of rows, got {lengths}")
    if not len(arrays[0]):
        raise ParseError(f'{path}: dataset "{tops[0]}" is empty')
    return arrays


def read_datasets(path: str, names: list[str]) -> list[Rows]:
    """Datasets of an HDF5 file as float32.

    Raises:
        FileError: The file cannot be opened.
        ParseError: A dataset is missing, has no axis, or holds no numbers.
    """
    hdf5_library()
    if not is_file(path):
        raise FileError(f"Failed opening HDF5 file: {path}: there is no such file (looked for in {Path.cwd()})")
    try:
        opened = Hdf5File(path)
    except FileError as error:
        raise ParseError(f"Failed opening HDF5 file: {path}: {error}") from error
    with opened as file:
        return [_dataset(file, name, path) for name in names]


def _dataset(file: Hdf5File, name: str, path: str) -> Rows:
    values = file.array(name)
    if values is None:
        raise ParseError(
            f'{path}: Failed to find HDF5 dataset "{name}" (named after the top). The file has: '
            f"{', '.join(sorted(file.names())) or 'nothing'}"
        )
    if not values.shape:
        raise ParseError(
            f'{path}: dataset "{name}" must hold numbers along at least one axis, it is {values.dtype} of shape ()'
        )
    return values.astype(np.float32)


@register("HDF5Data")
class HDF5Data(PrefetchLayer):
    """Each top is the dataset of the same name, unchanged."""

    top_count = (1, None)

    def open_source(self) -> tuple[Iterator[Arrays], list[Shape]]:
        """Read the list and load the first file."""
        options = self.parameter.hdf5_data_param
        if self.parameter.HasField("transform_param"):
            raise self.error("HDF5Data does not transform data: remove transform_param")
        if not options.source or not options.batch_size:
            raise self.error("hdf5_data_param needs source (a text file that lists HDF5 files) and batch_size > 0")
        try:
            files = Path(options.source).read_text(encoding="utf-8").split()
        except UnicodeDecodeError as error:
            raise ParseError(
                f"{options.source}: not a text file; source must list HDF5 files, one a line, not be one itself"
            ) from error
        except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
            reason = getattr(error, "strerror", None) or error
            raise FileError(f"Failed to open source file: {options.source}: {reason}") from error
        if not files:
            raise self.error(f"Must have at least 1 HDF5 filename listed in {options.source}")
        shuffle = np.random.default_rng(self.new_seed()).shuffle if options.shuffle else lambda _: None
        shuffle(files)
        tops = list(self.parameter.top)
        first = _load(files[0], tops)
        batches = _row_batches(_parts(files, first, tops, shuffle), _shapes(first), options.batch_size)
        return batches, [(options.batch_size, *shape) for shape in _shapes(first)]


_DATASETS = ("data", "label")
_AXES = 4


@register("HDF5Output")
class HDF5Output(Layer):
    """Writes datasets ``data`` and ``label`` of four axes each, whatever the bottoms' names.

    Caffe writes one batch and aborts at the second; here later batches are appended.
    """

    bottom_count = (2, 2)
    top_count = (0, 0)

    def setup(self, bottoms: list[Shape]) -> None:
        """Check that the file can be created."""
        name = self.parameter.hdf5_output_param.file_name
        if not name:
            raise self.error("hdf5_output_param needs file_name")
        self._path = Path(name)
        if not is_folder(self._path.absolute().parent):
            raise FileError(f'layer "{self.name}": Failed to open HDF5 file {name}: its folder does not exist')
        if is_file(self._path) and not is_hdf5(self._path):  # a prototxt of someone else must not replace any file
            raise FileError(
                f'layer "{self.name}": {name} exists and is no HDF5 file, so it is not replaced; remove it, or write '
                "another file_name"
            )
        self._is_new = True
        hdf5_library()

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """No tops."""
        if bottoms[0][:1] != bottoms[1][:1]:
            raise self.error(f"data and label must have the same number of rows, got {bottoms[0]} and {bottoms[1]}")
        for shape in bottoms:
            if not 1 <= len(shape) <= _AXES:
                raise self.error(f"writes blobs of 1 to {_AXES} axes, got {shape}")
        return []

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Write the first batch, append later ones."""
        h5py = hdf5_library()
        try:
            with h5py.File(self._path, "w" if self._is_new else "r+") as file:
                for name, blob in zip(_DATASETS, bottoms, strict=True):
                    shape = blob.shape + (1,) * (_AXES - len(blob.shape))
                    values = blob.tensor.detach().to("cpu").contiguous().numpy().reshape(shape)
                    if self._is_new:
                        file.create_dataset(name, data=values, maxshape=(None, *shape[1:]))
                    else:
                        dataset = file[name]
                        dataset.resize(len(dataset) + len(values), axis=0)
                        dataset[-len(values) :] = values
        except OSError as error:
            raise FileError(f'layer "{self.name}": {self._path} cannot be written: {error}') from error
        self._is_new = False
