"""BatchNorm: y = (x - mean) / sqrt(variance + eps) per channel. Caffe's scale and shift are a separate Scale layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

STATISTICS = 3


@register("BatchNorm")
class BatchNorm(Layer):
    """Normalizes (N, C, ...) per channel by the statistics of the batch (training) or by the moving averages (testing).

    Blobs: sum of means (C,), sum of variances (C,), and the factor (1,) by which both are divided.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the statistics; their learning rate is 0."""
        options = self.parameter.batch_norm_param
        self.fraction: float = options.moving_average_fraction
        self.eps: float = options.eps
        self.use_global = options.use_global_stats if options.HasField("use_global_stats") else not self.is_training
        self.channels = 1 if len(bottoms[0]) == 1 else bottoms[0][1]
        for shape in ((self.channels,), (self.channels,), (1,)):
            self.add_parameter(shape)
        for index in range(STATISTICS):
            if index == len(self.parameter.param):
                self.parameter.param.add(lr_mult=0.0)
            elif self.parameter.param[index].lr_mult != 0:
                raise self.error(
                    "Cannot configure batch normalization statistics as layer parameters: lr_mult must be 0, got "
                    f"{self.parameter.param[index].lr_mult} for blob {index}"
                )

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        shape = bottoms[0]
        if len(shape) >= 1 and (1 if len(shape) == 1 else shape[1]) != self.channels:
            raise self.error(f"the statistics are for {self.channels} channels, the bottom has shape {shape}")
        return [shape]

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The moving averages of mean and variance, (C,) each; 0 if no batch was seen."""
        mean, variance, weight = (blob.tensor.detach() for blob in self.blobs)
        total = float(weight)
        factor = 0.0 if total == 0 else 1.0 / total
        return mean * factor, variance * factor

    def channel_affine(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """Return scale = 1 / sqrt(variance + eps) and shift = -mean * scale, if the moving averages are used."""
        if not self.use_global:
            return None
        mean, variance = self.statistics()
        factor = 1.0 / torch.sqrt(variance.double() + self.eps)
        return factor, -mean.double() * factor

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Normalize; with batch statistics also update the moving averages."""
        bottom = bottoms[0]
        shape = (1, -1) + (1,) * (bottom.dim() - 2) if bottom.dim() > 1 else (1,)
        if self.use_global:
            affine = self.channel_affine()
            assert affine is not None, "use_global is set"
            factor = affine[0].to(bottom).reshape(shape)  # type: ignore[union-attr]
            return [torch.addcmul(affine[1].to(bottom).reshape(shape), bottom, factor)]  # type: ignore[union-attr]
        axes = [0, *range(2, bottom.dim())] if bottom.dim() > 1 else [0]
        mean = bottom.mean(axes, keepdim=True)
        centred = bottom - mean
        variance = (centred * centred).mean(axes, keepdim=True)
        self._collect(mean.detach(), variance.detach(), bottom.numel() // self.channels)
        return [centred / torch.sqrt(variance + self.eps)]

    def _collect(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        correction = count / (count - 1) if count > 1 else 1.0
        news = (mean.reshape(-1), variance.reshape(-1) * correction, torch.ones(1, device=mean.device))
        with torch.no_grad():
            for blob, new in zip(self.blobs, news, strict=True):
                blob.set_tensor(blob.tensor * self.fraction + new)
