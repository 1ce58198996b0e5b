"""Reads the idx format of MNIST: one array per file, optionally gzipped."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.data.expansion import gunzip
from amct.data.images import read_bytes
from amct.errors import ParseError

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import numpy.typing as npt

_GZIP = b"\x1f\x8b"
_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_HEAD_BYTES, _SIZE_BYTES = 4, 4
_MAX_AXES = 8


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
    if not 1 <= axes <= _MAX_AXES or len(content) < start:
        raise ParseError(f"{path}: not an idx file: its head says {axes} axes and ends early")
    shape = struct.unpack(f">{axes}I", content[_HEAD_BYTES:start])
    dtype = np.dtype(_DTYPES[content[2]])
    expected = math.prod(shape) * dtype.itemsize
    if len(content) - start != expected:
        raise ParseError(
            f"{path}: an idx file of shape {shape} has {expected} bytes of data, this one {len(content) - start}: "
            "is it truncated?"
        )
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
