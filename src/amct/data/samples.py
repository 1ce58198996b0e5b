"""One interface to all data formats (image folder, image list, .npy/.npz, LMDB, idx), with preprocessing."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from google.protobuf.message import DecodeError

from amct.atomic import is_file, is_folder
from amct.data.arrays import (
    DATA_NAMES,
    LABEL_NAMES,
    StoredRows,
    choose,
    is_array_file,
    is_idx_file,
    labels_beside,
    open_rows,
    read_array,
    read_arrays,
    read_idx,
)
from amct.data.images import read_bytes, read_image, resize, walk_images
from amct.data.lmdb import LmdbReader, data_file, is_lmdb, parse_datum, to_bgr
from amct.errors import ArgumentError, FileError, ParseError
from amct.printable import counted
from amct.schema import message_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

FileStamp = tuple[str, int, int]
"""A file: its path, its size, and the time of its last change in nanoseconds."""
Read = Callable[[], "tuple[npt.NDArray[Any], int | None]"]
"""Reads the values of a sample and its label."""
ColorOrder = Literal["bgr", "rgb", "gray"]
_PICTURE_AXES = 3
_MOST_CHANNELS_SHOWN = 4
_SPREAD_SEED = 20240607
_LABEL = re.compile("-?[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The preprocessing of an image: resize, centre crop, subtract the mean, multiply by the scale.

    Attributes:
        size: Height and width to resize to; None: no resizing.
        crop: Height and width of the centre crop; None: no crop.
        color: The channel order of decoded images: "rgb", "bgr" or "gray"; None: that of the models which the data is
            for, "bgr" for Caffe and otherwise "rgb". Arrays and databases keep their channels.
        mean: Empty for none, one value, one value per channel, or an image of the size after the crop.
        scale: The factor applied after the mean is subtracted, or one for each channel.
    """

    size: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    color: ColorOrder | None = None
    mean: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    scale: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        for name in ("size", "crop"):
            value = getattr(self, name)
            if value is not None and (len(value) != 2 or min(value) < 1):
                raise ArgumentError(f"{name}: expected a height and a width of at least 1, got {value}")
        if self.color not in (None, "bgr", "rgb", "gray"):
            raise ArgumentError(f'color: expected "bgr", "rgb" or "gray", got {self.color!r}')

    def text(self, *, pictures: bool) -> str:
        """What is done to a picture, or to an array: ``RGB, resized to 224 x 224, minus 123.7,116.3,103.5``."""
        done = [(self.color or "rgb").upper() if self.color != "gray" else "gray"] if pictures else []
        for what, size in (("resized to", self.size), ("cropped to", self.crop)):
            done += [f"{what} {size[0]} x {size[1]}"] if size is not None else []
        if self.mean.size:
            per_channel = self.mean.size <= _MOST_CHANNELS_SHOWN
            mean = (
                _joined(self.mean.reshape(-1)) if per_channel else f"a mean of {' x '.join(map(str, self.mean.shape))}"
            )
            done.append(f"minus {mean}")
        if self.scale != 1.0:
            done.append(f"times {_joined(np.atleast_1d(self.scale))}")
        return ", ".join(done)

    def apply(self, values: npt.NDArray[Any], source: str) -> npt.NDArray[np.float32]:
        """Preprocess one (channels, height, width) array; for arrays of other rank only mean and scale are applied.

        Raises:
            ArgumentError: The crop is larger than the image, or the shape of the mean or of the scale does not fit.
        """
        if values.ndim == _PICTURE_AXES:
            if self.size is not None and values.shape[1:] != self.size:
                values = resize(values.transpose(1, 2, 0), self.size).transpose(2, 0, 1)
            if self.crop is not None:
                values = _crop_middle(values, self.crop, source)
        prepared = values.astype(np.float32)
        if self.mean.size:
            prepared -= _fitting("mean", self.mean, prepared.shape, source)
        if self.scale != 1.0:
            prepared *= _fitting("scale", np.array(self.scale, np.float32), prepared.shape, source)
        return np.ascontiguousarray(prepared)


def _joined(numbers: npt.NDArray[Any]) -> str:
    return ",".join(f"{number:.6g}" for number in numbers)


@dataclass(frozen=True, eq=False)
class Sample:
    """One input: its name in error messages, its values, and its label or None."""

    name: str
    values: npt.NDArray[np.float32]
    label: int | None = None


