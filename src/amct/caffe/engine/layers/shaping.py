"""Layers that change the shape, crop, pad or move values: Flatten, Reshape, Crop, Im2col, Reorg, Reverse, Pad."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from amct.caffe.engine.layer import Layer, Place, Shape, Tensors, count, register
from amct.caffe.engine.onnx_place import FollowsBatchError, fixed, product
from amct.caffe.engine.windows import SPATIAL_AXES, read_window


class _View(Layer):
    """The top is the bottom's memory with another shape."""

    returns_views = True
    shares_memory = True
    allows_in_place = False

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
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
        start = self.canonical_axis(options.axis, len(shape))
        end = self.canonical_axis(options.end_axis, len(shape))
        if end < start:
            raise self.error(f"end_axis {end} lies before axis {start}")
        self.top_shape = (*shape[:start], count(shape, start, end + 1), *shape[end + 1 :])
        return [self.top_shape]

    def to_onnx(self, place: Place) -> None:
        """Flatten if the result is a matrix, else Reshape."""
        own, wanted = place.bottom_dims[0], place.top_dims[0]
        if len(wanted) == 2 and wanted[1] is not None and wanted[1] == product(own[1:]):
            place.top("Flatten", place.bottom, axis=1)
        else:
            place.top("Reshape", place.bottom, place.target(place.top_dims[0], "shape"))


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

    def to_onnx(self, place: Place) -> None:
        """Reshape to the known sizes."""
        place.top("Reshape", place.bottom, place.target(place.top_dims[0], "shape"))


@register("Crop")
class Crop(Layer):
    """Crops the first bottom to the second one's size on the axes from ``axis`` on, starting at ``offset``."""

    bottom_count = (2, 2)

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the number of offsets."""
        options = self.parameter.crop_param
        start = self.canonical_axis(options.axis, len(bottoms[0]))
        self.axis, self.offset = start, list(options.offset)
        if len(self.offset) not in (0, 1, len(bottoms[0]) - start):
            raise self.error(
                f"number of offset values specified must be equal to the number of dimensions following axis {start}, "
                f"or one, got {len(self.offset)}"
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

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        window = tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))
        return [bottoms[0][window].clone()]

    def to_onnx(self, place: Place) -> None:
        """Slice; the second bottom only gives the size."""
        starts, ends, axes = [], [], []
        sizes = zip(place.bottom_dims[0], place.top_dims[0], self.starts, strict=True)
        for axis, (own, wanted, start) in enumerate(sizes):
            if own is None or wanted is None:
                if start or own != wanted:
                    raise FollowsBatchError(f'layer "{self.name}" crops along it')
                continue
            if (start, wanted) != (0, own):
                starts.append(start)
                ends.append(start + wanted)
                axes.append(axis)
        if not axes:
            place.alias(place.bottom)
            return
        place.top(
            "Slice", place.bottom, place.value("starts", starts), place.value("ends", ends), place.value("axes", axes)
        )


@register("Im2col")
class Im2col(Layer):
    """(N, C, H, W) to (N, C * kernel area, H', W'): each window as a column of channels."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the window."""
        options = self.parameter.convolution_param
        self.axis = self.canonical_axis(options.axis, len(bottoms[0]))
        if len(bottoms[0]) - self.axis - 1 != SPATIAL_AXES:
            raise self.error(f"needs two spatial axes after axis {self.axis}, got shape {bottoms[0]}")
        self.window = read_window(self, options, SPATIAL_AXES)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(..., C * kernel area, windows along H, windows along W)."""
        shape = bottoms[0]
        self.sizes = self.window.output(shape[self.axis + 1 :])
        if min(self.sizes) <= 0:
            raise self.error(f"the kernel {self.window.kernel} is larger than the input {shape}")
        self.rows = shape[self.axis] * count(self.window.kernel)
        return [(*shape[: self.axis], self.rows, *self.sizes)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Unfold the windows."""
        bottom, window = bottoms[0], self.window
        flat = bottom.reshape(-1, *bottom.shape[self.axis :])
        columns = functional.unfold(flat, window.kernel, window.dilation, window.pad, window.stride)
        return [columns.reshape(*bottom.shape[: self.axis], self.rows, *self.sizes)]

    def to_onnx(self, place: Place) -> None:
        """A Conv whose filters each select one value of the window."""
        dims = place.bottom_dims[0]
        (channels,) = fixed(dims[self.axis : self.axis + 1])
        cells = int(np.prod(self.window.kernel))
        filters = np.tile(np.eye(cells, dtype=np.float32), (channels, 1)).reshape(-1, 1, *self.window.kernel)
        flat = place.reshaped(place.bottom, (None, *dims[self.axis :]), "flat")
        attributes = self.window.onnx_attributes(channels)
        place.top_reshaped(place.main("Conv", flat, place.value("filters", filters), **attributes))


