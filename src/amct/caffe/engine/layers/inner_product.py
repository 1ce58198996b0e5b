"""Fully connected layers: InnerProduct and Embed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.layers.fake_quantized import FakeQuantized
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis, count
from amct.numerics.integer import integer_linear
from amct.numerics.weight_kind import WeightKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.layer import Folded
    from amct.caffe.engine.packed import Activation


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
