"""Reads arrays from files: .npy and .npz of NumPy, and idx of MNIST.

Files with pickled objects are rejected, because unpickling can run code.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import weakref
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from amct.data.images import read_bytes
from amct.errors import AmctError, ArgumentError, FileError, ParseError, did_you_mean
from amct.memory import gibibytes, machine_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

_ZIP = b"PK\x03\x04"
_LARGEST_SIZE = 2**62
_MAX_AXES = 32

DATA_NAMES = ("data", "images", "x", "inputs", "arr_0")
LABEL_NAMES = ("labels", "label", "y", "targets", "arr_1")


class StoredRows:
    """The array of a .npy file, whose rows are read one at a time: the file may be larger than the memory.

    Attributes:
        shape: The shape of the array.
        dtype: Its type.
    """

    def __init__(self, file: io.BufferedReader, size: int, source: str) -> None:
        self.shape, is_fortran, self.dtype = _checked_header(file, source)
        if is_fortran or not self.shape:
            raise _damaged(source, "it has no rows")
        self._start, self._source = file.tell(), source
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if len(self) * self._row_bytes > size - self._start:
            raise _damaged(source, f"an array of shape {self.shape} and type {self.dtype} needs a longer file")
        self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        """Read a row.

        Raises:
            FileError: The file has become shorter, or cannot be read.
        """
        try:
            content = os.pread(self._descriptor, self._row_bytes, self._start + index * self._row_bytes)
        except OSError as error:
            raise FileError(f"{self._source}: cannot be read: {error.strerror or error}") from error
        if len(content) < self._row_bytes:
            raise FileError(f"{self._source}: row {index} is missing: the file was changed while it was read")
        return np.frombuffer(content, self.dtype).reshape(self.shape[1:])


def open_rows(path: str | os.PathLike[str]) -> StoredRows | None:
    """The rows of a .npy file; None for any other file, also one that is damaged or whose rows do not lie together."""
    try:
        with Path(path).open("rb") as file:
            return StoredRows(file, os.fstat(file.fileno()).st_size, str(path))
    except Exception:  # noqa: BLE001  NumPy's reader of headers raises many types; read_arrays says what is wrong
        return None


def read_arrays(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """Return all arrays of a file by name; the array of a .npy file gets the name ``data``.

    Raises:
        FileError: The file cannot be read.
        ParseError: The file is not a valid .npy or .npz file, or contains pickled objects.
    """
    source = str(path)
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            is_archive = file.read(len(_ZIP)) == _ZIP
            file.seek(0)
            return _read_archive(file, size, source) if is_archive else {"data": _read_array(file, size, size, source)}
    except AmctError:
        raise
    except FileNotFoundError as error:
        raise FileError(f"{path}: there is no such file") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # zipfile, zlib and NumPy's reader of headers raise many types for damaged files
        if "\0" in source:
            raise FileError(f"{path!r}: there is no such file: a path has no NUL character") from error
        raise _damaged(source, error) from error


def _read_archive(file: io.BufferedReader, size: int, source: str) -> dict[str, npt.NDArray[Any]]:
    arrays, expanded = {}, 0
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if not entry.filename.endswith(".npy"):
                raise ParseError(f'{source}: not an array file of NumPy: it contains "{entry.filename}", no array')
            name = entry.filename.removesuffix(".npy")
            with archive.open(entry) as member:
                stream = cast("io.BufferedIOBase", member)  # it has readinto, which its declared type lacks
                array = _read_array(stream, None, size, f"{source}[{name}]", before=expanded)
                if member.read(1):
                    raise _damaged(source, f'array "{name}" has more bytes than its shape {array.shape} needs')
            expanded += array.nbytes
            arrays[name] = array
    return arrays


def _read_array(
    file: io.BufferedIOBase, length: int | None, stored: int, source: str, *, before: int = 0
) -> npt.NDArray[Any]:
    """Read one array.

    Args:
        file: Its bytes.
        length: Their number, if it is known.
        stored: The size of the whole file.
        source: The name in messages.
        before: The bytes of the arrays that were read from the same file before.
    """
    shape, is_fortran, dtype = _checked_header(file, source)
    needed = math.prod(shape) * dtype.itemsize
    if length is not None and needed > length - file.tell():
        raise _damaged(source, f"an array of shape {shape} and type {dtype} has {needed} bytes, the file is shorter")
    check_expansion(before + needed, stored, source)
    if not needed:
        return np.zeros(shape, dtype)
    content, filled = np.empty(needed, np.uint8), 0
    view = content.data
    while filled < needed and (count := file.readinto(view[filled:])):
        filled += count
    if filled < needed:
        raise _damaged(source, f"an array of shape {shape} and type {dtype} has {needed} bytes, got {filled}")
    values = content.view(dtype)
    return values.reshape(shape[::-1]).T if is_fortran else values.reshape(shape)


def _checked_header(file: io.BufferedIOBase, source: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of an array of numbers or texts."""
    shape, is_fortran, dtype = _read_header(file, source)
    if dtype.hasobject:
        raise _damaged(source, "it holds Python objects, which can run code and are not read (allow_pickle is off)")
    return shape, is_fortran, dtype


