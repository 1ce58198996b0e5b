"""HDF5Data: arrays from HDF5 files that are listed in a text file; HDF5Output: two blobs to an HDF5 file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from amct.atomic import is_file, is_folder
from amct.caffe.engine.data_layers.data import PrefetchLayer
from amct.caffe.engine.hdf5 import Hdf5File, hdf5_library
from amct.caffe.engine.layer import Layer, register
from amct.caffe.engine.weights import is_hdf5
from amct.errors import FileError, ParseError

if TYPE_CHECKING:
    import numpy.typing as npt

    from amct.caffe.engine.blob import Blob, Shape
    from amct.caffe.engine.data_layers.data import Arrays, BatchSource

    Rows = npt.NDArray[np.float32]

logger = logging.getLogger(__name__)


class _RowBatches:
    """Rows of the files in order, starting over after the last; files and rows are shuffled on request."""

    def __init__(self, files: list[str], tops: list[str], *, batch_size: int, seed: int | None) -> None:
        self._files = files
        self._tops = tops
        self._batch_size = batch_size
        self._random = None if seed is None else np.random.default_rng(seed)
        self._file_order = np.arange(len(files))
        self._shuffle(self._file_order)
        self._file = 0
        self._row = 0
        self._arrays = self._load()
        self._row_order = self._new_row_order()

    @property
    def row_shapes(self) -> list[Shape]:
        """The shape of one row of each top."""
        return [array.shape[1:] for array in self._arrays]

    def next_batch(self) -> Arrays:
        batch = [np.empty((self._batch_size, *shape), np.float32) for shape in self.row_shapes]
        filled = 0
        while filled < self._batch_size:
            if self._row == len(self._row_order):
                self._next_file()
            count = min(self._batch_size - filled, len(self._row_order) - self._row)
            rows = self._row_order[self._row : self._row + count]
            for target, array in zip(batch, self._arrays, strict=True):
                target[filled : filled + count] = array[rows]
            filled += count
            self._row += count
        return batch

    def _next_file(self) -> None:
        self._row = 0
        if len(self._files) > 1:
            self._file += 1
            if self._file == len(self._files):
                self._file = 0
                self._shuffle(self._file_order)
            before = self.row_shapes
            self._arrays = self._load()
            if self.row_shapes != before:
                path = self._files[self._file_order[self._file]]
                raise ParseError(
                    f"{path}: its rows have shapes {self.row_shapes}, the previous file {before}: all files of "
                    "one HDF5Data layer need the same shapes"
                )
        self._row_order = self._new_row_order()

    def _new_row_order(self) -> npt.NDArray[np.intp]:
        order = np.arange(len(self._arrays[0]))
        self._shuffle(order)
        return order

    def _shuffle(self, order: npt.NDArray[np.intp]) -> None:
        if self._random is not None:
            self._random.shuffle(order)

    def _load(self) -> list[Rows]:
        path = self._files[self._file_order[self._file]]
        logger.debug("Loading HDF5 file: %s", path)
        arrays = read_datasets(path, self._tops)
        lengths = {name: len(array) for name, array in zip(self._tops, arrays, strict=True)}
        if len(set(lengths.values())) > 1:
            raise ParseError(f"{path}: all datasets must have the same number of rows, got {lengths}")
        if not len(arrays[0]):
            raise ParseError(f'{path}: dataset "{self._tops[0]}" is empty')
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

    def open_source(self) -> tuple[BatchSource, list[Shape]]:
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
        seed = self.new_seed() if options.shuffle else None
        source = _RowBatches(files, list(self.parameter.top), batch_size=options.batch_size, seed=seed)
        return source, [(options.batch_size, *shape) for shape in source.row_shapes]


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
