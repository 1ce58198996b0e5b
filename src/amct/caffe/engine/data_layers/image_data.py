"""ImageData: images listed in a text file, with their labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from amct.caffe.engine.data_layers.prefetch import PrefetchLayer
from amct.caffe.engine.registry import register
from amct.data.datum import to_bgr
from amct.data.images import read_image
from amct.data.resample import resize
from amct.data.samples import read_image_list

if TYPE_CHECKING:
    import numpy.typing as npt

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.data_layers.prefetch import Arrays, BatchSource
    from amct.caffe.engine.data_layers.transform import Transformation
    from amct.caffe.engine.messages import ProtoMessage

    Picture = npt.NDArray[Any]


class _PictureBatches:
    """Batches of images in the order of the list, which is shuffled before each pass on request."""

    def __init__(
        self, entries: list[tuple[str, int]], options: ProtoMessage, transformation: Transformation, *, seed: int
    ) -> None:
        self._entries = entries
        self._options = options
        self._transformation = transformation
        self._random = np.random.default_rng(seed)
        if options.shuffle:
            self._random.shuffle(self._entries)
        self._next = int(self._random.integers(options.rand_skip)) if options.rand_skip else 0

    def next_batch(self) -> Arrays:
        pictures, labels = [], []
        for _ in range(self._options.batch_size):
            name, label = self._entries[self._next]
            pictures.append(self.read(name))
            labels.append(label)
            self._next += 1
            if self._next == len(self._entries):
                self._next = 0
                if self._options.shuffle:
                    self._random.shuffle(self._entries)
        return [self._transformation.batch(pictures), np.array(labels, np.float32)]

    def peek(self) -> Picture:
        """The first image, without advancing."""
        return self.read(self._entries[self._next][0])

    def read(self, name: str) -> Picture:
        """One image, resized on request, in blue, green, red order."""
        picture = read_image(self._options.root_folder + name, color=self._options.is_color)
        if self._options.new_height:
            picture = resize(picture, (self._options.new_height, self._options.new_width))
        return to_bgr(picture)


@register("ImageData")
class ImageData(PrefetchLayer):
    """Reads images (blue, green, red; resized without smoothing, as OpenCV does) and their labels."""

    top_count = (2, 2)

    def open_source(self) -> tuple[BatchSource, list[Shape]]:
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
            raise self.error(f"Not enough points to skip: rand_skip {options.rand_skip}, {len(entries)} pictures")
        transformation, seed = self.transformation(is_random=bool(options.shuffle or options.rand_skip))
        source = _PictureBatches(entries, options, transformation, seed=seed)
        shape = transformation.output_shape(source.peek().shape)
        return source, [(options.batch_size, *shape), (options.batch_size,)]
