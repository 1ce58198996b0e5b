"""Layers on integers: those of deploy models, and recurrent layers with quantized hidden states.

The top of a weighted layer holds exact sums, which DeQuant dequantizes. A layer without weights computes on dequantized
values; if it only moves or selects values and all inputs have the same factors, it runs on the integers directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.blob import Blob
from amct.caffe.engine.layer import (
    Layer,
    LayerContext,
    ProtoMessage,
    Shape,
    Tensors,
    count,
    layer_class,
    register,
    stays_integer,
)
from amct.caffe.engine.layers.quantization import FakeQuantized, integer_factors, real_sums
from amct.caffe.engine.layers.recurrent import ALL, GRU, LSTM, RNN, STATIC, Recurrent
from amct.caffe.engine.layers.weighted import Convolution, Deconvolution, DepthwiseConv, InnerProduct
from amct.errors import AmctError
from amct.numerics.affine import fake_quantize, integer_range, quantize
from amct.numerics.arq import WeightKind
from amct.numerics.integer import find_integer_weights, integer_bias, integer_linear, sum_scale
from amct.numerics.snq import CLUSTERS, decode, unpack_nibbles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.layers.quantization import InputFactors


def _integers(parameter: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The integers of a blob; after access through NumPy they are stored as floats."""
    return parameter.round().to(kind) if parameter.is_floating_point() else parameter


