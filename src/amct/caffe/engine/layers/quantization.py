"""Layers on quantized data: Quant, DeQuant, AntiQuant, and the common part of layers with weights that read it.

A fake-quant file holds dequantized weights. Float arithmetic on them rounds each product and sum, and a value close to
the middle between two integers then rounds differently than in the deploy model, from where the difference spreads. The
integers of data and weights follow from the values, so a layer adds integers and multiplies once, as the deploy model
does: both give the same bits. Where the weights are on no grid (trained further, or never rounded) the layer
runs in float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Call, FoldedParameters, Layer, LayerContext, ProtoMessage, Shape, Tensors, register
from amct.errors import AmctError
from amct.numerics.affine import check_factors, dequantize, fake_quantize, quantize
from amct.numerics.integer import find_integer_weights, integer_bias, sum_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class InputFactors:
    """Scale, offset and bits of one input, from a QuantParameter or AntiQuantParameter."""

    def __init__(self, owner: Layer, options: ProtoMessage) -> None:
        self.scale = torch.tensor(options.scale, dtype=torch.float32)
        self.offset = torch.tensor(options.offset, dtype=torch.int32)
        self.bits: int = options.num_bits_d or 8
        try:
            check_factors(self.scale, self.offset, self.bits)
        except AmctError as error:
            raise owner.error(str(error)) from error

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the integers."""
        return torch.int8 if self.bits <= 8 else torch.int16

    def steps(self, x: torch.Tensor) -> torch.Tensor | None:
        """The integers minus the offset of a fake-quantized blob; None if it holds NaN or infinity."""
        steps = (x.detach() / self.scale.to(x.device)).round_()
        return steps.to(torch.int32) if bool(torch.isfinite(steps.sum())) else None

    def integers(self, x: torch.Tensor) -> torch.Tensor:
        """The integers of a blob, cast from float if the blob was read as a NumPy array."""
        return x.round().to(self.dtype) if x.is_floating_point() else x

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """Dequantize a blob of integers."""
        return dequantize(self.integers(x), self.scale, self.offset)


def integer_factors(layer: Layer) -> list[InputFactors]:
    """The factors of each bottom of a layer of a deploy model, from the Quant layers in front of it.

    Raises:
        ModelError: A bottom has none.
    """
    quants = layer.context.integer_inputs[layer.name]
    found, needed = [quant.index for quant in quants], list(range(len(layer.bottom_blobs)))
    if found != needed:
        raise layer.error(
            "in a deploy model each bottom comes from a Quant layer that has this layer's name as object_layer; "
            f"expected Quant layers of index {needed}, there are {found}"
        )
    return [InputFactors(layer, quant) for quant in quants]


_LARGE_SAMPLE = 2**16
"""So many values are worth a call of their own."""