class SampleSource:
    """A collection of samples with a length; it can be iterated repeatedly and reads one sample at a time.

    Args:
        name: The name in error messages.
        count: Returns the number of samples.
        raw: Starts a pass: the name of each sample, and a function that reads its values and its label.
        prepare: The preprocessing.
        files: Returns the files that the samples are read from, each with its size and the time of its last change.
    """

    def __init__(
        self,
        name: str,
        count: Callable[[], int],
        raw: Callable[[], Iterator[tuple[str, Read]]],
        prepare: Preparation,
        files: Callable[[], Iterable[FileStamp]],
    ) -> None:
        self.name = name
        self._count = count
        self._raw = raw
        self._prepare = prepare
        self._files = files

    def __len__(self) -> int:
        return self._count()

    def identity(self) -> str:
        """A fingerprint of the files (name, size, time of change) and of the preprocessing; nothing is decoded."""
        digest = hashlib.sha256(repr(self._prepare).encode() + self._prepare.mean.tobytes())
        for stamp in self._files():
            digest.update(repr(stamp).encode(errors="surrogateescape"))
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Sample]:
        return self.chosen(lambda _: True)

    def chosen(self, wanted: Callable[[int], bool]) -> Iterator[Sample]:
        """Yield the samples whose index is wanted; the others are not decoded."""
        for index, (name, read) in enumerate(self._raw()):
            if wanted(index):
                values, label = read()
                yield Sample(name, self._prepare.apply(values, name), label)


def open_samples(path: str | os.PathLike[str], prepare: Preparation | None = None) -> SampleSource:
    """Detect the format of a path and open it.

    * a folder with ``data.mdb``: an LMDB of Datums;
    * any other folder: all its images, in an order in which the first ones are from all over the folder
      (``spread_order``); the label of an image in a subfolder is the index of that subfolder;
    * ``.npy``/``.npz``: samples along the first axis; labels from an array with a name of ``LABEL_NAMES``;
    * ``…idx3-ubyte``, ``.idx``, also with ``.gz``: images; labels from the label file in the same folder;
    * ``.txt``: a list with an image path (relative to the list) and an optional label per line;
    * any other file: one image.

    Raises:
        FileError: The path does not exist or cannot be read.
        ParseError: The content does not have the detected format.
    """
    place = Path(path)
    preparation = prepare or Preparation()
    if not is_file(place) and not is_folder(place):
        raise FileError(f"{path}: there is no such file or folder of data")
    if is_lmdb(place):
        return _lmdb_source(place, preparation)
    if is_folder(place):
        return _folder_source(place, preparation)
    if is_array_file(place):
        return _array_source(place, preparation)
    if is_idx_file(place):
        return _idx_source(place, preparation)
    if place.suffix.lower() == ".txt":
        entries = [(place.parent / name, label) for name, label in read_image_list(place)]
        return _list_source(str(path), entries, preparation)
    return _list_source(str(path), [(place, None)], preparation)


def holds_pictures(path: str | os.PathLike[str]) -> bool:
    """Return whether ``open_samples`` decodes pictures from a path: a folder of them, a list, or one picture."""
    place = Path(path)
    return not (is_lmdb(place) or is_array_file(place) or is_idx_file(place))


def first_shape(path: str | os.PathLike[str], prepare: Preparation) -> tuple[int, ...] | None:
    """Read the first picture or the first entry of a database; its shape. Of array files only the existence is checked.

    Raises:
        AmctError: As ``open_samples``; the first sample cannot be read or prepared.
    """
    if is_array_file(Path(path)) and is_file(path):
        return None
    first = next(iter(open_samples(path, prepare)), None)
    return None if first is None else first.values.shape


