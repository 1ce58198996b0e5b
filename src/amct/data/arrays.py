"""Arrays saved by NumPy: .npy and .npz. Pickled objects are refused, since reading them runs code."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.errors import ArgumentError, FileError, ParseError, did_you_mean

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

DATA_NAMES = ("data", "images", "x", "inputs", "arr_0")
LABEL_NAMES = ("labels", "label", "y", "targets", "arr_1")


def read_arrays(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """All arrays of a file: of a .npz by their names, of a .npy under the name ``data``.

    Raises:
        FileError: The file cannot be read.
        ParseError: It is not what its name says, or holds pickled objects.
    """
    try:
        # opened here, because np.load forgets to close a damaged .npz
        with Path(path).open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"data": loaded}
            return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError as error:
        raise FileError(f"{path}: there is no such file") from error
    except (ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise ParseError(f"{path}: not an array file of NumPy (.npy, .npz), or damaged: {error}") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_array(path: str | os.PathLike[str], name: str | None = None) -> npt.NDArray[Any]:
    """One array of a file: the one called ``name``, else the only one, else one called data, images, x or inputs.

    Raises:
        FileError, ParseError: As for ``read_arrays``.
        ArgumentError: There is no array of that name, or the choice is not clear.
    """
    arrays = read_arrays(path)
    if name is not None:
        if name not in arrays:
            raise ArgumentError(
                f'{path}: no array called "{name}".{did_you_mean(name, arrays)} It has: {", ".join(arrays)}'
            )
        return arrays[name]
    chosen = choose(arrays, DATA_NAMES)
    if chosen is None and len(arrays) == 1:
        chosen = next(iter(arrays.values()))
    if chosen is None:
        raise ArgumentError(
            f"{path}: several arrays ({', '.join(arrays)}) and none called {', '.join(DATA_NAMES)}: say which"
        )
    return chosen


def choose(arrays: dict[str, npt.NDArray[Any]], names: tuple[str, ...]) -> npt.NDArray[Any] | None:
    """The first array that has one of the names, upper or lower case."""
    lower = {key.lower(): key for key in arrays}
    return next((arrays[lower[name]] for name in names if name in lower), None)


def is_array_file(path: Path) -> bool:
    """Whether the name says .npy or .npz."""
    return path.suffix.lower() in (".npy", ".npz")
