"""BN: batch normalization with scale and shift in one layer, in the two forms of Caffe's forks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.numerics.fold import ChannelAffine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.messages import ProtoMessage

INFERENCE = 1
SCALE_AND_SHIFT = 2
WITH_STATISTICS = 4
TINY = 1e-9


def bn_blobs(parameter: ProtoMessage) -> int:
    """The number of blobs: 2 in SegNet's form (scale, shift), 4 in PSPNet's (slope, bias, mean, variance)."""
    options = parameter.bn_param
    is_segnet = any(options.HasField(name) for name in ("bn_mode", "scale_filler", "shift_filler"))
    is_pspnet = any(options.HasField(name) for name in ("slope_filler", "bias_filler", "frozen", "momentum", "eps"))
    if is_segnet or (not is_pspnet and len(parameter.param) == SCALE_AND_SHIFT):
        return SCALE_AND_SHIFT
    return WITH_STATISTICS


def uses_batch_statistics(parameter: ProtoMessage) -> bool:
    """Whether a BN normalizes by the statistics of each batch at inference: SegNet's without ``bn_mode: INFERENCE``."""
    return bn_blobs(parameter) == SCALE_AND_SHIFT and parameter.bn_param.bn_mode != INFERENCE


def bn_affine(parameter: ProtoMessage, blobs: Sequence[torch.Tensor]) -> ChannelAffine:
    """The per-channel affine function of a BN with fixed statistics.

    SegNet's blobs hold scale and shift with the statistics included.

    Raises:
        ModelError: a variance plus eps is not positive.
    """
    flat = [blob.detach().reshape(-1) for blob in blobs]
    if len(flat) == SCALE_AND_SHIFT:
        return ChannelAffine.scale(*flat)
    slope, bias, mean, variance = flat
    return ChannelAffine.batch_norm(mean, variance, parameter.bn_param.eps, slope, bias)


@register("BN")
class BN(Layer):
    """y = scale * (x - mean) / sqrt(variance + eps) + shift per channel.

    SegNet and ENet: blobs scale and shift, (1, C, 1, 1) each; ``bn_mode: INFERENCE`` is y = scale * x + shift, else the
    statistics are those of the batch, and further tops give mean and variance. PSPNet and ICNet: blobs slope, bias,
    mean, variance; training uses the statistics of the batch unless ``frozen``.
    """

    top_count = (1, 3)

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the blobs."""
        options = self.options = self.parameter.bn_param
        if len(bottoms[0]) < 2:
            raise self.error(f"needs a bottom with channels (N, C, ...), got shape {bottoms[0]}")
        self.channels = bottoms[0][1]
        shape = (1, self.channels, 1, 1)
        self.fixed_blobs = bn_blobs(self.parameter)
        if self.fixed_blobs == SCALE_AND_SHIFT:
            self.batch_statistics = uses_batch_statistics(self.parameter)
            self.eps = TINY
            fillers = ((options.scale_filler, "scale_filler", 1.0), (options.shift_filler, "shift_filler", 0.0))
        else:
            self.batch_statistics = self.is_training and not options.frozen
            self.eps = options.eps
            fillers = ((options.slope_filler, "slope_filler", 1.0), (options.bias_filler, "bias_filler", 0.0))
        for filler, name, default in fillers:
            self.add_parameter(shape, filler if options.HasField(name) else None, default=default)
        if self.fixed_blobs == WITH_STATISTICS:
            self.add_parameter(shape, default=0.0)
            self.add_parameter(shape, default=1.0)
        if len(self.top_blobs) > 1 and not self.batch_statistics:
            raise self.error("further tops (mean, variance) need the statistics of the batch")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape; (1, C, 1, 1) for mean and variance."""
        if bottoms[0][1] != self.channels:
            raise self.error(f"the blobs are for {self.channels} channels, the bottom has shape {bottoms[0]}")
        return [bottoms[0], *[(1, self.channels, 1, 1)] * (len(self.top_blobs) - 1)]

    def channel_affine(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """Scale and shift, if the statistics are fixed."""
        if self.batch_statistics:
            return None
        affine = bn_affine(self.parameter, [blob.tensor for blob in self.blobs])
        return affine.multiplier, affine.addend

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Normalize, scale and shift."""
        bottom = bottoms[0]
        shape = (1, -1) + (1,) * (bottom.dim() - 2)
        scale, shift = (each.reshape(shape) for each in parameters[:SCALE_AND_SHIFT])
        if self.batch_statistics:
            axes = [0, *range(2, bottom.dim())]
            mean = bottom.mean(axes, keepdim=True)
            centred = bottom - mean
            variance = (centred * centred).mean(axes, keepdim=True)
            self._collect(mean.detach(), variance.detach())
            tops = [torch.addcmul(shift, centred / torch.sqrt(variance + self.eps), scale), mean, variance]
            return [tops[0], *(top.reshape(1, -1, 1, 1) for top in tops[1 : len(self.top_blobs)])]
        if len(parameters) == WITH_STATISTICS:
            mean, variance = (each.detach().reshape(shape) for each in parameters[SCALE_AND_SHIFT:])
            factor = scale / torch.sqrt(variance + self.eps)
            return [torch.addcmul(shift - mean * factor, bottom, factor)]
        return [torch.addcmul(shift, bottom, scale)]

    def _collect(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the moving averages of PSPNet's form."""
        if self.fixed_blobs == SCALE_AND_SHIFT:
            return
        momentum = self.options.momentum
        with torch.no_grad():
            for blob, new in zip(self.blobs[SCALE_AND_SHIFT:], (mean, variance), strict=True):
                blob.set_tensor(blob.tensor * momentum + new.reshape(blob.shape) * (1 - momentum))