def real_sums(sums: torch.Tensor, step: torch.Tensor, axis: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantize accumulator sums by one step, or by one per channel along ``axis``: float64, rounded once."""
    after = [1] * (sums.dim() - axis % sums.dim() - 1)
    scale = step.double() if step.numel() == 1 else step.double().reshape(-1, *after)
    shift = None if bias is None else bias.double().reshape(-1, *after)
    if axis % sums.dim() == 0 or sums.numel() < _LARGE_SAMPLE * len(sums):
        return _rounded_once(sums, scale, shift)
    real = torch.empty_like(sums, dtype=torch.float32)
    for some, place in zip(sums, real, strict=True):  # one sample at a time: float64 takes twice the memory
        place.copy_(_rounded_once(some, scale, shift))
    return real


def _rounded_once(sums: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    real = sums.to(torch.float64, copy=True).mul_(scale)
    return (real if shift is None else real.add_(shift)).float()


@register("Quant")
class Quant(Layer):
    """Quantizes its bottom; its top holds dequantized values or, in a deploy model, the integers."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the factors."""
        self.options = self.parameter.quant_param
        self.gives_integers = self.options.object_layer in self.context.integer_inputs
        self.has_gradients = not self.gives_integers
        self.factors = InputFactors(self, self.options)

    def connect(self, layers: Mapping[str, Layer]) -> None:
        """Tell the layer that reads the fake-quantized top its factors."""
        reader, index = layers.get(self.options.object_layer), self.options.index
        if reader is None or self.gives_integers:
            return
        if self.parameter.top[0] == next(iter(reader.parameter.bottom[index : index + 1]), None):
            reader.take_input_factors(index, self.factors)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Fake-quantize with the straight-through gradient, or quantize to integers."""
        factors = self.factors
        scale, offset = factors.scale.to(bottoms[0].device), factors.offset.to(bottoms[0].device)
        if not self.gives_integers:
            return [fake_quantize(bottoms[0], scale, offset, factors.bits)]
        try:
            return [quantize(bottoms[0], scale, offset, factors.bits)]
        except AmctError as error:
            raise self.error(str(error)) from error


@register("DeQuant")
class DeQuant(Layer):
    """Dequantizes accumulator sums: multiplies by scale_d · scale_w, one value or one per channel."""

    has_gradients = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Add the parameter that holds the factors."""
        shape = bottoms[0]
        self.per_channel: bool = self.parameter.dequant_param.channel_wise
        self.add_parameter((shape[1] if self.per_channel else 1,), default=1.0)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Multiply in float64 and round once to float32."""
        return [real_sums(bottoms[0], parameters[0], axis=1)]


@register("AntiQuant")
class AntiQuant(Layer):
    """Dequantizes the integers of a layer without weights; without a scale it passes float values through."""

    returns_views = True
    has_gradients = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the factors."""
        options = self.parameter.antiquant_param
        self.factors = InputFactors(self, options) if options.HasField("scale") else None

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Dequantize the bottom, or pass it through."""
        return [bottoms[0] if self.factors is None else self.factors.real(bottoms[0])]


@dataclass(frozen=True, kw_only=True, eq=False)
class _FoundWeights:
    """Weights in the layer's layout, the int32 bias of the first bottom, and the steps of the sums of each bottom."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    steps: Tensors


class FakeQuantized(Layer):
    """The common part of Convolution, Deconvolution and InnerProduct."""

    axis: int
    """The axis of the top that holds the outputs."""

    def __init__(self, parameter: ProtoMessage, context: LayerContext) -> None:
        super().__init__(parameter, context)
        self.input_factors: dict[int, InputFactors] = {}
        self.weight_quantizer: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def has_channel_scales(self) -> bool:
        """Whether each output can have a weight scale of its own: DeQuant scales along axis 1 only."""
        return self.axis == 1

    def take_weight_quantizer(self, quantizer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Round the weights, given with one row per output, in each forward: for training."""
        self.weight_quantizer = quantizer
        self.fold_kind = None

    def rounded_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as the layer uses it: rounded, if it is trained for quantization."""
        if self.weight_quantizer is None:
            return weight
        return self.weight_of_rows(self.weight_quantizer(self.weight_rows(weight)))

    def take_input_factors(self, index: int, factors: InputFactors) -> None:
        """Keep the factors; other layers are not folded into this one, their rounding is a step of its own."""
        self.input_factors[index] = factors
        self.fold_kind = None

    def weight_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight with one row per output."""
        raise NotImplementedError

    def weight_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of ``weight_rows``."""
        raise NotImplementedError

    def integer_sums(
        self, bottom: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offset: int = 0
    ) -> torch.Tensor:
        """The exact sums of an integer bottom, minus ``offset``, with integer weights."""
        raise NotImplementedError

    def forward_on_integers(self, bottoms: Tensors) -> Tensors | None:
        """The tops, if all bottoms are fake-quantized and the weights are on a grid."""
        if not self.input_factors or len(self.input_factors) != len(bottoms):
            return None
        found = self.derived("integers", self.blobs, self._find)
        if found is None:
            return None
        tops = []
        for index, bottom in enumerate(bottoms):
            data = self.input_factors[index].steps(bottom)
            if data is None:
                return None
            sums = self.integer_sums(data, found.weight, None if index else found.bias)
            # the file holds the bias in steps of the first bottom
            bias = self.blobs[1].tensor if index and found.bias is not None else None
            tops.append(real_sums(sums, found.steps[index], self.axis, bias))
        return tops

    def bind(self, bottoms: Tensors) -> Call:
        """The sums of integers where the bottoms are fake-quantized, else the layer with its own parameters."""
        if not self.input_factors:
            return self._bind_float(bottoms)

        def call(given: Tensors) -> Sequence[torch.Tensor]:
            results = self.forward_on_integers(given)
            return self._bind_float(given)(given) if results is None else results

        return call

    def _bind_float(self, bottoms: Tensors) -> Call:
        if self.weight_quantizer is not None or not self.computes_forward("bind_folded"):
            return super().bind(bottoms)
        own = FoldedParameters(self, lambda: [blob.tensor for blob in self.blobs], self.blobs)
        calls = [self.bind_folded(bottom, own, None)[0] for bottom in bottoms]
        if len(calls) == 1:
            call = calls[0]
            return lambda given: (call(given[0]),)
        return lambda given: [call(bottom) for call, bottom in zip(calls, given, strict=True)]

    def _find(self) -> _FoundWeights | None:
        weight, *rest = (blob.tensor.detach() for blob in self.blobs)
        device, bias = weight.device, rest[0].cpu() if rest else None
        scales = [self.input_factors[index].scale for index in range(len(self.input_factors))]
        found = find_integer_weights(self.weight_rows(weight.cpu()), bias, scales[0])
        if found is None:
            return None
        steps = [sum_scale(found.scale, scale) for scale in scales]
        integers = None
        if bias is not None:
            integers, steps[0] = integer_bias(found, bias, scales[0])
        return _FoundWeights(
            weight=self.weight_of_rows(found.integers).to(device),
            bias=None if integers is None else integers.to(device),
            steps=[step.to(device) for step in steps],
        )
