"""Split, Concat, Slice and Tile: one blob to several, several to one."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.messages import ProtoMessage


@register("Split")
class Split(Layer):
    """One top per reader of a blob, all with the bottom's values; their gradients are summed."""

    moves_values = True
    top_count = (1, None)
    returns_views = True
    shares_memory = True
    allows_in_place = False

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape for each top."""
        return [bottoms[0]] * len(self.top_blobs)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Views of the bottom, without a copy."""
        bottom = bottoms[0]
        if not bottom.requires_grad:
            return [bottom] * len(self.top_blobs)
        return [bottom.view_as(bottom) for _ in self.top_blobs]


def _read_axis(layer: Layer, options: ProtoMessage, old_name: str, shape: Shape) -> int:
    """The axis of Concat or Slice: ``axis``, or its older name."""
    if options.HasField("axis") and options.HasField(old_name):
        raise layer.error(f"Either axis or {old_name} should be specified; not both")
    axis = getattr(options, old_name) if options.HasField(old_name) else options.axis
    return canonical_axis(axis, len(shape), layer.name)


@register("Concat")
class Concat(Layer):
    """The bottoms concatenated along ``axis``."""

    moves_values = True
    bottom_count = (1, None)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the axis: ``axis`` or the older ``concat_dim``."""
        self.axis = _read_axis(self, self.parameter.concat_param, "concat_dim", bottoms[0])
        self.shares_memory = len(bottoms) == 1

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The sum of the sizes along the axis; all other sizes must be equal."""
        first, axis = bottoms[0], self.axis
        for index, shape in enumerate(bottoms[1:], 1):
            if len(shape) != len(first):
                raise self.error(
                    f"All inputs must have the same #axes: bottom {index} has shape {shape}, bottom 0 {first}"
                )
            if shape[:axis] + shape[axis + 1 :] != first[:axis] + first[axis + 1 :]:
                raise self.error(
                    f"All inputs must have the same shape, except at concat_axis {axis}: bottom {index} has {shape}, "
                    f"bottom 0 {first}"
                )
        return [(*first[:axis], sum(shape[axis] for shape in bottoms), *first[axis + 1 :])]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Concatenate."""
        return [torch.cat(bottoms, self.axis)]


@register("Slice")
class Slice(Layer):
    """Splits the bottom along ``axis`` at ``slice_point``, or into equal parts."""

    moves_values = True
    top_count = (1, None)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the axis (``axis`` or the older ``slice_dim``) and the slice points."""
        options = self.parameter.slice_param
        self.axis = _read_axis(self, options, "slice_dim", bottoms[0])
        self.points = list(options.slice_point)
        self.shares_memory = len(self.top_blobs) == 1

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shape of each part."""
        shape, tops = bottoms[0], len(self.top_blobs)
        total = shape[self.axis]
        if self.points:
            if len(self.points) != tops - 1:
                raise self.error(f"{tops} tops need {tops - 1} slice_point, got {len(self.points)}")
            ends = [0, *self.points, total]
            self.sizes = [after - before for before, after in pairwise(ends)]
            if any(size <= 0 for size in self.sizes):
                raise self.error(
                    f"slice_point {self.points} must rise and stay below the {total} values of axis {self.axis}"
                )
        elif total % tops:
            raise self.error(f"Number of top blobs ({tops}) should evenly divide input slice axis ({total})")
        else:
            self.sizes = [total // tops] * tops
        return [(*shape[: self.axis], size, *shape[self.axis + 1 :]) for size in self.sizes]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Copies, because a later in-place layer must not change the bottom."""
        return [piece.clone() for piece in torch.split(bottoms[0], self.sizes, self.axis)]


@register("Tile")
class Tile(Layer):
    """Repeats the bottom ``tiles`` times along ``axis``."""

    moves_values = True

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape with ``tiles`` times the size along the axis."""
        options, shape = self.parameter.tile_param, bottoms[0]
        if options.tiles <= 0:
            raise self.error(f"Number of tiles must be positive, got {options.tiles}")
        self.axis = canonical_axis(options.axis, len(shape), self.name)
        return [(*shape[: self.axis], shape[self.axis] * options.tiles, *shape[self.axis + 1 :])]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Repeat."""
        times = [1] * bottoms[0].dim()
        times[self.axis] = self.parameter.tile_param.tiles
        return [bottoms[0].repeat(times)]
