"""Reads mean files, the values subtracted from every image: Caffe's .binaryproto, or .npy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from amct.data.arrays import is_array_file, read_array
from amct.data.images import read_bytes
from amct.errors import ParseError
from amct.schema import message_class

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

_PICTURE_AXES = 3


def read_mean(path: str | os.PathLike[str]) -> npt.NDArray[np.float32]:
    """Read a mean file as an array (channels, height, width), or (channels,) for one value per channel.

    Raises:
        FileError: The file cannot be read.
        ParseError: The file is not a mean file.
        ArgumentError: The file is a .npz with several arrays and an ambiguous choice.
    """
    place = Path(path)
    values = _numbers(place, read_array(place)) if is_array_file(place) else _read_blob(place)
    while values.ndim > _PICTURE_AXES and values.shape[0] == 1:
        values = values[0]
    if values.ndim not in (1, _PICTURE_AXES):
        raise ParseError(
            f"{path}: a mean file holds one picture (channels, height, width) or one number a channel, this one has "
            f"shape {values.shape}"
        )
    return values


def _numbers(path: Path, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if values.dtype.kind not in "buif" or not values.size:
        raise ParseError(f"{path}: not a mean file: an array of {values.dtype} of shape {values.shape}")
    return values.astype(np.float32)


def _read_blob(path: Path) -> npt.NDArray[np.float32]:
    blob = message_class("caffe.BlobProto", schema="caffe")()
    try:
        blob.ParseFromString(read_bytes(path, "the mean file"))
    except DecodeError as error:
        raise ParseError(f"{path}: not a mean file (a serialized BlobProto): {error}") from error
    shape: tuple[int, ...] = tuple(blob.shape.dim)  # type: ignore[attr-defined]  # a message made at run time
    if not shape:
        shape = tuple(getattr(blob, name) for name in ("num", "channels", "height", "width"))
    values = np.array(blob.data or blob.double_data, np.float32)  # type: ignore[attr-defined]  # the same
    if values.size == 0 or values.size != math.prod(shape):
        raise ParseError(f"{path}: not a mean file: shape {shape} with {values.size} values")
    return values.reshape(shape)