class _IntegerWeights(FakeQuantized):
    """Base of weighted integer layers: integer blobs, and the value table of a clustered weight."""

    keeps_integers = True
    fold_kind: WeightKind | None = None
    outputs: int

    def setup(self, bottoms: list[Shape]) -> None:
        """Set up the float layer; every bottom has its own bias because its accumulator scale differs."""
        super().setup(bottoms)
        self.factors = integer_factors(self)
        self.has_bias = len(self.blobs) > 1
        if self.has_bias:
            for _ in self.factors[1:]:
                self.add_parameter((self.outputs,))
        self.full_shape = self.blobs[0].shape
        self.packed_shape = self.outputs, (count(self.full_shape) // self.outputs + 1) // 2
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
        return _integers(self.blobs[1 + bottom].tensor, torch.int64)

    def _weight(self) -> torch.Tensor:
        stored = _integers(self.blobs[0].tensor, torch.int8)
        if not self.has_table:
            return stored
        rows = unpack_nibbles(stored.view(torch.uint8), count(self.full_shape) // self.outputs)
        table = self.blobs[-1].tensor.round().to(torch.int8)
        return self.weight_of_rows(decode(rows, table, WeightKind.LINEAR))

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Compute the exact integer sums."""
        weight = self.integer_weight()
        return [
            self.integer_sums(factors.integers(bottom), weight, self.integer_bias(index), int(factors.offset))
            for index, (bottom, factors) in enumerate(zip(bottoms, self.factors, strict=True))
        ]

    def run(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Run the layer; errors name the layer."""
        try:
            super().run(bottoms, tops)
        except AmctError as error:
            raise self.error(str(error)) from error


@register("Convolution on integers")
class IntegerConvolution(_IntegerWeights, Convolution):
    """Convolution of int8 or int16 data with int8 weights."""


@register("Deconvolution on integers")
class IntegerDeconvolution(_IntegerWeights, Deconvolution):
    """The transposed convolution of int8 or int16 data with int8 weights."""


@register("DepthwiseConv on integers")
class IntegerDepthwiseConv(_IntegerWeights, DepthwiseConv):
    """The depthwise convolution of int8 or int16 data with int8 weights."""


@register("InnerProduct on integers")
class IntegerInnerProduct(_IntegerWeights, InnerProduct):
    """A matrix product of int8 or int16 data with int8 weights."""


class QuantizedRecurrent(Recurrent):
    """The common part of fake-quantized recurrent layers; the float layer is the second base class.

    As in ``FakeQuantized`` the sums are computed from the integers of data and matrices.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Set up the float layer; the scale of the hidden state is 1 / (largest integer)."""
        super().setup(bottoms)
        self.bits: int = self.parameter.lstm_quant_param.num_bits_d
        self.hidden_scale = torch.tensor(1.0 / integer_range(self.bits)[1])
        self.zero = torch.zeros((), dtype=torch.int32)
        self.multiplied = (0, STATIC) if self.has_static else (0,)  # bottoms, and also the places of their matrices
        self.input_scales: dict[int, torch.Tensor] = {}

    def take_input_factors(self, index: int, factors: InputFactors) -> None:
        """Keep the scale of a bottom."""
        self.input_scales[index] = factors.scale

    def scale_of(self, place: int) -> torch.Tensor | None:
        """The scale of the data that the matrix at this place multiplies; None if it is not known."""
        return self.input_scales.get(place) if place in self.multiplied else self.hidden_scale

    def product(
        self, x: torch.Tensor, parameters: Tensors, blob: int, *, rows: slice = ALL, bias: int | None = None
    ) -> torch.Tensor:
        """Exact sums, dequantized once; float products where data or matrix are on no grid."""
        place, scale = blob % len(parameters), self.scale_of(blob % len(parameters))
        vector = None if bias is None else bias % len(parameters)
        if torch.is_grad_enabled() or scale is None or not bool(torch.isfinite(x).all()):
            return super().product(x, parameters, blob, rows=rows, bias=bias)
        sources = [self.blobs[each] for each in (place, vector) if each is not None]
        found = self.derived(f"integers {place}", sources, lambda: self._integers(place, vector, scale))
        if found is None:
            return super().product(x, parameters, blob, rows=rows, bias=bias)
        matrix, added, step = found
        sums = integer_linear((x / scale).round().to(torch.int32), matrix[rows], added)
        return real_sums(sums, step, axis=-1)

    def _integers(
        self, place: int, bias: int | None, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] | None:
        """The integers of a matrix and its bias, and the steps of the sums."""
        vector = None if bias is None else self.blobs[bias].tensor
        found = find_integer_weights(self.blobs[place].tensor, vector, scale)
        if found is None:
            return None
        if vector is None:
            return found.integers, None, sum_scale(found.scale, scale)
        return found.integers, *integer_bias(found, vector, scale)

    def rounded(self, hidden: torch.Tensor) -> torch.Tensor:
        """The fake-quantized hidden state."""
        return fake_quantize(hidden, self.hidden_scale, self.zero, self.bits)


@register("LSTMQuant")
class LSTMQuant(QuantizedRecurrent, LSTM):
    """An LSTM with fake-quantized hidden states."""


@register("RNNQuant")
class RNNQuant(QuantizedRecurrent, RNN):
    """An RNN with fake-quantized hidden states."""


@register("GRUQuant")
class GRUQuant(QuantizedRecurrent, GRU):
    """A GRU with fake-quantized hidden states."""


class IntegerRecurrent(QuantizedRecurrent):
    """The common part of recurrent layers with integer weights."""

    keeps_integers = True
    has_gradients = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Set up the quantized layer; each bottom has a scale and offset, each matrix a scale."""
        super().setup(bottoms)
        self.factors = integer_factors(self)
        scales = list(self.parameter.lstm_quant_param.scale_w)
        places = [place for place, blob in enumerate(self.blobs) if len(blob.shape) == 2]
        if len(scales) != len(places):
            raise self.error(f"lstm_quant_param has {len(scales)} scale_w for {len(places)} matrices")
        self.weight_scales = {
            place: torch.tensor(scale, dtype=torch.float32) for place, scale in zip(places, scales, strict=True)
        }

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Bottoms that are multiplied by a matrix stay integers; the others are dequantized."""
        taken = [
            factors.integers(bottom) if index in self.multiplied else factors.real(bottom)
            for index, (bottom, factors) in enumerate(zip(bottoms, self.factors, strict=True))
        ]
        return super().forward(taken, parameters)

    def product(
        self, x: torch.Tensor, parameters: Tensors, blob: int, *, rows: slice = ALL, bias: int | None = None
    ) -> torch.Tensor:
        """Exact sums times (data scale * weight scale), computed in float64 and rounded once, as in DeQuant."""
        place = blob % len(parameters)
        is_state = place not in self.multiplied
        scale, offset = (self.hidden_scale, 0) if is_state else (self.factors[place].scale, self.factors[place].offset)
        matrix = _integers(parameters[blob], torch.int8)[rows]
        added = None if bias is None else _integers(parameters[bias], torch.int32)
        sums = integer_linear(x, matrix, added, offset=int(offset))
        return real_sums(sums, sum_scale(self.weight_scales[place], scale), axis=-1)

    def rounded(self, hidden: torch.Tensor) -> torch.Tensor:
        """The quantized hidden state."""
        return quantize(hidden, self.hidden_scale, self.zero, self.bits)


@register("LSTMQuant on integers")
class IntegerLSTM(IntegerRecurrent, LSTM):
    """An LSTM on int8 or int16 data with int8 weights."""


@register("RNNQuant on integers")
class IntegerRNN(IntegerRecurrent, RNN):
    """An RNN on int8 or int16 data with int8 weights."""


@register("GRUQuant on integers")
class IntegerGRU(IntegerRecurrent, GRU):
    """A GRU on int8 or int16 data with int8 weights."""


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
