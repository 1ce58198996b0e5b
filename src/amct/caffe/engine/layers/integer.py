"""Integer layers of deploy models: Convolution, Deconvolution, InnerProduct, and all layers without weights.

The top of a weighted layer holds exact sums, which DeQuant dequantizes. A layer without weights computes on dequantized
values; if it only moves or selects values and all inputs have the same factors, it runs on the integers directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.blob import Blob
from amct.caffe.engine.layer import Layer, count, find_layer_class, layer_class, register
from amct.caffe.engine.layers.quantization import integer_factors
from amct.caffe.engine.layers.weighted import Convolution, Deconvolution, DepthwiseConv, InnerProduct, _BaseConvolution
from amct.errors import AmctError
from amct.numerics.arq import WeightKind, from_channels_first
from amct.numerics.snq import CLUSTERS, decode, unpack_nibbles

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.layer import LayerContext
    from amct.caffe.engine.messages import ProtoMessage


class _IntegerWeights(Layer):
    """Base of weighted integer layers: integer blobs, and the value table of a clustered weight."""

    keeps_integers = True
    fold_kind: WeightKind | None = None
    kind: WeightKind
    weight_groups = 1

    def make_integer_blobs(self, outputs: int) -> None:
        """Create the integer blobs; every bottom has its own bias because its accumulator scale differs."""
        self.factors = integer_factors(self)
        self.has_bias = len(self.blobs) > 1
        if self.has_bias:
            for _ in self.factors[1:]:
                self.add_parameter((outputs,))
        self.full_shape = self.blobs[0].shape
        self.packed_shape = outputs, (count(self.full_shape) // outputs + 1) // 2
        self.has_table = False

    def fit_stored(self, shapes: Sequence[Shape]) -> None:
        """A file with one blob more has 4-bit weights: packed indices, and last the table of their values."""
        plain = len(self.blobs) - self.has_table
        self.has_table = len(shapes) == plain + 1
        del self.blobs[plain:]
        self.blobs[0].set_shape(self.packed_shape if self.has_table else self.full_shape)
        if self.has_table:
            self.blobs.append(Blob(1 if shapes[-1][:1] == (1,) else self.packed_shape[0], CLUSTERS))

    def integer_weight(self) -> torch.Tensor:
        """The int8 weight in the layer's own layout."""
        return self.derived("integer weight", self.blobs, self._weight)

    def integer_bias(self, bottom: int) -> torch.Tensor | None:
        """The int32 bias for the sums of one bottom."""
        if not self.has_bias:
            return None
        stored = self.blobs[1 + bottom].tensor
        return stored.round().to(torch.int64) if stored.is_floating_point() else stored

    def _weight(self) -> torch.Tensor:
        first = self.blobs[0].tensor
        stored = first.round().to(torch.int8) if first.is_floating_point() else first
        if not self.has_table:
            return stored
        shape = self.kind_shape()
        length = count(shape) // stored.shape[0]
        rows = unpack_nibbles(stored.view(torch.uint8), length)
        indices = from_channels_first(rows, shape, self.kind, self.weight_groups)
        table = self.blobs[-1].tensor.round().to(torch.int8)
        return self.from_kind(decode(indices, table, self.kind, self.weight_groups))

    def kind_shape(self) -> Shape:
        """The weight shape in the layout of its kind."""
        return self.full_shape

    def from_kind(self, weight: torch.Tensor) -> torch.Tensor:
        """Convert a weight from the layout of its kind to the layer's own layout."""
        return weight

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Run the layer; errors name the layer."""
        try:
            super().run(bottoms, tops)
        except AmctError as error:
            raise self.error(str(error)) from error


class _IntegerConvolution(_IntegerWeights, _BaseConvolution):
    def setup(self, bottoms: list[Shape]) -> None:
        """Set up the float layer, then the integer blobs."""
        super().setup(bottoms)
        self.weight_groups = self.group
        self.make_integer_blobs(self.outputs)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute the exact integer sums."""
        weight = self.integer_weight()
        return [
            self.integer_sums(factors.integers(bottom), weight, self.integer_bias(index), int(factors.offset))
            for index, (bottom, factors) in enumerate(zip(bottoms, self.factors, strict=True))
        ]


