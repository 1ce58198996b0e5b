"""Layers with weights whose bottoms are fake-quantized: their sums are computed from the integers.

A fake-quant file holds dequantized weights. Float arithmetic on them rounds each product and sum, and a value close to
the middle between two integers then rounds differently than in the deploy model, from where the difference spreads. The
integers of data and weights follow from the values, so the layer adds integers and multiplies once, as the deploy model
does: both give the same bits. Where the weights are on no grid (trained further, or never rounded) the layer
runs in float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.caffe.engine.layer import Folded, Layer
from amct.caffe.engine.layers.quantization import real_sums
from amct.numerics.weight_grid import find_integer_weights, integer_bias, sum_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from amct.caffe.engine.layer import Call, LayerContext
    from amct.caffe.engine.layers.quantization import InputFactors
    from amct.caffe.engine.messages import ProtoMessage


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """Weights in the layer's layout, the int32 bias of the first bottom, and the steps of the sums of each bottom."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    steps: list[torch.Tensor]


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

    def forward_on_integers(self, bottoms: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
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

    def bind(self, bottoms: list[torch.Tensor]) -> Call:
        """The sums of integers where the bottoms are fake-quantized, else the layer with its own parameters."""
        if not self.input_factors:
            return self._bind_float(bottoms)

        def call(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            results = self.forward_on_integers(given)
            return self._bind_float(given)(given) if results is None else results

        return call

    def _bind_float(self, bottoms: list[torch.Tensor]) -> Call:
        if self.weight_quantizer is not None or not self.computes_forward("bind_folded"):
            return super().bind(bottoms)
        own = Folded(self, lambda: [blob.tensor for blob in self.blobs], self.blobs)
        calls = [self.bind_folded(bottom, own, None)[0] for bottom in bottoms]
        if len(calls) == 1:
            call = calls[0]
            return lambda given: (call(given[0]),)
        return lambda given: [call(bottom) for call, bottom in zip(calls, given, strict=True)]

    def _find(self) -> _Found | None:
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
        return _Found(
            weight=self.weight_of_rows(found.integers).to(device),
            bias=None if integers is None else integers.to(device),
            steps=[step.to(device) for step in steps],
        )
