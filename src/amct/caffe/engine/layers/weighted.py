"""Layers with weights: Convolution, DepthwiseConv, Deconvolution (up to three spatial axes), InnerProduct, Embed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from amct.caffe.engine.layer import Activation, FoldedParameters, Layer, Place, Shape, Tensors, count, register
from amct.caffe.engine.layers.quantization import FakeQuantized
from amct.caffe.engine.onnx_place import INT64
from amct.caffe.engine.windows import (
    SPATIAL_AXES,
    bind_packed,
    convolve_one_channel,
    pack,
    packing_is_worthwhile,
    read_window,
)
from amct.numerics.arq import channels_first, from_channels_first
from amct.numerics.integer import ConvolutionGeometry, integer_convolution, integer_linear
from amct.numerics.settings import WeightKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Convolve = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

MAX_SPATIAL_AXES = 3
#: Converting so few values to channels_last takes longer than it saves.
SMALLEST_REORDERED = 1024
_CONVOLVE = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


class BaseConvolution(FakeQuantized):
    """The common part of Convolution and Deconvolution; the axes before ``axis`` are merged into one batch axis."""

    bottom_count = (1, None)
    top_count = (1, None)
    same_count = True
    transposed = False
    kind = WeightKind.CONV

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options and create weight and bias."""
        options = self.options = self.parameter.convolution_param
        shape = bottoms[0]
        self.axis = self.canonical_axis(options.axis, len(shape))
        self.spatial_axes = len(shape) - self.axis - 1
        if self.spatial_axes > MAX_SPATIAL_AXES:
            raise self.error(f"at most {MAX_SPATIAL_AXES} spatial axes can be convolved, got shape {shape}")
        self.window = read_window(self, options, self.spatial_axes)
        self.channels = shape[self.axis]
        self.outputs = options.num_output
        self.group: int = options.group
        if self.outputs <= 0:
            raise self.error(f"num_output must be > 0, got {self.outputs}")
        if self.group <= 0 or self.channels % self.group:
            raise self.error(f"group {self.group} does not divide the {self.channels} input channels")
        if self.outputs % self.group:
            raise self.error(f"Number of output should be multiples of group: {self.outputs} and {self.group}")
        self.add_parameter(self.weight_shape(), options.weight_filler)
        if options.bias_term:
            self.add_parameter((self.outputs,), options.bias_filler)

    def weight_shape(self) -> Shape:
        """The shape of the weight."""
        raise NotImplementedError

    def fold_groups(self) -> int:
        """The number of groups."""
        return self.group

    def output_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The spatial sizes of the top for those of the bottom."""
        return self.window.output(sizes)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The axes before ``axis``, then num_output, then the spatial output sizes."""
        tops = []
        for shape in bottoms:
            if len(shape) != self.axis + 1 + self.spatial_axes:
                raise self.error(f"bottom num_axes may not change: {len(shape)} axes now in {shape}")
            if shape[self.axis] != self.channels:
                raise self.error(
                    f"Input size incompatible with convolution kernel: {shape[self.axis]} channels, the weights expect "
                    f"{self.channels}"
                )
            if shape != bottoms[0]:
                raise self.error(f"All inputs must have the same shape: {shape} and {bottoms[0]}")
            sizes = self.output_sizes(shape[self.axis + 1 :])
            if any(size < 0 for size in sizes):
                raise self.error(f"the kernel {self.window.kernel} is larger than the input {shape}")
            tops.append((*shape[: self.axis], self.outputs, *sizes))
        return tops

    def operations(self, bottoms: list[Shape], tops: list[Shape]) -> int:
        """For each value of the tops, transposed of the bottoms, as many as a row of the weight has."""
        values = sum(count(shape) for shape in (bottoms if self.transposed else tops))
        return values * count(self.weight_shape(), 1)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Convolve each bottom with the same weights."""
        bias = parameters[1] if len(parameters) > 1 else None
        weight = self.rounded_weight(parameters[0])
        return [self._one(bottom, weight, bias) for bottom in bottoms]

    def weight_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as (num_output, values)."""
        return channels_first(weight, self.kind, self.group)

    def weight_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The weight in the layer's own layout."""
        return from_channels_first(rows, self.weight_shape(), self.kind, self.group)

    def integer_sums(
        self, bottom: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offset: int = 0
    ) -> torch.Tensor:
        """The exact integer convolution; the padding value is ``offset``, the integer for zero."""
        convolve = partial(integer_convolution, geometry=self.geometry(), offset=offset)
        return self._one(bottom, weight, bias, convolve)

    def geometry(self) -> ConvolutionGeometry:
        """Stride, padding and so on."""
        plain = self.spatial_axes == 0
        return ConvolutionGeometry(
            stride=1 if plain else self.window.stride,
            padding=0 if plain else self.window.pad,
            dilation=1 if plain else self.window.dilation,
            groups=self.group,
            transposed=self.transposed,
        )

    def _one(
        self,
        bottom: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        convolve: Convolve | None = None,
    ) -> torch.Tensor:
        convolve = convolve or self.convolve
        if self.axis == 1 and self.spatial_axes == SPATIAL_AXES:
            return convolve(bottom, weight, bias)
        lead, rest = bottom.shape[: self.axis], bottom.shape[self.axis :]
        flat = bottom.reshape(count(lead), *rest)
        if self.spatial_axes == 0:
            result = convolve(flat.unsqueeze(2), weight.unsqueeze(2), bias).squeeze(2)
        else:
            result = convolve(flat, weight, bias)
        return result.reshape(*lead, *result.shape[1:])

    def write_onnx(self, place: Place, operator: str) -> None:
        """One node per bottom, with the same weights."""
        weights = [
            place.parameter(0, "weight", self.weight_shape() if self.spatial_axes else (*self.weight_shape(), 1))
        ]
        if len(self.blobs) > 1:
            weights.append(place.parameter(1, "bias", (self.outputs,)))
        attributes = self.window.onnx_attributes(self.group)
        for index, bottom in enumerate(place.bottoms):
            if self.axis == 1 and self.spatial_axes:
                place.top(operator, bottom, *weights, index=index, **attributes)
                continue
            # The axes before the channels are merged into the batch; without spatial axes one of size 1 is added.
            suffix = "" if index == 0 else f".{index}"
            dims = (None, *place.bottom_dims[index][self.axis :], *([] if self.spatial_axes else [1]))
            flat = place.reshaped(bottom, dims, f"flat{suffix}")
            place.top_reshaped(place.main(operator, flat, *weights, index=index, **attributes), index)

    def convolve(self, bottom: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Convolve a bottom that has exactly one batch axis."""
        raise NotImplementedError


@register("Convolution")
class Convolution(BaseConvolution):
    """Cross-correlation: (N, C, H, W) to (N, num_output, H', W'); weight (num_output, C / group, kernel...)."""

    fold_kind: WeightKind | None = WeightKind.CONV

    def weight_shape(self) -> Shape:
        """(num_output, C / group, kernel...)."""
        return (self.outputs, self.channels // self.group, *self.window.kernel)

    def bind_folded(
        self, bottom: torch.Tensor, folded: FoldedParameters, activation: Activation | None
    ) -> tuple[Callable[[torch.Tensor], torch.Tensor], bool]:
        """The packed kernel, which applies the activation too; else torch's convolution."""
        if self.axis != 1 or self.spatial_axes != SPATIAL_AXES:
            return super().bind_folded(bottom, folded, activation)
        window, group = self.window, self.group
        if packing_is_worthwhile(bottom, window, group):
            shape = bottom.shape
            weight, bias = self.derived("packed", folded.sources, lambda: self._pack(folded, shape), shape)
            return bind_packed(weight, bias, window, group, activation or ("none", ())), True
        is_tiny = bottom.numel() < SMALLEST_REORDERED and bottom.is_contiguous()
        layout = torch.contiguous_format if is_tiny else torch.channels_last
        weight, bias = self.derived("plain", folded.sources, lambda: _in_layout(folded.compute(), layout), layout)
        rest = weight, bias, window.stride, window.pad, window.dilation, group
        return lambda given: torch.conv2d(given.contiguous(memory_format=layout), *rest), False

    def _pack(self, folded: FoldedParameters, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor | None]:
        parameters = folded.compute()
        weight = pack(parameters[0], self.window, self.group, shape)
        return weight, parameters[1] if len(parameters) > 1 else None

    def convolve(self, bottom: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Torch's convolution; images run in channels_last, which is about twice as fast on CPUs."""
        window, axes = self.window, bottom.dim() - 2
        if axes == SPATIAL_AXES:
            if self.channels == 1 and bottom.requires_grad:
                return convolve_one_channel(bottom, weight, bias, window)
            bottom = bottom.contiguous(memory_format=torch.channels_last)
            weight = weight.contiguous(memory_format=torch.channels_last)
        if self.spatial_axes == 0:
            return functional.conv1d(bottom, weight, bias, groups=self.group)
        return _CONVOLVE[axes](bottom, weight, bias, window.stride, window.pad, window.dilation, self.group)

    def to_onnx(self, place: Place) -> None:
        """One Conv per bottom, with the same weights."""
        self.write_onnx(place, "Conv")


def _in_layout(parameters: Tensors, layout: torch.memory_format) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight in a memory format, and the bias."""
    return parameters[0].contiguous(memory_format=layout), parameters[1] if len(parameters) > 1 else None


@register("Deconvolution")
class Deconvolution(BaseConvolution):
    """Transposed convolution: (N, C, H, W) to (N, num_output, H', W'); weight (C, num_output / group, kernel...)."""

    fold_kind: WeightKind | None = WeightKind.CONV_TRANSPOSE
    transposed = True
    kind = WeightKind.CONV_TRANSPOSE

    def weight_shape(self) -> Shape:
        """(C, num_output / group, kernel...)."""
        return (self.channels, self.outputs // self.group, *self.window.kernel)

    def output_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The spatial sizes of a transposed convolution."""
        return self.window.transposed_output(sizes)

    def convolve(self, bottom: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Torch's transposed convolution."""
        window, axes = self.window, bottom.dim() - 2
        if self.spatial_axes == 0:
            return functional.conv_transpose1d(bottom, weight, bias, groups=self.group)
        return _TRANSPOSED[axes](bottom, weight, bias, window.stride, window.pad, 0, self.group, window.dilation)

    def to_onnx(self, place: Place) -> None:
        """One ConvTranspose per bottom, with the same weights."""
        self.write_onnx(place, "ConvTranspose")


@register("DepthwiseConv", "ConvolutionDepthwise", "DepthwiseConvolution")
class DepthwiseConv(Convolution):
    """A Convolution with ``group`` equal to the number of channels.

    The options are those of ``convolution_param``; ``group`` and ``num_output`` default to the number of channels.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Set ``group`` and ``num_output`` where they are missing."""
        options = self.parameter.convolution_param
        channels = bottoms[0][self.canonical_axis(options.axis, len(bottoms[0]))]
        if options.HasField("group") and options.group not in (1, channels):
            raise self.error(f"group must be the number of channels, {channels}, got {options.group}")
        options.group = channels
        if not options.HasField("num_output"):
            options.num_output = channels
        super().setup(bottoms)


@register("InnerProduct")
class InnerProduct(FakeQuantized):
    """y = x W^T + b, where x is the bottom flattened from ``axis`` on.

    The weight is (num_output, inputs), or (inputs, num_output) with ``transpose``.
    """

    fold_kind: WeightKind | None = WeightKind.LINEAR
    has_channel_scales = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options and create weight and bias."""
        options = self.options = self.parameter.inner_product_param
        self.axis = self.canonical_axis(options.axis, len(bottoms[0]))
        self.inputs = count(bottoms[0], self.axis)
        self.outputs: int = options.num_output
        shape = (self.inputs, self.outputs) if options.transpose else (self.outputs, self.inputs)
        self.add_parameter(shape, options.weight_filler)
        if options.bias_term:
            self.add_parameter((self.outputs,), options.bias_filler)
        if options.transpose or self.axis != 1:
            self.fold_kind = None  # folding needs rows = outputs and the channel axis 1

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The axes before ``axis``, then num_output."""
        inputs = count(bottoms[0], self.axis)
        if inputs != self.inputs:
            raise self.error(
                f"Input size incompatible with inner product parameters: {inputs} values from axis {self.axis} of "
                f"{bottoms[0]}, the weights expect {self.inputs}"
            )
        return [(*bottoms[0][: self.axis], self.outputs)]

    def operations(self, bottoms: list[Shape], tops: list[Shape]) -> int:
        """For each value of the top as many as there are inputs."""
        return count(tops[0]) * self.inputs

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Return x W^T + b."""
        bottom = bottoms[0]
        weight = self.weight_rows(self.rounded_weight(parameters[0]))
        bias = parameters[1] if len(parameters) > 1 else None
        flat = bottom.reshape(count(bottom.shape, 0, self.axis), self.inputs)
        return [functional.linear(flat, weight, bias).reshape(*bottom.shape[: self.axis], self.outputs)]

    def bind_folded(
        self, bottom: torch.Tensor, folded: FoldedParameters, activation: Activation | None
    ) -> tuple[Callable[[torch.Tensor], torch.Tensor], bool]:
        """The matrix product, with the shapes known."""
        del activation
        weight, *bias = folded.parameters
        rows, lead = self.weight_rows(weight), bottom.shape[: self.axis]
        flat, top = (count(lead), self.inputs), (*lead, self.outputs)
        if len(lead) == 1:
            return lambda given: functional.linear(given.reshape(flat), rows, *bias), False
        return lambda given: functional.linear(given.reshape(flat), rows, *bias).reshape(top), False

    def weight_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as (num_output, inputs)."""
        return weight.t() if self.options.transpose else weight

    def weight_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The weight in the layer's own layout."""
        return rows.t() if self.options.transpose else rows

    def integer_sums(
        self, bottom: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offset: int = 0
    ) -> torch.Tensor:
        """The exact integer matrix product."""
        flat = bottom.reshape(count(bottom.shape, 0, self.axis), self.inputs)
        sums = integer_linear(flat, self.weight_rows(weight), bias, offset=offset)
        return sums.reshape(*bottom.shape[: self.axis], self.outputs)

    def to_onnx(self, place: Place) -> None:
        """Gemm of the flattened bottom."""
        flat = place.bottom
        is_matrix = self.axis == 1
        if is_matrix and len(place.bottom_dims[0]) > 2:
            flat = place.step("flat", "Flatten", flat, axis=1)
        elif not is_matrix:
            flat = place.reshaped(flat, (None, self.inputs), "flat")
        weights = [place.parameter(0, "weight", transposed=bool(self.options.transpose))]
        if len(self.blobs) > 1:
            weights.append(place.parameter(1, "bias", (self.outputs,)))
        if is_matrix:
            place.top("Gemm", flat, *weights, transB=1)
        else:
            place.top_reshaped(place.main("Gemm", flat, *weights, transB=1))


@register("Embed")
class Embed(Layer):
    """Row i of the weight (input_dim, num_output) for each integer i of the bottom, plus the bias."""

    no_gradient = (0,)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options and create weight and bias."""
        options = self.options = self.parameter.embed_param
        for name in ("num_output", "input_dim"):
            if getattr(options, name) <= 0:
                raise self.error(f"EmbedLayer {name} must be positive, got {getattr(options, name)}")
        shape = (options.input_dim, options.num_output)
        self.add_parameter(shape, options.weight_filler)
        if options.bias_term:
            self.add_parameter((options.num_output,), options.bias_filler)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape, then num_output."""
        return [(*bottoms[0], self.options.num_output)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Look up the rows."""
        index = bottoms[0].detach().to(torch.int64)
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < self.options.input_dim):
            raise self.error(
                f"an index is outside 0..{self.options.input_dim - 1}: {int(index.min())}..{int(index.max())}"
            )
        rows = functional.embedding(index, parameters[0])
        return [rows + parameters[1] if len(parameters) > 1 else rows]

    def to_onnx(self, place: Place) -> None:
        """Gather of weight rows, plus the bias."""
        index = place.step("index", "Cast", place.bottom, to=INT64)
        table = place.parameter(0, "weight")
        if len(self.blobs) == 1:
            place.top("Gather", table, index, axis=0)
            return
        rows = place.step("rows", "Gather", table, index, axis=0)
        place.top("Add", rows, place.parameter(1, "bias", (self.options.num_output,)))
