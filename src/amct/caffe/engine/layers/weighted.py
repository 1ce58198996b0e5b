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

import torch
from torch.nn import functional

from amct.caffe.engine.layer import Folded, Layer, canonical_axis, count, register
from amct.caffe.engine.layers.quantization import real_sums
from amct.numerics.integer import integer_linear
from amct.numerics.weight_grid import find_integer_weights, integer_bias, sum_scale
from amct.numerics.weight_kind import WeightKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.layer import Activation, Call, LayerContext
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
        self.axis = canonical_axis(options.axis, len(bottoms[0]), self.name)
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
                f"{bottoms[0]}, "
                f"the weights expect {self.inputs}"
            )
        return [(*bottoms[0][: self.axis], self.outputs)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return x W^T + b."""
        bottom = bottoms[0]
        weight = self.weight_rows(self.rounded_weight(parameters[0]))
        bias = parameters[1] if len(parameters) > 1 else None
        flat = bottom.reshape(count(bottom.shape, 0, self.axis), self.inputs)
        return [functional.linear(flat, weight, bias).reshape(*bottom.shape[: self.axis], self.outputs)]

    def bind_folded(
        self, bottom: torch.Tensor, folded: Folded, activation: Activation | None
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

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Look up the rows."""
        index = bottoms[0].detach().to(torch.int64)
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < self.options.input_dim):
            raise self.error(
                f"an index is outside 0..{self.options.input_dim - 1}: {int(index.min())}..{int(index.max())}"
            )
        rows = functional.embedding(index, parameters[0])
        return [rows + parameters[1] if len(parameters) > 1 else rows]
