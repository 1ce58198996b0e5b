"""Layers that only move values: Reorg, PassThrough, ShuffleChannel, Reverse, Pad."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from amct.caffe.engine.layers.tensor_operator import TensorOperator
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis, require_image

if TYPE_CHECKING:
    from amct.caffe.engine.blob import Shape

DEFAULT_BLOCK = 2
_MODES = {1: "reflect", 2: "edge", 3: "wrap"}


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
class Reorg(TensorOperator):
    """Space to depth with blocks of ``stride`` x ``stride`` pixels, or depth to space with ``reverse``; as in ATC."""

    moves_values = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Read stride and reverse."""
        require_image(bottoms[0], self.name)
        options = self.parameter.reorg_param
        self.block, self.is_reverse = (options.stride, options.stride), options.reverse
        if min(self.block) <= 0:
            raise self.error(f"the block of pixels must not be empty, got {self.block}")

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """(N, C * block area, H / h, W / w), or the inverse with ``reverse``."""
        require_image(bottoms[0], self.name)
        (batch, channels, rows, columns), (height, width) = bottoms[0], self.block
        if self.is_reverse:
            if channels % (height * width):
                raise self.error(f"{channels} channels cannot become blocks of {height} x {width} pixels")
            return [(batch, channels // (height * width), rows * height, columns * width)]
        if rows % height or columns % width:
            raise self.error(f"an image of {(rows, columns)} cannot be split into blocks of {height} x {width} pixels")
        return [(batch, channels * height * width, rows // height, columns // width)]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Space to depth, or depth to space."""
        change = depth_to_space if self.is_reverse else space_to_depth
        return [change(bottoms[0], *self.block)]


@register("PassThrough")
class PassThrough(Reorg):
    """Space to depth with blocks of ``block_height`` x ``block_width`` (default 2 x 2) pixels, as in YOLO v2."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read ``pass_through_param``, or ``reorg_param`` if that is given."""
        if self.parameter.HasField("reorg_param"):
            super().setup(bottoms)
            return
        require_image(bottoms[0], self.name)
        options = self.parameter.pass_through_param
        self.block = (options.block_height or DEFAULT_BLOCK, options.block_width or DEFAULT_BLOCK)
        self.is_reverse = False
        outputs = bottoms[0][1] * self.block[0] * self.block[1]
        if options.num_output not in (0, outputs):
            raise self.error(
                f"num_output is {options.num_output}, but {bottoms[0]} in blocks {self.block} give {outputs}"
            )


@register("ShuffleChannel")
class ShuffleChannel(TensorOperator):
    """Channels as a (group, C / group) matrix, transposed; as in ShuffleNet."""

    moves_values = True

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        group, shape = self.parameter.shuffle_channel_param.group, bottoms[0]
        if len(shape) < 2 or group <= 0 or shape[1] % group:
            raise self.error(f"group {group} does not divide the channels of {shape}")
        return [shape]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Transpose the two factors of the channel axis."""
        bottom, group = bottoms[0], self.parameter.shuffle_channel_param.group
        rows = bottom.reshape(bottom.shape[0], group, bottom.shape[1] // group, *bottom.shape[2:])
        return [rows.transpose(1, 2).reshape(bottom.shape).clone()]


@register("Reverse")
class Reverse(TensorOperator):
    """Reverses the order of the values along each ``axis`` (default 0)."""

    moves_values = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the axes."""
        given = self.parameter.reverse_param.axis
        axes = [given] if isinstance(given, int) else given or [0]  # some forks declare a single axis
        self.axes = sorted({canonical_axis(axis, len(bottoms[0]), self.name) for axis in axes})

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Flip the axes."""
        return [bottoms[0].flip(self.axes)]


@register("Pad")
class Pad(TensorOperator):
    """Pads each axis; ``pads`` lists the amounts before all axes, then those after all axes, as in ONNX."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read how much is added before and after each axis."""
        options, count = self.parameter.pad_param, len(bottoms[0])
        axes = [canonical_axis(axis, count, self.name) for axis in options.axes] or list(range(count))
        pads = list(options.pads)
        if len(pads) != 2 * len(axes):
            raise self.error(f"pads must hold 2 numbers for each of {len(axes)} axes, got {len(pads)}")
        self.sides = dict(zip(axes, zip(pads[: len(axes)], pads[len(axes) :], strict=True), strict=True))
        self.mode = _MODES.get(options.mode)
        if self.mode and min(pads) < 0:
            raise self.error(f"negative pads (cropping) need mode CONSTANT, got {pads}")

    def shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """The size of each axis plus its pads."""
        shape = tuple(size + sum(self.sides.get(axis, ())) for axis, size in enumerate(bottoms[0]))
        empty = self.mode is not None and any(bottoms[0][axis] == 0 for axis in self.sides)
        if min(shape) < 0 or empty:
            raise self.error(f"pads {self.sides} (axis: before, after) do not fit {bottoms[0]}")
        return [shape]

    def compute(self, bottoms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Pad by a constant, or by index in the other modes."""
        bottom = bottoms[0]
        if self.mode is None:
            flat = [side for axis in reversed(range(bottom.dim())) for side in self.sides.get(axis, (0, 0))]
            return [functional.pad(bottom, flat, value=self.parameter.pad_param.value)]
        for axis, sides in self.sides.items():
            places = np.pad(np.arange(bottom.shape[axis]), sides, mode=self.mode)  # type: ignore[call-overload]
            bottom = bottom.index_select(axis, torch.from_numpy(places).to(bottom.device))
        return [bottom]
