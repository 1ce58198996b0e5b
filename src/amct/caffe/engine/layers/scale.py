"""Scale and Bias: y = x * scale (+ bias), y = x + bias, with a parameter or a second bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.messages import ProtoMessage


class _Broadcast(Layer):
    """The common part of Scale and Bias: an operand whose axes match those of the bottom from ``axis`` on."""

    bottom_count = (1, 2)

    options: ProtoMessage

    def operand_shape(self, bottoms: list[Shape]) -> Shape:
        """The shape of the parameter (or of the second bottom)."""
        num_axes = self.options.num_axes
        if len(bottoms) > 1:
            return bottoms[1]
        if num_axes < -1:
            raise self.error(f"num_axes must be non-negative, or -1 to extend to the end of bottom[0], got {num_axes}")
        start = canonical_axis(self.options.axis, len(bottoms[0]), self.name)
        if num_axes == -1:
            return bottoms[0][start:]
        if start + num_axes > len(bottoms[0]):
            raise self.error(
                f"num_axes {num_axes} from axis {start} extends past the end of the bottom's shape {bottoms[0]}"
            )
        return bottoms[0][start : start + num_axes]

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape; also computes the shape that broadcasts the operand over the bottom."""
        shape, operand = bottoms[0], bottoms[1] if len(bottoms) > 1 else self.blobs[0].shape
        # A scalar may be applied to a bottom of any number of axes.
        start = 0 if not operand else canonical_axis(self.options.axis, len(shape), self.name)
        if shape[start : start + len(operand)] != operand:
            raise self.error(f"dimension mismatch: bottom shape {shape} from axis {start} against {operand}")
        self.broadcast = (1,) * start + operand + (1,) * (len(shape) - start - len(operand))
        return [shape]

    @property
    def is_per_channel(self) -> bool:
        """Whether the operand is a parameter with one value per channel (axis 1)."""
        return len(self.bottom_blobs) == 1 and self.options.axis in (1, -3) and len(self.blobs[0].shape) == 1


@register("Scale")
class Scale(_Broadcast):
    """y = x * scale (+ bias)."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the scale unless it is the second bottom, and the bias if ``bias_term`` is set."""
        options = self.options = self.parameter.scale_param
        operand = self.operand_shape(bottoms)
        if len(bottoms) == 1:
            self.add_parameter(operand, options.filler if options.HasField("filler") else None, default=1.0)
        if options.bias_term:
            self.add_parameter(operand, options.bias_filler)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return x * scale (+ bias)."""
        scale = (bottoms[1] if len(bottoms) > 1 else parameters[0]).reshape(self.broadcast)
        if not self.options.bias_term:
            return [bottoms[0] * scale]
        return [torch.addcmul(parameters[-1].reshape(self.broadcast), bottoms[0], scale)]

    def channel_affine(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """(scale, bias), if both have one value per channel."""
        if not self.is_per_channel:
            return None
        shift = self.blobs[1].tensor.detach().double() if self.options.bias_term else None
        return self.blobs[0].tensor.detach().double(), shift


@register("Bias")
class Bias(_Broadcast):
    """y = x + bias."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the bias unless it is the second bottom."""
        options = self.options = self.parameter.bias_param
        operand = self.operand_shape(bottoms)
        if len(bottoms) == 1:
            self.add_parameter(operand, options.filler)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return x + bias."""
        return [bottoms[0] + (bottoms[1] if len(bottoms) > 1 else parameters[0]).reshape(self.broadcast)]

    def channel_affine(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """(None, bias), if it has one value per channel."""
        if not self.is_per_channel:
            return None
        return None, self.blobs[0].tensor.detach().double()
