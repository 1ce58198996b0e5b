"""Reads NumPy files, .npy and .npz. Files with pickled objects are rejected, because unpickling can run code."""

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
    """Return all arrays of a file by name; the array of a .npy file gets the name ``data``.

    Raises:
        FileError: The file cannot be read.
        ParseError: The file is not a valid .npy or .npz file, or contains pickled objects.
    """
    try:
        # opened here, because np.load does not close a damaged .npz file
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
    """Return one array of a file.

    Args:
        path: The .npy or .npz file.
        name: The array to return; None: one with a name of ``DATA_NAMES``, or else the only array of the file.

    Raises:
        FileError, ParseError: As for ``read_arrays``.
        ArgumentError: There is no array of that name, or without ``name`` the choice is ambiguous.
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
    """Return the array with the first of ``names`` that exists, ignoring case; None if there is none."""
    lower = {key.lower(): key for key in arrays}
    return next((arrays[lower[name]] for name in names if name in lower), None)


def is_array_file(path: Path) -> bool:
    """Return whether the suffix of a path is .npy or .npz."""
    return path.suffix.lower() in (".npy", ".npz")
