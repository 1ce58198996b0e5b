"""HDF5Output: writes two blobs to an HDF5 file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from amct.atomic import is_file, is_folder
from amct.caffe.engine.hdf5 import hdf5_library
from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.weights import is_hdf5
from amct.errors import FileError

if TYPE_CHECKING:
    from amct.caffe.engine.blob import Blob, Shape

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
