"""Layers that change the shape or crop: Flatten, Reshape, Crop, Im2col."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.layers.convolution import IMAGE_AXES, read_window
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from amct.caffe.engine.blob import Shape


class _View(Layer):
    """The top is the bottom's memory with another shape."""

    returns_views = True
    shares_memory = True
    allows_in_place = False

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A view, if the memory layout allows it."""
        return [bottoms[0].reshape(self.top_shape)]

    top_shape: Shape


@register("Flatten")
class Flatten(_View):
    """Merges the axes from ``axis`` to ``end_axis`` into one."""

    moves_values = True

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shape with the axes merged."""
        options, shape = self.parameter.flatten_param, bottoms[0]
        start = canonical_axis(options.axis, len(shape), self.name)
        end = canonical_axis(options.end_axis, len(shape), self.name)
        if end < start:
            raise self.error(f"end_axis {end} lies before axis {start}")
        self.top_shape = (*shape[:start], count(shape, start, end + 1), *shape[end + 1 :])
        return [self.top_shape]


@register("Reshape")
class Reshape(_View):
    """Sets new sizes for some axes: 0 copies the bottom's size, one -1 is inferred."""

    moves_values = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the sizes."""
        self.dims = list(self.parameter.reshape_param.shape.dim)
        if self.dims.count(-1) > 1:
            raise self.error(f"new shape contains multiple -1 dims: {self.dims}")
        if any(size < -1 for size in self.dims):
            raise self.error(f"a dim of the new shape must be -1, 0 or positive, got {self.dims}")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """Resolve 0 and -1."""
        options, shape = self.parameter.reshape_param, bottoms[0]
        axes = len(shape)
        start = options.axis if options.axis >= 0 else axes + options.axis + 1
        end = axes if options.num_axes == -1 else start + options.num_axes
        if not 0 <= start <= axes:
            raise self.error(f"axis {options.axis} out of range for {axes}-D input blob")
        if options.num_axes < -1 or end > axes:
            raise self.error(f"num_axes {options.num_axes} from axis {start} exceeds the {axes} axes of {shape}")
        middle = []
        for position, size in enumerate(self.dims):
            if size == 0 and start + position >= axes:
                raise self.error(
                    f"new shape contains a 0, but there is no corresponding bottom axis to copy: {self.dims}"
                )
            middle.append(shape[start + position] if size == 0 else size)
        rest = [*shape[:start], *shape[end:]]
        if -1 in middle:
            known = count([size for size in middle if size != -1]) * count(rest)
            if known == 0 or count(shape) % known:
                raise self.error(
                    f"bottom count {count(shape)} must be divisible by the product of the specified dims {known}"
                )
            middle[middle.index(-1)] = count(shape) // known
        self.top_shape = (*shape[:start], *middle, *shape[end:])
        if count(self.top_shape) != count(shape):
            raise self.error(f"output count must match input count: {shape} cannot become {self.top_shape}")
        return [self.top_shape]


@register("Crop")
class Crop(Layer):
    """Crops the first bottom to the second one's size on the axes from ``axis`` on, starting at ``offset``."""

    bottom_count = (2, 2)

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the number of offsets."""
        options = self.parameter.crop_param
        start = canonical_axis(options.axis, len(bottoms[0]), self.name)
        self.axis, self.offset = start, list(options.offset)
        if len(self.offset) not in (0, 1, len(bottoms[0]) - start):
            raise self.error(
                f"number of offset values specified must be equal to the number of dimensions following axis {start}, "
                "or one, "
                f"got {len(self.offset)}"
            )

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The first bottom's sizes before ``axis``, the second one's from there on."""
        shape, like = bottoms
        if len(shape) != len(like):
            raise self.error(f"both bottoms need the same number of axes: {shape} and {like}")
        self.starts, sizes = [0] * self.axis, list(shape[: self.axis])
        for position, axis in enumerate(range(self.axis, len(shape))):
            offset = self.offset[position if len(self.offset) > 1 else 0] if self.offset else 0
            if shape[axis] - offset < like[axis]:
                raise self.error(
                    f"the crop for dimension {axis} is out-of bounds: {shape[axis]} with offset {offset} cannot give "
                    f"{like[axis]}"
                )
            self.starts.append(offset)
            sizes.append(like[axis])
        self.sizes = tuple(sizes)
        return [self.sizes]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Crop."""
        window = tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))
        return [bottoms[0][window].clone()]


@register("Im2col")
class Im2col(Layer):
    """(N, C, H, W) to (N, C * kernel area, H', W'): each window as a column of channels."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the window."""
        options = self.parameter.convolution_param
        self.axis = canonical_axis(options.axis, len(bottoms[0]), self.name)
        if len(bottoms[0]) - self.axis - 1 != IMAGE_AXES:
            raise self.error(f"needs two spatial axes after axis {self.axis}, got shape {bottoms[0]}")
        self.window = read_window(self, options, IMAGE_AXES)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(..., C * kernel area, windows along H, windows along W)."""
        shape = bottoms[0]
        self.sizes = self.window.output(shape[self.axis + 1 :])
        if min(self.sizes) <= 0:
            raise self.error(f"the kernel {self.window.kernel} is larger than the input {shape}")
        self.rows = shape[self.axis] * count(self.window.kernel)
        return [(*shape[: self.axis], self.rows, *self.sizes)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Unfold the windows."""
        bottom, window = bottoms[0], self.window
        flat = bottom.reshape(-1, *bottom.shape[self.axis :])
        columns = functional.unfold(flat, window.kernel, window.dilation, window.pad, window.stride)
        return [columns.reshape(*bottom.shape[: self.axis], self.rows, *self.sizes)]
