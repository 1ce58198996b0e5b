"""Layers that read images with labels ahead in a background thread: Data (LMDB) and ImageData (a list of files).

``transform_param`` (crop, mirror, subtract the mean, scale) is applied as Caffe does it. The formats are read by
``amct.data``.
"""

from __future__ import annotations

from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from amct.caffe.engine.layer import Layer, ProtoMessage, Shape, register
from amct.data.images import read_image, resize
from amct.data.lmdb import LmdbReader, is_lmdb, to_bgr
from amct.data.samples import read_image_list, read_mean
from amct.data.stored_batches import AheadIterator
from amct.errors import ModelError
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from amct.caffe.engine.blob import Blob

    Arrays = list[npt.NDArray[np.float32]]
    Picture = npt.NDArray[Any]

_PICTURE_AXES = 3


class Transformation:
    """Converts (channels, height, width) arrays to one float32 batch.

    Each image is cropped (TRAIN: at a random position, TEST: in the centre), the mean is subtracted (a mean file is
    cropped at the same position), the result is scaled and, with ``mirror``, mirrored with probability 1/2, in both
    phases.

    Args:
        parameter: The TransformationParameter.
        training: Whether the layer runs in the TRAIN phase.
        seed: The random seed, for mirrors and for crops in training.
        error: Creates an error that names the layer.

    Raises:
        ModelError: The settings contradict each other.
        FileError, ParseError: The mean file cannot be read.
    """

    def __init__(
        self, parameter: ProtoMessage, *, training: bool, seed: int, error: Callable[[str], ModelError]
    ) -> None:
        if parameter.HasField("mean_file") and parameter.mean_value:
            raise error("Cannot specify mean_file and mean_value at the same time")
        if parameter.force_color and parameter.force_gray:
            raise error("cannot set both force_color and force_gray")
        self.crop_size: int = parameter.crop_size
        self.color = True if parameter.force_color else False if parameter.force_gray else None
        self._mirror: bool = parameter.mirror
        self._scale = np.float32(parameter.scale)
        self._random_crop = training and self.crop_size > 0
        self._mean = read_mean(parameter.mean_file) if parameter.HasField("mean_file") else None
        if self._mean is not None and self._mean.ndim != _PICTURE_AXES:
            raise error(f"mean_file {parameter.mean_file} must hold an image (3 axes), its shape is {self._mean.shape}")
        self._mean_values = np.array(parameter.mean_value, np.float32)
        self._random = np.random.default_rng(seed)
        self._error = error

    def output_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The shape of one image after the transformation.

        Raises:
            ModelError: Crop or mean do not fit it.
        """
        channels, height, width = shape
        self._check(channels, height, width)
        return (channels, self.crop_size, self.crop_size) if self.crop_size else (channels, height, width)

    def batch(self, pictures: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        """Transform the images of one batch.

        Raises:
            ModelError: An image has another shape than the first, or crop or mean do not fit.
        """
        shape = self.output_shape(pictures[0].shape)
        result = np.empty((len(pictures), *shape), np.float32)
        for index, picture in enumerate(pictures):
            if self.output_shape(picture.shape) != shape:
                raise self._error(
                    f"picture {index} of a batch has shape {tuple(picture.shape)}, the first one "
                    f"{tuple(pictures[0].shape)}: all pictures of one batch must have one shape. Resize them, set "
                    "crop_size, or use batch_size: 1"
                )
            result[index] = self._one(picture)
        if self._mean_values.size:
            result -= self._mean_values.reshape(1, -1, 1, 1)
        if self._scale != 1:
            result *= self._scale
        return result

    def _one(self, picture: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Crop, subtract the mean image, mirror; mean values and scale are applied to the whole batch."""
        mirrored = self._mirror and bool(self._random.integers(2))
        mean = self._mean
        if self.crop_size:
            top, left = (self._offset(length) for length in picture.shape[1:])
            window = (slice(None), slice(top, top + self.crop_size), slice(left, left + self.crop_size))
            picture = picture[window]
            mean = None if mean is None else mean[window]
        if mean is not None:
            picture = picture.astype(np.float32) - mean
        return picture[:, :, ::-1] if mirrored else picture

    def _offset(self, length: int) -> int:
        spare = length - self.crop_size
        return int(self._random.integers(spare + 1)) if self._random_crop else spare // 2

    def _check(self, channels: int, height: int, width: int) -> None:
        if self.crop_size > min(height, width):
            raise self._error(f"crop_size {self.crop_size} is larger than the picture, {height} x {width}")
        if self._mean is not None and self._mean.shape != (channels, height, width):
            raise self._error(
                f"the mean file has shape {self._mean.shape}, the data {(channels, height, width)}: they must be equal"
            )
        if self._mean_values.size not in (0, 1, channels):
            raise self._error(
                f"Specify either 1 mean_value or as many as channels: {channels}; got {self._mean_values.size}"
            )


#: The largest number of batches read ahead; Caffe's default of ``prefetch``.
DEPTH = 4


