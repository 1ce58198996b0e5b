"""``caffe.io``: images, the Transformer, and conversion of arrays to and from Caffe's messages.

Implemented with NumPy and Pillow, without scikit-image. Resizing is linear between pixel centres, with edges extended
and without prior smoothing, as in the scikit-image of Caffe's time (``amct.data.images``). ``interp_order`` may be 0
(nearest), 1 (linear) or 3 (cubic).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from amct.caffe.engine.messages import new_message
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.data.images import open_image, resize
from amct.errors import ArgumentError, FileError, ParseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from amct.atomic import AnyPath
    from amct.caffe.engine.messages import ProtoMessage

    FloatArray: TypeAlias = npt.NDArray[np.float32]
    AnyArray: TypeAlias = npt.NDArray[Any]

__all__ = [
    "Transformer",
    "array_to_blobproto",
    "array_to_datum",
    "arraylist_to_blobprotovector_str",
    "blobproto_to_array",
    "blobprotovector_str_to_arraylist",
    "caffe_pb2",
    "datum_to_array",
    "load_image",
    "oversample",
    "resize_image",
]

_PICTURE_AXES = 3
_GRAY_WEIGHTS = (0.2125, 0.7154, 0.0721)  # of red, green, blue: scikit-image's
_LARGEST = {np.dtype(np.uint8): 255.0, np.dtype(np.uint16): 65535.0, np.dtype(np.int32): 65535.0}


class PictureFileError(FileError, FileNotFoundError):
    """An image cannot be opened; scikit-image raises FileNotFoundError here."""


# ---------------------------------------------------------------------- messages


def blobproto_to_array(blob: ProtoMessage, return_diff: bool = False) -> AnyArray:
    """The values (or the gradients) of a BlobProto, in its shape.

    Raises:
        ParseError: The number of values does not fit the shape.
    """
    values = np.array(blob.diff if return_diff else blob.data, np.float64)
    legacy = [blob.HasField(name) for name in ("num", "channels", "height", "width")]
    shape = (blob.num, blob.channels, blob.height, blob.width) if any(legacy) else tuple(blob.shape.dim)
    if values.size != np.prod(shape):
        raise ParseError(f"BlobProto: {values.size} values do not match its shape {shape}")
    return values.reshape(shape)


def array_to_blobproto(arr: AnyArray, diff: AnyArray | None = None) -> ProtoMessage:
    """An array of any shape as a BlobProto, with gradients if given."""
    blob = new_message("BlobProto")
    blob.shape.dim.extend(arr.shape)
    blob.data.extend(np.asarray(arr, np.float64).ravel().tolist())
    if diff is not None:
        blob.diff.extend(np.asarray(diff, np.float64).ravel().tolist())
    return blob


def arraylist_to_blobprotovector_str(arraylist: Sequence[AnyArray]) -> bytes:
    """Several arrays as one serialized BlobProtoVector."""
    vector = new_message("BlobProtoVector", blobs=[array_to_blobproto(array) for array in arraylist])
    return bytes(vector.SerializeToString())


def blobprotovector_str_to_arraylist(content: bytes) -> list[AnyArray]:
    """The arrays of a serialized BlobProtoVector."""
    vector = new_message("BlobProtoVector")
    vector.ParseFromString(content)
    return [blobproto_to_array(blob) for blob in vector.blobs]


def array_to_datum(arr: AnyArray, label: int | None = None) -> ProtoMessage:
    """A (channels, height, width) array as a Datum: uint8 as bytes, anything else as floats.

    Raises:
        ArgumentError: The array does not have three axes.
    """
    if arr.ndim != _PICTURE_AXES:
        raise ArgumentError(f"Incorrect array shape. A Datum holds (channels, height, width), got {arr.shape}")
    datum = new_message("Datum", channels=arr.shape[0], height=arr.shape[1], width=arr.shape[2])
    if arr.dtype == np.uint8:
        datum.data = arr.tobytes()
    else:
        datum.float_data.extend(arr.astype(np.float64).ravel().tolist())
    if label is not None:
        datum.label = label
    return datum


def datum_to_array(datum: ProtoMessage) -> AnyArray:
    """The (channels, height, width) array of a Datum, uint8 or float64, without the label.

    Raises:
        ParseError: The number of values does not fit the shape (an encoded image must be decoded first).
    """
    shape = (datum.channels, datum.height, datum.width)
    values: AnyArray = np.frombuffer(datum.data, np.uint8) if datum.data else np.array(datum.float_data, np.float64)
    if values.size != np.prod(shape):
        what = "an encoded picture, which must be decoded first" if datum.encoded else f"{values.size} values"
        raise ParseError(f"Datum of shape {shape}: it holds {what}")
    copied: AnyArray = values.reshape(shape).copy()
    return copied


# ---------------------------------------------------------------------- images


def load_image(filename: AnyPath, color: bool = True) -> FloatArray:
    """Read an image as float32 from 0 to 1: (height, width, 3) in red, green, blue order, or (height, width, 1).

    Args:
        filename: The image.
        color: True repeats a gray image three times and drops transparency; False gives one channel.

    Raises:
        FileError: There is no such file.
        ParseError: It is not an image.
    """
    from pathlib import Path

    try:
        content = Path(filename).read_bytes()
    except OSError as error:
        raise PictureFileError(f"No such file: '{filename}' ({error.strerror or error})") from error
    picture = open_image(content, str(filename))
    try:
        if picture.mode in ("P", "PA", "CMYK", "YCbCr", "LAB", "HSV"):
            picture = picture.convert("RGBA" if "transparency" in picture.info else "RGB")
        elif picture.mode in ("1", "LA"):
            picture = picture.convert("L" if picture.mode == "1" else "RGBA")
        values = np.asarray(picture)
    except (OSError, ValueError, SyntaxError) as error:
        raise ParseError(f"{filename}: the picture is damaged: {error}") from error
    scaled = values.astype(np.float32) / np.float32(_LARGEST.get(values.dtype, 1.0))
    return _channels(scaled, color)


def _channels(values: FloatArray, color: bool) -> FloatArray:
    if values.ndim == _PICTURE_AXES:
        values = values[:, :, :3]
        return values if color else (values @ np.array(_GRAY_WEIGHTS, np.float32))[:, :, None]
    return np.repeat(values[:, :, None], 3, axis=2) if color else values[:, :, None]


def resize_image(im: AnyArray, new_dims: Sequence[int], interp_order: int = 1) -> FloatArray:
    """Resize a (height, width, channels) array; any values, any number of channels.

    Args:
        im: The picture.
        new_dims: The new height and width.
        interp_order: 0 nearest, 1 linear, 3 cubic.

    Returns:
        A new float32 array.

    Raises:
        ArgumentError: A size is not positive or the order is none of these.
    """
    size = (int(new_dims[0]), int(new_dims[1]))
    return np.array(resize(np.asarray(im, np.float32), size, order=interp_order), np.float32)


def oversample(images: Sequence[AnyArray] | AnyArray, crop_dims: Sequence[int] | AnyArray) -> FloatArray:
    """Ten crops of each (height, width, channels) image: corners and centre, then the same mirrored.

    Raises:
        ArgumentError: There is no image, or the crop is larger than the first one.
    """
    if not len(images):
        raise ArgumentError("oversample: no pictures given")
    height, width, channels = np.asarray(images[0]).shape
    rows, columns = int(crop_dims[0]), int(crop_dims[1])
    if rows > height or columns > width:
        raise ArgumentError(
            f"oversample: a crop of {rows} x {columns} does not fit into a picture of {height} x {width}"
        )
    places = [(top, left) for top in (0, height - rows) for left in (0, width - columns)]
    places.append((int(height / 2 - rows / 2), int(width / 2 - columns / 2)))
    crops = np.empty((len(images), 2, len(places), rows, columns, channels), np.float32)
    for index, picture in enumerate(images):
        for number, (top, left) in enumerate(places):
            crops[index, 0, number] = picture[top : top + rows, left : left + columns]
        crops[index, 1] = crops[index, 0, :, :, ::-1]
    return crops.reshape(-1, rows, columns, channels)


# ---------------------------------------------------------------------- the Transformer


class Transformer:
    """Converts images to a net's inputs, and back.

    The order is: resize, transpose, swap channels, multiply by the raw scale, subtract the mean, multiply by the input
    scale. The caller's array is never changed (pycaffe's may be, if no conversion is needed).

    Args:
        inputs: The shape of each input, ``{"data": net.blobs["data"].shape}``.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = {name: tuple(shape) for name, shape in inputs.items()}
        self.transpose: dict[str, Sequence[int]] = {}
        self.channel_swap: dict[str, Sequence[int]] = {}
        self.raw_scale: dict[str, float] = {}
        self.mean: dict[str, AnyArray] = {}
        self.input_scale: dict[str, float] = {}

    def _check_input(self, in_: str) -> None:
        if in_ not in self.inputs:
            raise ArgumentError(f"{in_} is not one of the net inputs: {self.inputs}")

    def preprocess(self, in_: str, data: AnyArray) -> FloatArray:
        """Convert a (height, width, channels) image to the input ``in_``, without its first axis.

        Raises:
            ArgumentError: There is no such input.
        """
        self._check_input(in_)
        size = self.inputs[in_][2:]
        picture: FloatArray = np.array(data, np.float32)
        if picture.shape[:2] != size:
            picture = resize_image(picture, size)
        if in_ in self.transpose:
            picture = picture.transpose(self.transpose[in_])
        if in_ in self.channel_swap:
            picture = picture[list(self.channel_swap[in_])]
        if in_ in self.raw_scale:
            picture = picture * np.float32(self.raw_scale[in_])
        if in_ in self.mean:
            picture = (picture - self.mean[in_]).astype(np.float32)
        if in_ in self.input_scale:
            picture = picture * np.float32(self.input_scale[in_])
        return picture

    def deprocess(self, in_: str, data: AnyArray) -> AnyArray:
        """Undo ``preprocess``, except for the resizing.

        Raises:
            ArgumentError: There is no such input.
        """
        self._check_input(in_)
        picture = np.array(data).squeeze()
        if in_ in self.input_scale:
            picture = picture / self.input_scale[in_]
        if in_ in self.mean:
            picture = picture + self.mean[in_]
        if in_ in self.raw_scale:
            picture = picture / self.raw_scale[in_]
        if in_ in self.channel_swap:
            picture = picture[np.argsort(self.channel_swap[in_])]
        if in_ in self.transpose:
            picture = picture.transpose(np.argsort(self.transpose[in_]))
        return picture

    def set_transpose(self, in_: str, order: Sequence[int]) -> None:
        """Reorder the axes, usually from (height, width, channels) by (2, 0, 1).

        Raises:
            ArgumentError: There is no such input, or the order has another number of axes.
        """
        self._check_input(in_)
        if len(order) != len(self.inputs[in_]) - 1:
            raise ArgumentError("Transpose order needs to have the same number of dimensions as the input.")
        self.transpose[in_] = order

    def set_channel_swap(self, in_: str, order: Sequence[int]) -> None:
        """Reorder the channels, usually (2, 1, 0) to blue, green, red.

        Raises:
            ArgumentError: There is no such input, or the order has another number of channels.
        """
        self._check_input(in_)
        if len(order) != self.inputs[in_][1]:
            raise ArgumentError("Channel swap needs to have the same number of dimensions as the input channels.")
        self.channel_swap[in_] = order

    def set_raw_scale(self, in_: str, scale: float) -> None:
        """Set the factor applied before the mean is subtracted (255 for images of 0 to 1).

        Raises:
            ArgumentError: There is no such input.
        """
        self._check_input(in_)
        self.raw_scale[in_] = scale

    def set_mean(self, in_: str, mean: AnyArray) -> None:
        """Set the mean to subtract: one value per channel, or an image (resized if its size differs).

        Raises:
            ArgumentError: There is no such input, or the mean's channels or axes do not fit.
        """
        self._check_input(in_)
        shape = self.inputs[in_][1:]
        if mean.ndim == 1:
            if len(mean) != shape[0]:
                raise ArgumentError(f"Mean channels incompatible with input. {len(mean)} means, {shape[0]} channels")
            self.mean[in_] = mean.reshape(-1, 1, 1)
            return
        picture = mean[None] if mean.ndim == 2 else mean
        if picture.ndim != _PICTURE_AXES or picture.shape[0] not in (1, shape[0]):
            raise ArgumentError(f"Mean shape invalid: {mean.shape} for an input of {shape}")
        if picture.shape[1:] != shape[1:]:
            picture = resize_image(picture.transpose(1, 2, 0), shape[1:]).transpose(2, 0, 1)
        self.mean[in_] = picture

    def set_input_scale(self, in_: str, scale: float) -> None:
        """Set the factor applied after the mean is subtracted.

        Raises:
            ArgumentError: There is no such input.
        """
        self._check_input(in_)
        self.input_scale[in_] = scale