def _read_header(file: io.BufferedIOBase, source: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape of an array, whether its first axis is the fastest, and its type."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise _damaged(source, f"version {version[0]}.{version[1]} of the format holds records, not numbers")
    shape, is_fortran, dtype = readers[version](file)
    if any(size < 0 or size > _LARGEST_SIZE for size in shape) or len(shape) > _MAX_AXES:
        raise _damaged(source, f"an array of shape {shape}")
    return tuple(int(size) for size in shape), bool(is_fortran), dtype


def _damaged(source: str, reason: object) -> ParseError:
    return ParseError(f"{source}: not an array file of NumPy (.npy, .npz), or damaged: {reason}. Save the array again")


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


# -- Reads the idx format of MNIST: one array per file, optionally gzipped ---------------------------------------------


_GZIP = b"\x1f\x8b"
_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_HEAD_BYTES, _SIZE_BYTES = 4, 4
_MAX_IDX_AXES = 8


def read_idx(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Read an idx file, gzipped or not, as an array in native byte order.

    Raises:
        FileError: The file cannot be read.
        ParseError: The file is not an idx file, or has too few or too many bytes.
    """
    content = read_bytes(path, "the idx file")
    if content.startswith(_GZIP):
        content = gunzip(content, str(path))
    if len(content) < _HEAD_BYTES or content[:2] != b"\0\0" or content[2] not in _DTYPES:
        raise ParseError(f"{path}: not an idx file: it begins with {content[:4].hex(' ') or 'nothing'}")
    axes = content[3]
    start = _HEAD_BYTES + _SIZE_BYTES * axes
    if not 1 <= axes <= _MAX_IDX_AXES or len(content) < start:
        raise ParseError(f"{path}: not an idx file: its head says {axes} axes and ends early")
    shape = struct.unpack(f">{axes}I", content[_HEAD_BYTES:start])
    dtype = np.dtype(_DTYPES[content[2]])
    expected = math.prod(shape) * dtype.itemsize
    if len(content) - start != expected:
        raise ParseError(
            f"{path}: an idx file of shape {shape} has {expected} bytes of data, this one {len(content) - start}: "
            "is it truncated?"
        )
    if 0 in shape and any(shape):
        raise ParseError(f"{path}: an idx file of shape {shape}, in which there are no values: is it damaged?")
    values = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


def is_idx_file(path: Path) -> bool:
    """Return whether a file name is that of an idx file: ``train-images-idx3-ubyte``, ``x.idx``, also with ``.gz``."""
    name = path.name.lower().removesuffix(".gz")
    return name.endswith(".idx") or "-idx" in name or ".idx" in name


def labels_beside(path: Path) -> Path | None:
    """Return the label file of an image file, by MNIST's naming (``images-idx3`` to ``labels-idx1``), if it exists."""
    name = path.name
    for pictures, labels in (("images-idx3", "labels-idx1"), ("images.idx3", "labels.idx1"), ("images", "labels")):
        if pictures in name:
            beside = path.with_name(name.replace(pictures, labels))
            if beside.is_file():
                return beside
    return None


# -- How much memory a compressed file may need: a small file cannot demand a large amount of it -----------------------


FREE_BYTES = 2**29
"""Any file may expand to this many bytes."""
RATIO = 100
"""A larger result must be at most this many times the size of the file; data rarely compresses better than 10 times."""
_BLOCK_BYTES = 2**20


def check_expansion(expanded: int, stored: int, source: str) -> None:
    """Check the size of decompressed data before it is allocated.

    Args:
        expanded: The number of bytes that the file announces.
        stored: The number of bytes of the file.
        source: The name in messages.

    Raises:
        ParseError: The file announces too much.
    """
    if expanded > max(FREE_BYTES, RATIO * stored):
        raise ParseError(
            f"{source}: {expanded} bytes of data in {stored} bytes, more than {RATIO} times: the file is damaged or "
            "hostile. If it is yours, store it without compression"
        )
    if expanded > machine_bytes():
        raise ParseError(
            f"{source}: {gibibytes(expanded)} of data, more than the {gibibytes(machine_bytes())} of memory of this "
            "machine. Split the file"
        )


def gunzip(content: bytes, source: str) -> bytes:
    """Decompress a gzip file, also of several members.

    Raises:
        ParseError: The file is damaged, or expands too much.
    """
    parts: list[bytes] = []
    total = 0
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            while part := file.read(_BLOCK_BYTES):
                parts.append(part)
                total += len(part)
                check_expansion(total, len(content), source)
    except EOFError as error:
        raise ParseError(f"{source}: a damaged gzip file: it ends early. Copy it again") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ParseError(f"{source}: a damaged gzip file: {error}. Copy it again") from error
    return b"".join(parts)