class PrefetchLayer(Layer):
    """A layer whose tops are read ahead in a background thread.

    A subclass defines ``open_source``, which checks everything that can be checked before the first batch.
    """

    bottom_count = (0, 0)
    top_count: ClassVar[tuple[int, int | None]] = (1, 2)
    depth = DEPTH

    def open_source(self) -> tuple[Iterator[Arrays], list[Shape]]:
        """Open the data; return endless batches, which must not refer to the layer, and the shapes of the tops."""
        raise NotImplementedError

    def setup(self, bottoms: list[Shape]) -> None:
        """Open the data."""
        batches, self._shapes = self.open_source()
        self._batches: AheadIterator[Arrays] = AheadIterator(batches, self.depth)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes of the last batch, or of the first one."""
        return list(self._shapes)

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Write the next batch to the tops."""
        for blob, values in zip(tops, next(self._batches), strict=True):
            blob.set_tensor(torch.from_numpy(values))
        self._shapes = [blob.shape for blob in tops]

    def transformation(self, *, is_random: bool) -> tuple[Transformation, int]:
        """What ``transform_param`` asks for, and the seed of the source; 0 if neither uses random numbers."""
        options, where = self.parameter.transform_param, f'layer "{self.name}" ({self.type})'
        is_random = is_random or bool(options.mirror or (self.is_training and options.crop_size))
        seed = self.new_seed() if is_random else 0

        def error(message: str) -> ModelError:  # unlike ``self.error`` it does not refer to the layer
            return ModelError(f"{where}: {message}")

        return Transformation(options, training=self.is_training, seed=seed, error=error), seed

    def new_seed(self) -> int:
        """A seed for the source's own random numbers, drawn from torch's generator (``set_random_seed``)."""
        return int(torch.randint(2**62, ()).item())


_LEVELDB = 0


def _datum_batches(
    reader: LmdbReader, transformation: Transformation, *, batch_size: int, with_labels: bool, skip: int
) -> Iterator[Arrays]:
    """Batches of Datums in the order of the keys; starts over after the last."""
    passes = (reader.datums(color=transformation.color) for _ in repeat(None))
    datums = islice(chain.from_iterable(passes), skip, None)
    while True:
        some = list(islice(datums, batch_size))
        batch = [transformation.batch([datum.values for datum in some])]
        if with_labels:
            batch.append(np.array([datum.label for datum in some], np.float32))
        yield batch


@register("Data")
class Data(PrefetchLayer):
    """Reads an LMDB of Datums repeatedly; top 0 holds the images, top 1 (optional) the labels."""

    def open_source(self) -> tuple[Iterator[Arrays], list[Shape]]:
        """Open the database and read its first entry."""
        options = self.parameter.data_param
        if not options.source:
            raise self.error("data_param needs source, the folder of the database")
        if not options.batch_size:
            raise self.error("data_param needs batch_size, at least 1")
        if options.backend == _LEVELDB:
            raise self._leveldb_error(options.source)
        self.depth = max(1, options.prefetch)
        reader = LmdbReader(options.source)
        transformation, seed = self.transformation(is_random=options.rand_skip > 0)
        first = next(reader.datums(color=transformation.color))
        skip = int(np.random.default_rng(seed).integers(options.rand_skip)) if options.rand_skip else 0
        with_labels = len(self.top_blobs) > 1
        batches = _datum_batches(
            reader, transformation, batch_size=options.batch_size, with_labels=with_labels, skip=skip
        )
        shapes: list[Shape] = [(options.batch_size, *transformation.output_shape(first.values.shape))]
        if with_labels:
            shapes.append((options.batch_size,))
        return batches, shapes

    def _leveldb_error(self, source: str) -> ModelError:
        if is_lmdb(Path(source)):
            return self.error(f'"{source}" is an LMDB, but backend is LEVELDB (the default): write backend: LMDB')
        return self.error(
            f'"{source}" is meant to be a LevelDB (backend: LEVELDB, the default), which is not supported. Make an '
            "LMDB of it: run Caffe's convert_imageset with --backend=lmdb, or copy every Datum with amct.data.lmdb."
            "write_lmdb; then write backend: LMDB"
        )


def _picture(options: ProtoMessage, name: str) -> Picture:
    """One image, resized on request, in blue, green, red order."""
    picture = read_image(options.root_folder + name, color=options.is_color)
    if options.new_height:
        picture = resize(picture, (options.new_height, options.new_width))
    return to_bgr(picture)


def _picture_batches(
    entries: list[tuple[str, int]],
    start: int,
    options: ProtoMessage,
    transformation: Transformation,
    random: np.random.Generator,
) -> Iterator[Arrays]:
    """Batches of images in the order of the list, which is shuffled before each further pass on request."""
    while True:
        pictures, labels = [], []
        for _ in range(options.batch_size):
            name, label = entries[start]
            pictures.append(_picture(options, name))
            labels.append(label)
            start += 1
            if start == len(entries):
                start = 0
                if options.shuffle:
                    random.shuffle(entries)
        yield [transformation.batch(pictures), np.array(labels, np.float32)]


@register("ImageData")
class ImageData(PrefetchLayer):
    """Reads images (blue, green, red; resized without smoothing, as OpenCV does) and their labels."""

    top_count = (2, 2)

    def open_source(self) -> tuple[Iterator[Arrays], list[Shape]]:
        """Read the list and the first image."""
        options = self.parameter.image_data_param
        if not options.source:
            raise self.error("image_data_param needs source, a text file with an image and a label per line")
        if not options.batch_size:
            raise self.error("batch_size must be at least 1, got 0")
        if (options.new_height > 0) != (options.new_width > 0):
            raise self.error(
                "Current implementation requires new_height and new_width to be set at the same time: got "
                f"{options.new_height} and {options.new_width}"
            )
        entries = [(name, label or 0) for name, label in read_image_list(options.source)]
        if options.rand_skip and options.rand_skip > len(entries):
            raise self.error(
                f"Not enough points to skip: rand_skip {options.rand_skip}, {counted(len(entries), 'picture')}"
            )
        transformation, seed = self.transformation(is_random=bool(options.shuffle or options.rand_skip))
        random = np.random.default_rng(seed)
        if options.shuffle:
            random.shuffle(entries)
        start = int(random.integers(options.rand_skip)) if options.rand_skip else 0
        shape = transformation.output_shape(_picture(options, entries[start][0]).shape)
        batches = _picture_batches(entries, start, options, transformation, random)
        return batches, [(options.batch_size, *shape), (options.batch_size,)]
