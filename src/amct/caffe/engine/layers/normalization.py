"""LRN and MVN: normalization by neighbouring values, or by the mean and deviation of an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import IMAGE_BLOB_AXES, require_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

WITHIN_CHANNEL = 1


@register("LRN")
class LRN(Layer):
    """y = x / (k + alpha / n * sum of the squares of n neighbours) ^ beta, across channels or within a channel.

    Within a channel k is always 1, as in Caffe.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
        options = self.options = self.parameter.lrn_param
        if options.local_size % 2 == 0:
            raise self.error(f"LRN only supports odd values for local_size, got {options.local_size}")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        require_image(bottoms[0], self.name)
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return x / (k + alpha / n * sum of squares) ^ beta."""
        bottom, options = bottoms[0], self.options
        size, half = options.local_size, options.local_size // 2
        squares = bottom * bottom
        if options.norm_region == WITHIN_CHANNEL:
            base = 1.0 + options.alpha * functional.avg_pool2d(squares, size, 1, half)
        else:
            reach = min(half, bottom.shape[1])  # a larger window adds only zeros
            padded = functional.pad(squares, (0, 0, 0, 0, reach, reach))
            sums = functional.avg_pool3d(padded.unsqueeze(1), (2 * reach + 1, 1, 1), 1, divisor_override=1).squeeze(1)
            base = options.k + options.alpha / size * sums
        return [bottom * base.pow(-options.beta)]


@register("MVN")
class MVN(Layer):
    """y = (x - mean) / (standard deviation + eps) per channel of each image, or per image with ``across_channels``."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
        self.options = self.parameter.mvn_param

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        if len(bottoms[0]) > IMAGE_BLOB_AXES:
            raise self.error(f"needs a bottom of at most 4 axes, got shape {bottoms[0]}")
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """(x - mean) / (standard deviation + eps)."""
        bottom = bottoms[0]
        legacy = (*bottom.shape, *(1,) * (IMAGE_BLOB_AXES - bottom.dim()))
        rows = legacy[0] if self.options.across_channels else legacy[0] * legacy[1]
        flat = bottom.reshape(rows, -1)
        if self.options.normalize_variance:
            return [_Normalized.apply(flat, self.options.eps).reshape(bottom.shape)]  # type: ignore[no-untyped-call]
        return [(flat - flat.mean(1, keepdim=True)).reshape(bottom.shape)]


class _Normalized(torch.autograd.Function):
    """Rows normalized to mean 0 and deviation 1, with Caffe's gradient.

    ``dx = (dy - mean(dy) - y * mean(y * dy)) / (std + eps)``: the derivative has a factor (std + eps) / std at the last
    term, which Caffe leaves out, and which is infinite on a constant image.
    """

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, eps: float) -> torch.Tensor:  # noqa: ANN401  torch's context
        centred = rows - rows.mean(1, keepdim=True)
        divisor = torch.sqrt((centred * centred).mean(1, keepdim=True)) + eps
        result = centred / divisor
        context.save_for_backward(result, divisor)
        return result

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401  torch's context
        result, divisor = context.saved_tensors
        gradient = gradients[0]
        means = gradient.mean(1, keepdim=True) + result * (result * gradient).mean(1, keepdim=True)
        return (gradient - means) / divisor, None
