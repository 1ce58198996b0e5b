"""Reads and writes Caffe's Datum message: one image or array with its label, as stored in a database."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from amct.data.images import decode_image
from amct.errors import ArgumentError, ParseError
from amct.schema import message_class

if TYPE_CHECKING:
    import numpy.typing as npt


_COLORS = 3


@dataclass(frozen=True, eq=False)
class DatumValues:
    """The content of a Datum: a (channels, height, width) array of uint8 or float32, and the label."""

    values: npt.NDArray[Any]
    label: int
    was_encoded: bool = False


@cache
def _datum_class() -> Any:  # noqa: ANN401 - made at run time from the descriptor set, no static type
    return message_class("caffe.Datum", schema="caffe")


def parse_datum(content: bytes, source: str, *, color: bool | None = None) -> DatumValues:
    """Read a serialized Datum.

    Args:
        content: The bytes.
        source: The name used in error messages.
        color: Channels of an encoded image (JPEG, PNG): True: three, False: one, None: as stored. The channel order is
            OpenCV's: blue, green, red.

    Raises:
        ParseError: The bytes are not a Datum, the number of values does not match the shape, or the image is damaged.
    """
    datum = _datum_class()()
    try:
        datum.ParseFromString(content)
    except DecodeError as error:
        raise ParseError(f"{source}: not a Datum, or damaged: {error}") from error
    if datum.encoded:
        picture = decode_image(datum.data, source, color=color, upright=color is not None)  # as OpenCV does
        return DatumValues(to_bgr(picture), datum.label, was_encoded=True)
    shape = (datum.channels, datum.height, datum.width)
    values = np.frombuffer(datum.data, np.uint8) if datum.data else np.array(datum.float_data, np.float32)
    if min(shape) < 1 or values.size != shape[0] * shape[1] * shape[2]:
        raise ParseError(
            f"{source}: a Datum of {shape[0]} x {shape[1]} x {shape[2]} (channels, height, width) with {values.size} "
            "values: the database is damaged or was not written by Caffe's tools"
        )
    return DatumValues(values.reshape(shape), datum.label)


def to_bgr(picture: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert an RGB(A) image (height, width, channels) to BGR(A) (channels, height, width), OpenCV's channel order."""
    planes: npt.NDArray[Any] = picture.transpose(2, 0, 1)
    return np.concatenate([planes[2::-1], planes[3:]]) if len(planes) >= _COLORS else planes


def make_datum(values: npt.NDArray[Any], label: int = 0) -> bytes:
    """Serialize a (channels, height, width) array as a Datum: uint8 as bytes, other types as float32.

    Raises:
        ArgumentError: The array does not have three axes.
    """
    if values.ndim != 3:
        raise ArgumentError(f"a Datum holds an array of 3 axes (channels, height, width), got shape {values.shape}")
    datum = _datum_class()(channels=values.shape[0], height=values.shape[1], width=values.shape[2], label=int(label))
    if values.dtype == np.uint8:
        datum.data = values.tobytes()
    else:
        datum.float_data.extend(values.astype(np.float32).ravel().tolist())
    content: bytes = datum.SerializeToString()
    return content
