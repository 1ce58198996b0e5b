"""The layers that quantization inserts between others: Quant, DeQuant and AntiQuant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer, register
from amct.errors import AmctError
from amct.numerics.affine import check_factors, dequantize, fake_quantize, quantize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.messages import ProtoMessage


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
        self.has_gradients = not self.options.integers
        self.factors = InputFactors(self, self.options)

    def connect(self, layers: Mapping[str, Layer]) -> None:
        """Tell the layer that reads the fake-quantized top its factors."""
        reader, index = layers.get(self.options.object_layer), self.options.index
        if reader is None or self.options.integers:
            return
        if self.parameter.top[0] == next(iter(reader.parameter.bottom[index : index + 1]), None):
            reader.take_input_factors(index, self.factors)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Fake-quantize with the straight-through gradient, or quantize to integers."""
        factors = self.factors
        scale, offset = factors.scale.to(bottoms[0].device), factors.offset.to(bottoms[0].device)
        if not self.options.integers:
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

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
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

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Dequantize the bottom, or pass it through."""
        return [bottoms[0] if self.factors is None else self.factors.real(bottoms[0])]