def read_image_list(path: str | os.PathLike[str]) -> list[tuple[str, int | None]]:
    """Read an image list of Caffe: a path per line, optionally followed by a space and an integer label.

    Raises:
        FileError: The file cannot be read.
        ParseError: The list is empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{path}: the list of pictures cannot be read: {reason}") from error
    entries: list[tuple[str, int | None]] = []
    for line in text.splitlines():
        name, _, last = line.strip().rpartition(" ")
        if name and _LABEL.fullmatch(last):
            entries.append((name.strip(), int(last)))
        elif line.strip():
            entries.append((line.strip(), None))
    if not entries:
        raise ParseError(f"{path}: File is empty: the list names no picture")
    return entries


def batches(
    source: SampleSource, size: int, *, drop_last: bool = False, first: int = 0, step: int = 1
) -> Iterator[tuple[npt.NDArray[np.float32], list[int | None]]]:
    """Stack samples to batches of ``size``, with their labels; a smaller last batch is kept unless ``drop_last``.

    With ``first`` and ``step`` only batches first, first + step, first + 2 · step, … are decoded.

    Raises:
        ArgumentError: The size is not positive, or samples of one batch have different shapes.
    """
    if size < 1:
        raise ArgumentError(f"a batch has at least one sample, got size {size}")
    waiting: list[Sample] = []
    for sample in source.chosen(lambda index: index // size >= first and (index // size - first) % step == 0):
        if waiting and sample.values.shape != waiting[0].values.shape:
            raise ArgumentError(
                f"{source.name}: {sample.name} has shape {sample.values.shape} and {waiting[0].name} "
                f"{waiting[0].values.shape}: they cannot be in one batch. Give a size to resize to, or batch size 1"
            )
        waiting.append(sample)
        if len(waiting) == size:
            yield _stacked(waiting)
    if waiting and not drop_last:
        yield _stacked(waiting)


def _stacked(waiting: list[Sample]) -> tuple[npt.NDArray[np.float32], list[int | None]]:
    """Take samples out of a list and stack them; while their batch is used, the list keeps nothing of it."""
    values, labels = np.stack([each.values for each in waiting]), [each.label for each in waiting]
    waiting.clear()
    return values, labels


def _folder_source(folder: Path, prepare: Preparation) -> SampleSource:
    """The pictures of a folder, which is listed anew in every pass."""
    next(walk_images(folder))  # an empty folder is refused at once

    def files() -> Iterator[FileStamp]:
        for entry in walk_images(folder):
            found = entry.stat()
            yield os.path.relpath(entry.path, folder), found.st_size, found.st_mtime_ns

    return SampleSource(
        str(folder),
        lambda: sum(1 for _ in walk_images(folder)),
        lambda: _pictures(_spread(folder), prepare),
        prepare,
        files,
    )


def _list_source(name: str, entries: list[tuple[Path, int | None]], prepare: Preparation) -> SampleSource:
    return SampleSource(
        name,
        lambda: len(entries),
        lambda: _pictures(entries, prepare),
        prepare,
        lambda: (_stamp(path) for path, _ in entries),
    )


def _pictures(entries: Iterable[tuple[Path, int | None]], prepare: Preparation) -> Iterator[tuple[str, Read]]:
    def read(path: Path, label: int | None) -> tuple[npt.NDArray[Any], int | None]:
        picture = read_image(path, color=prepare.color != "gray")
        return (to_bgr(picture) if prepare.color == "bgr" else picture.transpose(2, 0, 1)), label

    for path, label in entries:
        yield str(path), partial(read, path, label)


def _spread(folder: Path) -> Iterator[tuple[Path, int | None]]:
    """The pictures so that any first ones are from all over the sorted list: of folders named by class, of all classes.

    The list lives as long as the pass.
    """
    listed = list(_labelled_by_folder(folder))
    for index in spread_order(len(listed)):
        name, label = listed[index]
        yield folder / name, label


def spread_order(count: int) -> npt.NDArray[np.int64]:
    """All indices below ``count`` in a fixed order whose first n are spread evenly, whatever n is.

    The list is halved again and again, and both halves take turns; a fixed random number tells which of them begins. So
    of n samples of a list in which a class has a share s, about n · s are of this class. It is the same in every
    process.
    """
    levels = max(count - 1, 0).bit_length()
    places = (np.arange(count, dtype=np.int64) << levels) // max(count, 1)
    random = np.random.default_rng(_SPREAD_SEED)
    order = np.zeros(count, np.int64)
    for level in range(levels):
        halves = places >> (levels - level - 1)  # which of the 2^(level + 1) parts of the list a place is in
        turns = random.integers(0, 2, 1 << level)
        order |= ((halves & 1) ^ turns[halves >> 1]) << level
    return np.argsort(order)


def _labelled_by_folder(folder: Path) -> Iterator[tuple[str, int | None]]:
    """The sorted paths in the folder; the label is the number of the subfolder among those with pictures."""
    number, current = -1, None
    start = len(os.path.join(folder, ""))  # noqa: PTH118  of 10^5 names each Path takes long
    for entry in walk_images(folder):
        name = entry.path[start:]
        below, separator, _ = name.partition(os.sep)
        if separator and below != current:
            number, current = number + 1, below
        yield name, number if separator else None


def file_fingerprint(path: Path) -> str:
    """A fingerprint of one file: its name, its size and the time of its last change."""
    return hashlib.sha256(repr(_stamp(path)).encode(errors="surrogateescape")).hexdigest()


def _stamp(path: Path) -> FileStamp:
    """Size and time of a file; of one that cannot be read only its name, the error comes when it is read."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return str(path), -1, -1
    return str(path), found.st_size, found.st_mtime_ns