@register("Convolution on integers")
class IntegerConvolution(_IntegerConvolution, Convolution):
    """Convolution of int8 or int16 data with int8 weights."""


@register("Deconvolution on integers")
class IntegerDeconvolution(_IntegerConvolution, Deconvolution):
    """The transposed convolution of int8 or int16 data with int8 weights."""


@register("DepthwiseConv on integers")
class IntegerDepthwiseConv(_IntegerConvolution, DepthwiseConv):
    """The depthwise convolution of int8 or int16 data with int8 weights."""


@register("InnerProduct on integers")
class IntegerInnerProduct(_IntegerWeights, InnerProduct):
    """A matrix product of int8 or int16 data with int8 weights."""

    kind = WeightKind.LINEAR

    def setup(self, bottoms: list[Shape]) -> None:
        """Set up the float layer, then the integer blobs."""
        InnerProduct.setup(self, bottoms)
        self.make_integer_blobs(self.outputs)

    def kind_shape(self) -> Shape:
        """The weight shape with outputs first."""
        return (self.outputs, self.inputs)

    def from_kind(self, weight: torch.Tensor) -> torch.Tensor:
        """Convert a weight to the layer's layout: ``[inputs, outputs]`` with ``transpose``."""
        return self.weight_of_rows(weight)

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute the exact integer sums."""
        (factors,) = self.factors
        bottom = factors.integers(bottoms[0])
        return [self.integer_sums(bottom, self.integer_weight(), self.integer_bias(0), int(factors.offset))]


@register("data on integers")
class IntegerData(Layer):
    """Any layer without quantized weights whose bottoms hold integers."""

    def __init__(self, parameter: ProtoMessage, context: LayerContext) -> None:
        super().__init__(parameter, context)
        kind = layer_class(parameter.type, parameter.name)
        self.inner = kind(parameter, context)
        self.keeps_integers = kind.keeps_integers  # type: ignore[misc]  # as the inner layer
        self.bottom_count = kind.bottom_count  # type: ignore[misc]
        self.top_count = kind.top_count  # type: ignore[misc]
        self.same_count = kind.same_count  # type: ignore[misc]

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the factors of the bottoms and set up the inner layer."""
        self.factors = integer_factors(self)
        self.stays_integer = stays_integer(self.parameter, self.context.integer_inputs[self.name])
        self.inner.bottom_blobs, self.inner.top_blobs = self.bottom_blobs, self.top_blobs
        self.inner.setup(bottoms)
        self.blobs = self.inner.blobs

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shapes of the inner layer's tops."""
        return self.inner.reshape(bottoms)

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Run the inner layer on dequantized values, or on integers minus their offset."""
        inputs = []
        for blob, factors in zip(bottoms, self.factors, strict=True):
            moved = factors.integers(blob.tensor).float().sub_(int(factors.offset))  # exact: they have 16 bits at most
            value = Blob()
            value.set_tensor(moved if self.stays_integer else moved.mul_(factors.scale))
            inputs.append(value)
        self.inner.run(inputs, tops)
        if self.stays_integer:
            factors = self.factors[0]
            for blob in tops:
                blob.set_tensor((blob.tensor + factors.offset).to(factors.dtype))


def stays_integer(parameter: ProtoMessage, inputs: Iterable[ProtoMessage]) -> bool:
    """Whether a layer only moves or selects values, and the ``quant_param`` of all its inputs have the same factors."""
    factors = {(each.scale, each.offset, each.num_bits_d) for each in inputs}
    return len(factors) == 1 and moves_values(parameter)


def moves_values(parameter: ProtoMessage) -> bool:
    """Whether a layer only moves or selects values; a layer of an unknown type does not."""
    kind = find_layer_class(parameter.type)
    return kind is not None and kind.only_moves_values(parameter)
