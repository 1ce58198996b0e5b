"""LSTM, RNN and GRU of quantized models: each hidden state is quantized before it is multiplied by a matrix.

A hidden state lies in -1..1, so its scale is 1 / (largest integer) and needs no calibration. Gates, cell and output
stay float. In a deploy model data, static input and hidden state are integers and the matrices int8: the sums, with
int32 biases, are exact, and each is dequantized once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layers.gru import GRU
from amct.caffe.engine.layers.quantization import InputFactors, real_sums
from amct.caffe.engine.layers.recurrent import EVERY_ROW, LSTM, RNN, STATIC, Recurrent
from amct.caffe.engine.registry import register
from amct.numerics.affine import fake_quantize, integer_range, quantize
from amct.numerics.integer import integer_linear
from amct.numerics.weight_grid import find_integer_weights, integer_bias, sum_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

MATRIX_AXES = 2


class QuantizedRecurrent(Recurrent):
    """The common part of fake-quantized recurrent layers; the float layer is the second base class.

    As in ``fake_quantized.py`` the sums are computed from the integers of data and matrices.
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
        self,
        x: torch.Tensor,
        parameters: list[torch.Tensor],
        blob: int,
        *,
        rows: slice = EVERY_ROW,
        bias: int | None = None,
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
        inputs = self.parameter.integer_param.input
        if len(inputs) != len(bottoms):
            raise self.error(f"integer_param has {len(inputs)} inputs, the layer {len(bottoms)} bottoms")
        self.factors = [InputFactors(self, each) for each in inputs]
        scales = list(self.parameter.lstm_quant_param.scale_w)
        places = [place for place, blob in enumerate(self.blobs) if len(blob.shape) == MATRIX_AXES]
        if len(scales) != len(places):
            raise self.error(f"lstm_quant_param has {len(scales)} scale_w for {len(places)} matrices")
        self.weight_scales = {
            place: torch.tensor(scale, dtype=torch.float32) for place, scale in zip(places, scales, strict=True)
        }

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Bottoms that are multiplied by a matrix stay integers; the others are dequantized."""
        taken = [
            factors.integers(bottom) if index in self.multiplied else factors.real(bottom)
            for index, (bottom, factors) in enumerate(zip(bottoms, self.factors, strict=True))
        ]
        return super().forward(taken, parameters)

    def product(
        self,
        x: torch.Tensor,
        parameters: list[torch.Tensor],
        blob: int,
        *,
        rows: slice = EVERY_ROW,
        bias: int | None = None,
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


def _integers(parameter: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The integers of a blob; after access through NumPy they are stored as floats."""
    return parameter.round().to(kind) if parameter.is_floating_point() else parameter


@register("LSTMQuant on integers")
class IntegerLSTM(IntegerRecurrent, LSTM):
    """An LSTM on int8 or int16 data with int8 weights."""


@register("RNNQuant on integers")
class IntegerRNN(IntegerRecurrent, RNN):
    """An RNN on int8 or int16 data with int8 weights."""


@register("GRUQuant on integers")
class IntegerGRU(IntegerRecurrent, GRU):
    """A GRU on int8 or int16 data with int8 weights."""
