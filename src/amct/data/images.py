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
from amct.errors import FileError, ParseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

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

    Links to folders are not followed. A folder that cannot be read is left out.

    Raises:
        FileError: The folder does not exist, or contains no image.
    """
    if not is_folder(folder):
        raise FileError(f"{folder}: there is no such folder of pictures")
    found = False
    waiting = _entries(os.fspath(folder))
    while waiting:
        entry = waiting.pop()
        if entry.is_dir(follow_symlinks=False):
            waiting += _entries(entry.path)
        elif os.path.splitext(entry.name)[1].lower() in IMAGE_ENDINGS and entry.is_file():  # noqa: PTH122  of 10^5 names
            found = True
            yield entry
    if not found:
        raise FileError(f"{folder}: no pictures in this folder (looked for {', '.join(sorted(IMAGE_ENDINGS))})")


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, the last name first."""
    try:
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
