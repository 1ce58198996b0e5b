"""The layers that quantization puts between others in its results: Quant, DeQuant and AntiQuant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.errors import AmctError
from amct.numerics.affine import check_factors, dequantize, fake_quantize, quantize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Blob, Shape
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
        """What holds the integers."""
        return torch.int8 if self.bits <= 8 else torch.int16

    def integers(self, x: torch.Tensor) -> torch.Tensor:
        """What a blob of integers holds; a blob that NumPy looks at holds them as floats."""
        return x.round().to(self.dtype) if x.is_floating_point() else x

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The real numbers that a blob of integers stands for."""
        return dequantize(self.integers(x), self.scale, self.offset)


@register("Quant")
class Quant(Layer):
    """Rounds to the grid of scale and offset; its top holds real numbers or, in a deploy model, the integers."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the factors."""
        del bottoms
        self.options = self.parameter.quant_param
        self.factors = InputFactors(self, self.options)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Gradients pass straight through, where there are any."""
        del parameters
        factors = self.factors
        scale, offset = factors.scale.to(bottoms[0].device), factors.offset.to(bottoms[0].device)
        if not self.options.integers:
            return [fake_quantize(bottoms[0], scale, offset, factors.bits)]
        try:
            return [quantize(bottoms[0], scale, offset, factors.bits)]
        except AmctError as error:
            raise self.error(str(error)) from error

    @property
    def uses_autograd(self) -> bool:
        """Integers have no gradients."""
        return not self.options.integers


class _Integers(Layer):
    """A layer that reads or writes integers: it has no gradients."""

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """As any layer."""
        super().run(bottoms, tops)


@register("DeQuant")
class DeQuant(_Integers):
    """Sums of products to real numbers: times scale_d · scale_w, one number or one for each channel."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Make room for the factors."""
        shape = bottoms[0]
        self.per_channel: bool = self.parameter.dequant_param.channel_wise
        self.add_parameter((shape[1] if self.per_channel else 1,), default=1.0)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Multiplied in float64 and rounded once."""
        sums, scale = bottoms[0], parameters[0].double()
        if self.per_channel:
            scale = scale.reshape(1, -1, *[1] * (sums.dim() - 2))
        return [(sums.double() * scale).float()]


@register("AntiQuant")
class AntiQuant(_Integers):
    """Integers behind a layer without weights to real numbers; without a scale it passes real numbers on."""

    returns_views = True

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the factors."""
        del bottoms
        options = self.parameter.antiquant_param
        self.factors = InputFactors(self, options) if options.HasField("scale") else None

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape."""
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """As it says."""
        del parameters
        return [bottoms[0] if self.factors is None else self.factors.real(bottoms[0])]