def _array_source(path: Path, prepare: Preparation) -> SampleSource:
    rows = open_rows(path)
    if rows is not None:
        return _stacked_source(path, rows, None, prepare)
    arrays = read_arrays(path)
    values = choose(arrays, DATA_NAMES)
    values = read_array(path) if values is None else values
    return _stacked_source(path, values, choose(arrays, LABEL_NAMES), prepare)


def _idx_source(path: Path, prepare: Preparation) -> SampleSource:
    values, beside = read_idx(path), labels_beside(path)
    pictures = values[:, None] if values.ndim == _PICTURE_AXES else values
    return _stacked_source(path, pictures, None if beside is None else read_idx(beside), prepare)


def _stacked_source(
    path: Path, values: npt.NDArray[Any] | StoredRows, labels: npt.NDArray[Any] | None, prepare: Preparation
) -> SampleSource:
    if values.ndim < 1 or not values.size:
        raise ParseError(f"{path}: no samples: the array has shape {values.shape}, samples lie along its first axis")
    if values.dtype.kind not in "buif":
        raise ParseError(f"{path}: the array holds {values.dtype}, not numbers")
    if labels is not None and (labels.shape[:1] != values.shape[:1] or not labels.size):
        raise ParseError(f"{path}: {counted(len(values), 'sample')} but labels of shape {labels.shape}")
    if labels is not None and (labels.dtype.kind not in "buif" or not np.isfinite(labels).all()):
        raise ParseError(f"{path}: expected whole numbers as labels, got {labels.dtype} or NaN; give class numbers")

    def read(index: int) -> tuple[npt.NDArray[Any], int | None]:
        return values[index], None if labels is None else int(np.asarray(labels[index]).reshape(-1)[0])

    def raw() -> Iterator[tuple[str, Read]]:
        for index in range(len(values)):
            yield f"{path}[{index}]", partial(read, index)

    return SampleSource(str(path), lambda: len(values), raw, prepare, lambda: [_stamp(path)])


def _lmdb_source(path: Path, prepare: Preparation) -> SampleSource:
    reader = LmdbReader(path)

    def read(key: str, value: bytes) -> tuple[npt.NDArray[Any], int | None]:
        datum = parse_datum(value, f'{path}: entry "{key}"')
        return datum.values, datum.label

    def raw() -> Iterator[tuple[str, Read]]:
        for index, (key, value) in enumerate(reader.items()):
            yield f"{path}[{index}]", partial(read, key, value)

    return SampleSource(str(path), lambda: len(reader), raw, prepare, lambda: [_stamp(data_file(path))])


def _crop_middle(values: npt.NDArray[Any], crop: tuple[int, int], source: str) -> npt.NDArray[Any]:
    height, width = values.shape[1:]
    if height < crop[0] or width < crop[1]:
        raise ArgumentError(
            f"{source}: a crop of {crop[0]} x {crop[1]} does not fit into a picture of {height} x {width}"
        )
    top, left = (height - crop[0]) // 2, (width - crop[1]) // 2
    return values[:, top : top + crop[0], left : left + crop[1]]


def _fitting(
    what: str, values: npt.NDArray[np.float32], shape: tuple[int, ...], source: str
) -> npt.NDArray[np.float32]:
    """A mean or a scale in a form that can be applied to an input of a shape."""
    if values.shape == shape:
        return values
    if values.size == 1 or (values.ndim == 1 and len(shape) == _PICTURE_AXES and len(values) == shape[0]):
        column: npt.NDArray[np.float32] = values.reshape((-1,) + (1,) * (len(shape) - 1))
        return column
    raise ArgumentError(
        f"{source}: a {what} of shape {values.shape} does not fit an input of shape {shape}: give one number, one a "
        "channel, or a picture of that shape"
    )


# -- Reads mean files, the values subtracted from every image: Caffe's .binaryproto, or .npy ---------------------------


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
