"""Reads HDF5 files: weights, solver states and data. A damaged or hostile file gives one error that names it.

Only what the file itself stores is read: links and storage in other files are refused, and sizes are checked before
memory is allocated.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from amct.data.arrays import check_expansion
from amct.errors import AmctError, FileError, ParseError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType, TracebackType

    import numpy as np
    import numpy.typing as npt

    from amct.atomic import AnyPath


def hdf5_library() -> ModuleType:
    """The h5py package.

    Raises:
        AmctError: It is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise AmctError("HDF5 files need the h5py package, which is not installed: pip install amct[caffe]") from error
    return h5py  # type: ignore[no-any-return]  # it ships no types


class Hdf5File:
    """An HDF5 file that is open for reading.

    Args:
        path: The file.

    Raises:
        FileError: It cannot be opened.
    """

    def __init__(self, path: AnyPath) -> None:
        self._library = hdf5_library()
        self._path = os.fspath(path)
        try:
            self._size = os.stat(path).st_size  # noqa: PTH116 - a path as it was given
            self._file = self._library.File(path, "r")
        except Exception as error:  # h5py raises many types, ValueError for a NUL character in the path
            raise FileError(f"Couldn't open {self._path}: {error}") from error

    def __enter__(self) -> Hdf5File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def has(self, *place: str) -> bool:
        """Whether there is a group or dataset, which is given by the names from the root.

        Raises:
            ParseError: The file is damaged.
        """
        with self._naming_errors("/".join(place)):
            return self._find(place) is not None

    def names(self, *place: str) -> list[str]:
        """The names of a group, which is given by the names from the root; empty if there is no such group.

        Raises:
            ParseError: The file is damaged.
        """
        with self._naming_errors("/".join(place) or "/"):
            found = self._find(place)
            return [str(name) for name in found] if isinstance(found, self._library.Group) else []

    def array(self, *place: str) -> npt.NDArray[np.generic] | None:
        """The numbers of a dataset, which is given by the names from the root; None if there is no such dataset.

        Raises:
            ParseError: The file is damaged, or the dataset holds no numbers or too many.
        """
        name = "/".join(place)
        with self._naming_errors(name):
            dataset = self._find(place)
            if not isinstance(dataset, self._library.Dataset):
                return None
            if dataset.external or dataset.is_virtual:
                raise self._damaged(f'dataset "{name}" is stored in another file, which is not read')
            if dataset.dtype.kind not in "fiu" or dataset.shape is None:
                raise ParseError(
                    f'{self._path}: dataset "{name}" must hold numbers, it is {dataset.dtype} of shape {dataset.shape}'
                )
            check_expansion(dataset.size * dataset.dtype.itemsize, self._size, f'{self._path}: dataset "{name}"')
            values: npt.NDArray[np.generic] = dataset[()]
            return values

    def text(self, *place: str) -> str | None:
        """The text of a dataset; None if there is no such dataset.

        Raises:
            ParseError: The file is damaged, or the dataset holds no text.
        """
        name = "/".join(place)
        with self._naming_errors(name):
            dataset = self._find(place)
            if not isinstance(dataset, self._library.Dataset):
                return None
            value = dataset[()]
            if isinstance(value, bytes):
                value = value.decode()
            if not isinstance(value, str):
                raise ParseError(f'{self._path}: dataset "{name}" must hold a text, it is {dataset.dtype}')
            return value

    def _find(self, place: tuple[str, ...]) -> Any:  # noqa: ANN401 - h5py ships no types
        found: Any = self._file
        for part in "/".join(place).split("/"):
            if not part:
                continue
            if not isinstance(found, self._library.Group) or part not in found:
                return None
            if not isinstance(found.get(part, getlink=True), self._library.HardLink):
                raise self._damaged(f'"{part}" is a link, which is not followed')
            found = found[part]
        return found

    @contextmanager
    def _naming_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except AmctError:
            raise
        except Exception as error:  # h5py raises OSError, RuntimeError, KeyError, TypeError and others
            raise self._damaged(f'"{name}": {error}') from error

    def _damaged(self, reason: str) -> ParseError:
        return ParseError(f"{self._path}: the HDF5 file is damaged: {reason}. Copy or write it again")
