"""DepthwiseConv: each channel is convolved separately."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.layers.convolution import Convolution
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis

if TYPE_CHECKING:
    from amct.caffe.engine.blob import Shape


@register("DepthwiseConv", "ConvolutionDepthwise", "DepthwiseConvolution")
class DepthwiseConv(Convolution):
    """A Convolution with ``group`` equal to the number of channels.

    The options are those of ``convolution_param``; ``group`` and ``num_output`` default to the number of channels.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Set ``group`` and ``num_output`` where they are missing."""
        options = self.parameter.convolution_param
        channels = bottoms[0][canonical_axis(options.axis, len(bottoms[0]), self.name)]
        if options.HasField("group") and options.group not in (1, channels):
            raise self.error(f"group must be the number of channels, {channels}, got {options.group}")
        options.group = channels
        if not options.HasField("num_output"):
            options.num_output = channels
        super().setup(bottoms)
