"""Normalization by neighbours or by the statistics of a sample: LRN, MVN, Normalize, GroupNorm, LayerNormalization."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from amct.caffe.engine.layer import IMAGE_BLOB_AXES, WINDOW_COST, Layer, Place, Shape, Tensors, count, register
from amct.caffe.engine.onnx_place import fixed

WITHIN_CHANNEL = 1


@register("LRN")
class LRN(Layer):
    """y = x / (k + alpha / n * sum of the squares of n neighbours) ^ beta, across channels or within a channel.

    Within a channel k is always 1, as in Caffe.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        options = self.options = self.parameter.lrn_param
        if options.local_size % 2 == 0:
            raise self.error(f"LRN only supports odd values for local_size, got {options.local_size}")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        self.require_image(bottoms[0])
        return [bottoms[0]]

    def operations(self, bottoms: list[Shape], tops: list[Shape]) -> int:
        """For each value as many as it has neighbours."""
        size: int = self.options.local_size
        _, channels, height, width = bottoms[0]
        across = min(size, 2 * channels + 1)
        within = min(size, height) * min(size, width)
        return count(tops[0]) * (within if self.options.norm_region == WITHIN_CHANNEL else across) * WINDOW_COST

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
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

    def to_onnx(self, place: Place) -> None:
        """LRN across channels; within a channel computed from an AveragePool of squares."""
        options = self.options
        size, alpha, beta = int(options.local_size), float(options.alpha), float(options.beta)
        if options.norm_region != WITHIN_CHANNEL:
            place.top("LRN", place.bottom, size=size, alpha=alpha, beta=beta, bias=float(options.k))
            return
        squares = place.step("squares", "Mul", place.bottom, place.bottom)
        window = {"kernel_shape": [size, size], "strides": [1, 1], "pads": [size // 2] * 4, "count_include_pad": 1}
        mean = place.step("mean", "AveragePool", squares, **window)
        weighted = place.step("weighted", "Mul", mean, place.value("alpha", alpha))
        base = place.step("base", "Add", weighted, place.value("one", 1.0))
        place.top("Mul", place.bottom, place.step("factor", "Pow", base, place.value("exponent", -beta)))


@register("MVN")
class MVN(Layer):
    """y = (x - mean) / (standard deviation + eps) per channel of each image, or per image with ``across_channels``."""

    def setup(self, bottoms: list[Shape]) -> None:
        self.options = self.parameter.mvn_param

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        if len(bottoms[0]) > IMAGE_BLOB_AXES:
            raise self.error(f"needs a bottom of at most 4 axes, got shape {bottoms[0]}")
        return [bottoms[0]]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """(x - mean) / (standard deviation + eps)."""
        bottom = bottoms[0]
        legacy = (*bottom.shape, *(1,) * (IMAGE_BLOB_AXES - bottom.dim()))
        rows = legacy[0] if self.options.across_channels else legacy[0] * legacy[1]
        flat = bottom.reshape(rows, -1)
        if self.options.normalize_variance:
            return [_Normalized.apply(flat, self.options.eps).reshape(bottom.shape)]  # type: ignore[no-untyped-call]
        return [(flat - flat.mean(1, keepdim=True)).reshape(bottom.shape)]

    def to_onnx(self, place: Place) -> None:
        """(x - mean) / (deviation + eps) of each row."""
        options, dims = self.options, place.bottom_dims[0]
        behind = dims[1:] if options.across_channels else dims[2:]
        rows = place.reshaped(place.bottom, (None, math.prod(fixed(behind))), "rows")
        if not options.normalize_variance:
            mean = place.reduced("mean", "ReduceMean", rows, [1])
            place.top_reshaped(place.step("centred", "Sub", rows, mean))
            return
        centred, variance = place.centred(rows, [1])
        deviation = place.step("deviation", "Sqrt", variance)
        divisor = place.step("divisor", "Add", deviation, place.value("eps", float(options.eps)))
        place.top_reshaped(place.step("normalized", "Div", centred, divisor))


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


@register("GroupNorm")
class GroupNorm(Layer):
    """y = (x - mean) / sqrt(variance + eps) over each of ``group_num`` groups of the channels of (N, C, ...)."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        groups, shape = self.parameter.group_norm_param.group_num, bottoms[0]
        if len(shape) < 2 or groups <= 0 or shape[1] % groups:
            raise self.error(f"group_num {groups} does not divide the channels of {shape}")
        return [shape]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Normalize each group."""
        options = self.parameter.group_norm_param
        return [functional.group_norm(bottoms[0], options.group_num, eps=options.eps)]

    def to_onnx(self, place: Place) -> None:
        """Normalize each group as a row."""
        options = self.parameter.group_norm_param
        shape = place.value("groups", [0, int(options.group_num), -1])  # 0 keeps the batch size
        rows = place.step("rows", "Reshape", place.bottom, shape)
        parts = place.centred_and_deviation(rows, [2], float(options.eps))
        place.top_reshaped(place.step("normalized", "Div", *parts))


@register("LayerNormalization")
class LayerNormalization(Layer):
    """ONNX's: y = scale * (x - mean) / sqrt(variance + epsilon) + bias over the axes from ``axis`` on.

    Scale and bias are parameters, or the second and third bottom if given; their shape is that of the normalized axes.
    """

    bottom_count = (1, 3)
    allows_in_place = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Create scale and bias unless they are bottoms."""
        options = self.options = self.parameter.layer_normalization_param
        self.axis = self.canonical_axis(options.axis, len(bottoms[0]))
        if len(bottoms) > 1:
            return
        inner = bottoms[0][self.axis :]
        self.add_parameter(inner, options.scale_filler if options.HasField("scale_filler") else None, default=1.0)
        if options.bias_term:
            self.add_parameter(inner, options.bias_filler)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        inner = bottoms[0][self.axis :]
        for shape in [*bottoms[1:], *(blob.shape for blob in self.blobs)]:
            if shape != inner:
                raise self.error(f"scale and bias must have shape {inner}, the axes from {self.axis} on, got {shape}")
        return [bottoms[0]]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Normalize, multiply by the scale, add the bias."""
        bottom, *factors = [*bottoms, *parameters]
        scale = factors[0]
        bias = factors[1] if len(factors) > 1 else None
        return [functional.layer_norm(bottom, bottom.shape[self.axis :], scale, bias, self.options.epsilon)]

    def to_onnx(self, place: Place) -> None:
        """Normalize the last axes, multiply by the scale, add the bias."""
        axes = list(range(self.axis, len(place.bottom_dims[0])))
        factors = place.bottoms[1:] or [place.parameter(index, f"factor{index}") for index in range(len(self.blobs))]
        parts = place.centred_and_deviation(place.bottom, axes, float(self.options.epsilon))
        normalized = place.step("normalized", "Div", *parts)
        if len(factors) == 1:
            place.top("Mul", normalized, factors[0])
        else:
            place.top("Add", place.step("scaled", "Mul", normalized, factors[0]), factors[1])


@register("Permute")
class Permute(Layer):
    """Permutes the axes; axes that ``order`` does not list follow in their own order."""

    moves_values = True
    allows_in_place = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the order."""
        axes = len(bottoms[0])
        given = list(self.parameter.permute_param.order)
        for axis in given:
            if axis >= axes:
                raise self.error(f"order should be less than the input dimension: {axis} for shape {bottoms[0]}")
        if len(set(given)) != len(given):
            raise self.error(f"there are duplicate orders: {given}")
        self.order = [*given, *(axis for axis in range(axes) if axis not in given)]

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The permuted shape."""
        if len(bottoms[0]) != len(self.order):
            raise self.error(f"was set up for {len(self.order)} axes, got shape {bottoms[0]}")
        return [tuple(bottoms[0][axis] for axis in self.order)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Permute and copy."""
        return [bottoms[0].permute(self.order).clone(memory_format=torch.contiguous_format)]

    def to_onnx(self, place: Place) -> None:
        place.top("Transpose", place.bottom, perm=list(self.order))


@register("Normalize")
class Normalize(Layer):
    """y = scale * x / sqrt(sum(x^2) + eps); the sum is over the channels, or over the sample with ``across_spatial``.

    The scale has one value per channel, or a single one with ``channel_shared``.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Create the scale."""
        options = self.options = self.parameter.norm_param
        if len(bottoms[0]) < 2:
            raise self.error(f"needs a bottom of at least two axes, got shape {bottoms[0]}")
        shape = () if options.channel_shared else (bottoms[0][1],)
        self.add_parameter(shape, options.scale_filler if options.HasField("scale_filler") else None, default=1.0)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        if not self.options.channel_shared and bottoms[0][1] != self.blobs[0].shape[0]:
            raise self.error(f"the scale has {self.blobs[0].shape[0]} channels, the bottom {bottoms[0]}")
        return [bottoms[0]]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Return scale * x / sqrt(sum(x^2) + eps)."""
        bottom = bottoms[0]
        axes = list(range(1, bottom.dim())) if self.options.across_spatial else [1]
        norm = (bottom * bottom).sum(axes, keepdim=True).add(self.options.eps).sqrt()
        scale = parameters[0].reshape(1, -1, *(1,) * (bottom.dim() - 2))
        return [bottom / norm * scale]

    def to_onnx(self, place: Place) -> None:
        """Return scale * x / sqrt(sum(x^2) + eps)."""
        axes = len(place.bottom_dims[0])
        over = list(range(1, axes)) if self.options.across_spatial else [1]
        squares = place.step("squares", "Mul", place.bottom, place.bottom)
        total = place.reduced("total", "ReduceSum", squares, over)
        shifted = place.step("shifted", "Add", total, place.value("eps", float(self.options.eps)))
        quotient = place.step("quotient", "Div", place.bottom, place.step("norm", "Sqrt", shifted))
        place.top("Mul", quotient, place.parameter(0, "scale", (self.blobs[0].count, *(1,) * (axes - 2))))
