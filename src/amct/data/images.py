"""Decodes images from files and bytes (JPEG, PNG and other formats of photographs) to uint8 arrays."""

from __future__ import annotations

import io
import os
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from amct.atomic import is_folder
from amct.errors import ArgumentError, FileError, ParseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]
    Taps = list[tuple[npt.NDArray[np.intp], FloatArray]]

#: File suffixes that ``list_images`` accepts.
IMAGE_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
_FORMATS = ("BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "SUN", "TGA", "TIFF", "WEBP")
"""Those of photographs. Pillow has many more, some of which start other programs (EPS) or have had many defects."""
_FREE_PIXELS = 2**24
_PIXELS_PER_BYTE = 1000  # a picture of a single colour has about 170 (JPEG) or 350 (PNG)
_SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L")


def open_image(content: bytes, source: str) -> Image.Image:
    """Open an image without decoding it; ``source`` is its name in error messages.

    Raises:
        ParseError: The bytes are not an image that Pillow can read.
    """
    try:
        with _no_bomb_warning():
            image = Image.open(io.BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise ParseError(f"{source}: not a picture, or of a kind that cannot be read") from error
    except Exception as error:  # Pillow's readers of headers raise many types for damaged files
        raise ParseError(f"{source}: the picture cannot be read: {error}") from error
    _check_size(image, len(content), source)
    return image


@contextmanager
def _no_bomb_warning() -> Iterator[None]:
    """Hide Pillow's warning of a large picture, which ``_check_size`` refuses.

    Not in a thread that reads ahead: the filters of warnings are those of the whole process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def _check_size(image: Image.Image, stored: int, source: str) -> None:
    """Refuse a picture whose header announces more pixels than its bytes can hold, before it is decoded."""
    pixels = image.width * image.height
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise ParseError(
            f"{source}: a picture of {image.width} x {image.height} pixels; the limit is {limit}. Make it smaller, or "
            "set PIL.Image.MAX_IMAGE_PIXELS"
        )
    if pixels > max(_FREE_PIXELS, _PIXELS_PER_BYTE * stored):
        raise ParseError(
            f"{source}: {stored} bytes for a picture of {image.width} x {image.height} pixels: the file is damaged or "
            "hostile. Save the picture again"
        )


def decode_image(content: bytes, source: str, *, color: bool | None = True, upright: bool = True) -> npt.NDArray[Any]:
    """Decode an image to a uint8 array (height, width, channels) in RGB order.

    Args:
        content: The bytes of the file.
        source: The name used in error messages.
        color: True: three channels, False: one (for JPEG the stored luminance, as OpenCV uses it), None: as stored
            (one, three, or four with an alpha channel).
        upright: Apply the EXIF orientation, as OpenCV does.

    Raises:
        ParseError: The bytes are not an image, or are damaged.
    """
    image = open_image(content, source)
    try:
        if color is False and image.format == "JPEG":
            image.draft("L", image.size)
        if upright:
            image = ImageOps.exif_transpose(image)
        return _to_uint8(image, color)
    except Exception as error:  # Pillow's decoders raise many types for damaged files
        raise ParseError(f"{source}: the picture is damaged: {error}") from error


def read_image(path: str | os.PathLike[str], *, color: bool | None = True, upright: bool = True) -> npt.NDArray[Any]:
    """Read an image file; arguments and result as for ``decode_image``.

    Raises:
        FileError: The file cannot be read.
        ParseError: The file is not an image, or is damaged.
    """
    return decode_image(read_bytes(path, "the picture"), str(path), color=color, upright=upright)


def read_bytes(path: str | os.PathLike[str], what: str) -> bytes:
    """Return the content of a file.

    Raises:
        FileError: The file cannot be read; the message describes it as ``what``.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"Could not load {path}: {what} cannot be read: {reason}") from error


def list_images(folder: str | os.PathLike[str]) -> list[Path]:
    """Return all images in a folder and its subfolders, sorted by path.

    Raises:
        FileError: The folder does not exist, or contains no image.
    """
    return [Path(entry.path) for entry in walk_images(folder)]


def walk_images(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    """Yield the images in a folder and its subfolders, sorted by path; a subfolder is read when it is reached.

    Links to folders are followed, but every folder is read once. A folder that cannot be read is left out.

    Raises:
        FileError: The folder does not exist, or contains no image.
    """
    if not is_folder(folder):
        raise FileError(f"{folder}: there is no such folder of pictures")
    found = False
    known: set[tuple[int, int]] = set()
    waiting = _entries(os.fspath(folder), known)
    while waiting:
        entry = waiting.pop()
        if entry.is_dir():
            waiting += _entries(entry.path, known)
        elif os.path.splitext(entry.name)[1].lower() in IMAGE_ENDINGS and entry.is_file():  # noqa: PTH122  of 10^5 names
            found = True
            yield entry
    if not found:
        raise FileError(f"{folder}: no pictures in this folder (looked for {', '.join(sorted(IMAGE_ENDINGS))})")


def _entries(folder: str, known: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    """The entries of a folder, the last name first; none of a known one, as links can lead round in circles."""
    try:
        place = os.stat(folder)  # noqa: PTH116  a Path for each of 10^5 folders takes long
        if (place.st_dev, place.st_ino) in known:
            return []
        known.add((place.st_dev, place.st_ino))
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name, reverse=True)
    except OSError:
        return []


def _to_uint8(image: Image.Image, color: bool | None) -> npt.NDArray[Any]:
    if image.mode in _SIXTEEN_BITS:
        eight_bits = (np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8)
        image = Image.fromarray(eight_bits)
    values = np.asarray(image.convert(_wanted_mode(image, color)))
    return values if values.ndim == 3 else values[:, :, None]


def _wanted_mode(image: Image.Image, color: bool | None) -> str:
    if color is not None:
        return "RGB" if color else "L"
    if image.mode in ("1", "L"):
        return "L"
    has_alpha = image.mode in ("LA", "RGBA", "PA") or "transparency" in image.info
    return "RGBA" if has_alpha else "RGB"


# -- Resizes images ----------------------------------------------------------------------------------------------------
#
# Interpolation is that of OpenCV and of the scikit-image versions used with Caffe: sampled at pixel centres, without
# anti-aliasing, with edge pixels replicated. Models trained with Caffe got their images that way. Linear interpolation
# of 8-bit images uses OpenCV's fixed-point arithmetic, so that the result is bit-exact with Caffe's data layers.


NEAREST, LINEAR, CUBIC = 0, 1, 3
_CUBIC_SHARPNESS = -0.5


def resize(image: npt.NDArray[Any], size: tuple[int, int], *, order: int = LINEAR) -> npt.NDArray[Any]:
    """Resize the first two axes of an array, height and width.

    Args:
        image: (height, width) or (height, width, channels), integers or floats.
        size: The new height and width.
        order: 0 nearest, 1 linear, 3 cubic (Keys, a = -0.5).

    Returns:
        A uint8 array (rounded and clipped) for a uint8 image, otherwise a float32 array.

    Raises:
        ArgumentError: A size is not positive, the image is empty, or the order is not 0, 1 or 3.
    """
    if order not in _KERNELS:
        raise ArgumentError(f"interpolation order must be 0 (nearest), 1 (linear) or 3 (cubic), got {order}")
    if image.ndim < 2 or 0 in image.shape or min(size) < 1:
        raise ArgumentError(f"cannot resize a picture of shape {image.shape} to {size[0]} x {size[1]}")
    if image.dtype == np.uint8 and order == LINEAR:
        return _linear_8_bits(image, size)
    resized = image if image.shape[0] == size[0] and order != CUBIC else _along(image, 0, size[0], order)
    resized = resized if resized.shape[1] == size[1] and order != CUBIC else _along(resized, 1, size[1], order)
    if image.dtype == np.uint8:
        rounded: npt.NDArray[np.uint8] = np.clip(np.floor(resized + 0.5), 0, 255).astype(np.uint8)
        return rounded
    return np.asarray(resized, np.float32)


def _linear_8_bits(image: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """OpenCV's INTER_LINEAR for uint8: fixed-point weights in units of 1/2048, rounded after each direction."""
    (left, left_share), (right, right_share) = _whole_taps(image.shape[1], size[1], clamp=True)
    (above, above_share), (below, below_share) = _whole_taps(image.shape[0], size[0], clamp=False)
    trailing = (1,) * (image.ndim - 2)
    wide = np.take(image, left, 1) * left_share.reshape(1, -1, *trailing)
    wide += np.take(image, right, 1) * right_share.reshape(1, -1, *trailing)
    wide >>= 4
    total = (wide[above] * above_share.reshape(-1, 1, *trailing)) >> 16
    total += (wide[below] * below_share.reshape(-1, 1, *trailing)) >> 16
    return ((total + 2) >> 2).astype(np.uint8)


def _whole_taps(old: int, new: int, *, clamp: bool) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]]:
    """Indices and weights (in 1/2048) of both neighbours of each new pixel; with ``clamp`` edge pixels get weight 1."""
    centres = _centres(old, new).astype(np.float32)
    first = np.floor(centres)
    share = centres - first
    if clamp:
        share[(first < 0) | (first >= old - 1)] = 0
    shares = (np.rint((1 - share) * 2048).astype(np.int32), np.rint(share * 2048).astype(np.int32))
    low = 0 if clamp else -1
    places = np.clip(first.astype(np.intp), low, old - 1)
    return [(np.clip(places + offset, 0, old - 1), weights) for offset, weights in enumerate(shares)]


def _along(image: npt.NDArray[Any], axis: int, length: int, order: int) -> FloatArray:
    total: FloatArray | None = None
    shape = [1] * image.ndim
    shape[axis] = length
    for places, weights in _KERNELS[order](image.shape[axis], length):
        part = np.take(image, places, axis).astype(np.float32) * weights.reshape(shape)
        total = part if total is None else total + part
    assert total is not None
    return total


def _centres(old: int, new: int) -> npt.NDArray[np.float64]:
    """Coordinates of the centres of the new pixels in the old image."""
    places: npt.NDArray[np.float64] = (np.arange(new, dtype=np.float64) + 0.5) * (old / new) - 0.5
    return places


def _taps(first: npt.NDArray[np.float64], weights: list[npt.NDArray[np.float64]], old: int) -> Taps:
    return [
        (np.clip(first.astype(np.intp) + offset, 0, old - 1), weight.astype(np.float32))
        for offset, weight in enumerate(weights)
    ]


def _nearest(old: int, new: int) -> Taps:
    places = np.floor(_centres(old, new) + 0.5)
    return _taps(places, [np.ones(new)], old)


def _linear(old: int, new: int) -> Taps:
    centres = _centres(old, new)
    left = np.floor(centres)
    share = centres - left
    return _taps(left, [1 - share, share], old)


def _cubic(old: int, new: int) -> Taps:
    centres = _centres(old, new)
    left = np.floor(centres)
    share = centres - left
    return _taps(left - 1, [_keys(share + 1), _keys(share), _keys(1 - share), _keys(2 - share)], old)


def _keys(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Keys' cubic kernel at distances 0 to 2."""
    a = _CUBIC_SHARPNESS
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return np.where(distance <= 1, near, far)


_KERNELS = {NEAREST: _nearest, LINEAR: _linear, CUBIC: _cubic}
