"""Pictures from files and bytes (JPEG, PNG and the other formats of Pillow), as uint8 arrays."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from amct.errors import FileError, ParseError

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

#: Endings of the files that a folder of pictures is searched for.
IMAGE_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
_SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L")


def open_image(content: bytes, source: str) -> Image.Image:
    """Open a picture without decoding it yet.

    Raises:
        ParseError: The bytes are no picture that Pillow knows.
    """
    try:
        return Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:
        raise ParseError(f"{source}: not a picture, or of a kind that cannot be read") from error
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ParseError(f"{source}: the picture cannot be read: {error}") from error


def decode_image(content: bytes, source: str, *, color: bool | None = True, upright: bool = True) -> npt.NDArray[Any]:
    """Decode a picture to uint8 of shape (height, width, channels), channels in the order red, green, blue.

    Args:
        content: The bytes of the file.
        source: What error messages call it.
        color: True gives three channels, False one (JPEG: its own luminance, as OpenCV takes it), None as stored
            (one, three, or four with transparency).
        upright: Turn the picture as its camera noted (EXIF), as OpenCV does.

    Raises:
        ParseError: The bytes are no picture, or damaged.
    """
    image = open_image(content, source)
    try:
        if color is False and image.format == "JPEG":
            image.draft("L", image.size)
        if upright:
            image = ImageOps.exif_transpose(image)
        return _to_uint8(image, color)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ParseError(f"{source}: the picture is damaged: {error}") from error


def read_image(path: str | os.PathLike[str], *, color: bool | None = True, upright: bool = True) -> npt.NDArray[Any]:
    """Read a picture file; arguments and result as for ``decode_image``.

    Raises:
        FileError: The file cannot be read.
        ParseError: It is no picture, or damaged.
    """
    return decode_image(read_bytes(path, "the picture"), str(path), color=color, upright=upright)


def read_bytes(path: str | os.PathLike[str], what: str) -> bytes:
    """The content of a file.

    Raises:
        FileError: It cannot be read; the message calls it ``what``.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"Could not load {path}: {what} cannot be read: {error.strerror or error}") from error


def list_images(folder: str | os.PathLike[str]) -> list[Path]:
    """All pictures in a folder and below it, sorted by path.

    Raises:
        FileError: There is no such folder, or it holds no picture.
    """
    place = Path(folder)
    if not place.is_dir():
        raise FileError(f"{folder}: there is no such folder of pictures")
    found = sorted(path for path in place.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS and path.is_file())
    if not found:
        raise FileError(f"{folder}: no pictures in this folder (looked for {', '.join(sorted(IMAGE_ENDINGS))})")
    return found


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
