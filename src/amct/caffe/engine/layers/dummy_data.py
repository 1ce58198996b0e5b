"""DummyData: tops filled by fillers, to run a net without data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.build.fillers import filler_function, lazy_fill
from amct.caffe.engine.layer import Layer
from amct.caffe.engine.messages import new_message
from amct.caffe.engine.registry import register

if TYPE_CHECKING:
    from amct.caffe.engine.blob import Blob, Shape


@register("DummyData")
class DummyData(Layer):
    """Constant tops are filled once, random tops at each forward pass."""

    bottom_count = (0, 0)
    top_count = (1, None)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read shapes and fillers: one for all tops, or one per top."""
        options, tops = self.parameter.dummy_data_param, len(self.top_blobs)
        self.shapes = self._shapes(tops)
        fillers = list(options.data_filler)
        if len(fillers) not in (0, 1, tops):
            raise self.error(
                f"Number of data fillers must be 0, 1 or equal to the number of tops: {tops}; you specified "
                f"{len(fillers)}"
            )
        if not fillers:
            fillers = [new_message("FillerParameter")]
        self.fillers = fillers * tops if len(fillers) == 1 else fillers
        for blob, shape, filler in zip(self.top_blobs, self.shapes, self.fillers, strict=True):
            self.context.check_size(shape, f'a top of layer "{self.name}"')
            filler_function(filler, shape, self.name)
            blob.set_shape(shape)
            lazy_fill(blob, filler, self.name)

    def _shapes(self, tops: int) -> list[Shape]:
        options = self.parameter.dummy_data_param
        if options.shape and options.num:
            raise self.error("give shape, or num, channels, height and width; not both")
        given = [tuple(shape.dim) for shape in options.shape]
        if not given:
            columns = (options.num, options.channels, options.height, options.width)
            lengths = {len(column) for column in columns}
            if len(lengths) != 1:
                raise self.error("num, channels, height and width must be given the same number of times")
            given = list(zip(*columns, strict=True))
        if len(given) not in (1, tops):
            raise self.error(f"Must specify 'shape' once, or once per top blob: {tops} tops, {len(given)} shapes")
        return given * tops if len(given) == 1 else given

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes of the prototxt."""
        return list(self.shapes)

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Fill the random tops again."""
        for blob, shape, filler in zip(tops, self.shapes, self.fillers, strict=True):
            if filler.type != "constant":
                seed = int(torch.randint(2**62, ()).item())
                blob.set_tensor(filler_function(filler, shape, self.name)(torch.Generator().manual_seed(seed)))