DEFAULT_BLOCK = 2
_MODES = {1: "reflect", 2: "edge", 3: "wrap"}
WRAP_OPSET = 19
"""ONNX has the mode since then."""


def space_to_depth(bottom: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(N, C, H, W) to (N, h * w * C, H / h, W / w): the pixels of each h x w block become channels."""
    batch, channels, rows, columns = bottom.shape
    split = bottom.reshape(batch, channels, rows // height, height, columns // width, width)
    moved = split.permute(0, 3, 5, 1, 2, 4)
    return moved.reshape(batch, channels * height * width, rows // height, columns // width).contiguous()


def depth_to_space(bottom: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of ``space_to_depth``: (N, h * w * C, H, W) to (N, C, H * h, W * w)."""
    batch, channels, rows, columns = bottom.shape
    split = bottom.reshape(batch, height, width, channels // (height * width), rows, columns)
    moved = split.permute(0, 3, 4, 1, 5, 2)
    return moved.reshape(batch, channels // (height * width), rows * height, columns * width).contiguous()


@register("Reorg")
class Reorg(Layer):
    """Space to depth with blocks of ``stride`` x ``stride`` pixels, or depth to space with ``reverse``; as in ATC."""

    allows_in_place = False
    moves_values = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Read stride and reverse."""
        self.require_image(bottoms[0])
        options = self.parameter.reorg_param
        self.block, self.is_reverse = (options.stride, options.stride), options.reverse
        if min(self.block) <= 0:
            raise self.error(f"the block of pixels must not be empty, got {self.block}")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(N, C * block area, H / h, W / w), or the inverse with ``reverse``."""
        self.require_image(bottoms[0])
        (batch, channels, rows, columns), (height, width) = bottoms[0], self.block
        if self.is_reverse:
            if channels % (height * width):
                raise self.error(f"{channels} channels cannot become blocks of {height} x {width} pixels")
            return [(batch, channels // (height * width), rows * height, columns * width)]
        if rows % height or columns % width:
            raise self.error(f"an image of {(rows, columns)} cannot be split into blocks of {height} x {width} pixels")
        return [(batch, channels * height * width, rows // height, columns // width)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Space to depth, or depth to space."""
        change = depth_to_space if self.is_reverse else space_to_depth
        return [change(bottoms[0], *self.block)]

    def to_onnx(self, place: Place) -> None:
        """Reshape to six axes, Transpose, Reshape; ONNX's SpaceToDepth supports square blocks only."""
        batch, *rest = place.bottom_dims[0]
        channels, rows, columns = fixed(rest)
        height, width = self.block
        if self.is_reverse:
            split = (batch, height, width, channels // (height * width), rows, columns)
            order = [0, 3, 4, 1, 5, 2]
        else:
            split = (batch, channels, rows // height, height, columns // width, width)
            order = [0, 3, 5, 1, 2, 4]
        place.top_reshaped(place.main("Transpose", place.reshaped(place.bottom, split, "split"), perm=order))


@register("PassThrough")
class PassThrough(Reorg):
    """Space to depth with blocks of ``block_height`` x ``block_width`` (default 2 x 2) pixels, as in YOLO v2."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read ``pass_through_param``, or ``reorg_param`` if that is given."""
        if self.parameter.HasField("reorg_param"):
            super().setup(bottoms)
            return
        self.require_image(bottoms[0])
        options = self.parameter.pass_through_param
        self.block = (options.block_height or DEFAULT_BLOCK, options.block_width or DEFAULT_BLOCK)
        self.is_reverse = False
        outputs = bottoms[0][1] * self.block[0] * self.block[1]
        if options.num_output not in (0, outputs):
            raise self.error(
                f"num_output is {options.num_output}, but {bottoms[0]} in blocks {self.block} give {outputs}"
            )


@register("ShuffleChannel")
class ShuffleChannel(Layer):
    """Channels as a (group, C / group) matrix, transposed; as in ShuffleNet."""

    allows_in_place = False
    moves_values = True

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        group, shape = self.parameter.shuffle_channel_param.group, bottoms[0]
        if len(shape) < 2 or group <= 0 or shape[1] % group:
            raise self.error(f"group {group} does not divide the channels of {shape}")
        return [shape]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Transpose the two factors of the channel axis."""
        bottom, group = bottoms[0], self.parameter.shuffle_channel_param.group
        rows = bottom.reshape(bottom.shape[0], group, bottom.shape[1] // group, *bottom.shape[2:])
        return [rows.transpose(1, 2).reshape(bottom.shape).clone()]

    def to_onnx(self, place: Place) -> None:
        """Reshape, Transpose, Reshape."""
        batch, *rest = place.bottom_dims[0]
        group = int(self.parameter.shuffle_channel_param.group)
        (channels,) = fixed(rest[:1])
        rows = place.reshaped(place.bottom, (batch, group, channels // group, *rest[1:]), "rows")
        place.top_reshaped(place.main("Transpose", rows, perm=[0, 2, 1, *range(3, 2 + len(rest))]))


@register("Reverse")
class Reverse(Layer):
    """Reverses the order of the values along each ``axis`` (default 0)."""

    allows_in_place = False
    moves_values = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the axes."""
        given = self.parameter.reverse_param.axis
        axes = [given] if isinstance(given, int) else given or [0]  # some forks declare a single axis
        self.axes = sorted({self.canonical_axis(axis, len(bottoms[0])) for axis in axes})

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Flip the axes."""
        return [bottoms[0].flip(self.axes)]

    def to_onnx(self, place: Place) -> None:
        """Slice with step -1."""
        count, first = len(self.axes), int(np.iinfo(np.int64).min)
        edges = {"from": [-1] * count, "to": [first] * count, "axes": self.axes, "steps": [-1] * count}
        place.top("Slice", place.bottom, *(place.value(name, values) for name, values in edges.items()))


@register("Pad")
class Pad(Layer):
    """Pads each axis; ``pads`` lists the amounts before all axes, then those after all axes, as in ONNX."""

    allows_in_place = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Read how much is added before and after each axis."""
        options, count = self.parameter.pad_param, len(bottoms[0])
        axes = [self.canonical_axis(axis, count) for axis in options.axes] or list(range(count))
        pads = list(options.pads)
        if len(pads) != 2 * len(axes):
            raise self.error(f"pads must hold 2 numbers for each of {len(axes)} axes, got {len(pads)}")
        self.sides = dict(zip(axes, zip(pads[: len(axes)], pads[len(axes) :], strict=True), strict=True))
        self.mode = _MODES.get(options.mode)
        if self.mode and min(pads) < 0:
            raise self.error(f"negative pads (cropping) need mode CONSTANT, got {pads}")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The size of each axis plus its pads."""
        shape = tuple(size + sum(self.sides.get(axis, ())) for axis, size in enumerate(bottoms[0]))
        empty = self.mode is not None and any(bottoms[0][axis] == 0 for axis in self.sides)
        if min(shape) < 0 or empty:
            raise self.error(f"pads {self.sides} (axis: before, after) do not fit {bottoms[0]}")
        return [shape]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Pad by a constant, or by index in the other modes."""
        bottom = bottoms[0]
        if self.mode is None:
            flat = [side for axis in reversed(range(bottom.dim())) for side in self.sides.get(axis, (0, 0))]
            return [functional.pad(bottom, flat, value=self.parameter.pad_param.value)]
        for axis, sides in self.sides.items():
            places = np.pad(np.arange(bottom.shape[axis]), sides, mode=self.mode)  # type: ignore[call-overload]
            bottom = bottom.index_select(axis, torch.from_numpy(places).to(bottom.device))
        return [bottom]

    def to_onnx(self, place: Place) -> None:
        """Pad; mode WRAP needs opset 19."""
        both = [self.sides.get(axis, (0, 0)) for axis in range(len(place.bottom_dims[0]))]
        inputs = [
            place.bottom,
            place.value("amounts", [*(before for before, _ in both), *(after for _, after in both)]),
        ]
        if self.mode is None:
            place.top("Pad", *inputs, place.value("filling", float(self.parameter.pad_param.value)))
            return
        if self.mode == "wrap" and place.writer.opset < WRAP_OPSET:
            raise place.error(f"mode WRAP needs opset {WRAP_OPSET}, got {place.writer.opset}; request a newer one")
        place.top("Pad", *inputs, mode=self.mode)
