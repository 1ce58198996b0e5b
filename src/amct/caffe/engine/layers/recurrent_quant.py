"""LSTM, RNN and GRU of quantized models: each hidden state is quantized before it is multiplied by a matrix.

A hidden state lies in -1..1, so its scale is 1 / (largest integer) and needs no calibration. Gates, cell and output
stay float. In a deploy model data, static input and hidden state are integers and the matrices int8: the sums, with
int32 biases, are exact, and each is dequantized once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layers.gru import GRU
from amct.caffe.engine.layers.quantization import InputFactors
from amct.caffe.engine.layers.recurrent import EVERY_ROW, LSTM, RNN, Recurrent
from amct.caffe.engine.registry import register
from amct.numerics.affine import fake_quantize, integer_range, quantize
from amct.numerics.integer import integer_linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

MATRIX_AXES = 2
STATIC = 2


class QuantizedRecurrent(Recurrent):
    """The common part of fake-quantized recurrent layers; the float layer is the second base class."""

    def setup(self, bottoms: list[Shape]) -> None:
        """Set up the float layer; the scale of the hidden state is 1 / (largest integer)."""
        super().setup(bottoms)
        self.bits: int = self.parameter.lstm_quant_param.num_bits_d
        self.hidden_scale = torch.tensor(1.0 / integer_range(self.bits)[1])
        self.zero = torch.zeros((), dtype=torch.int32)

    def multiplied(self, hidden: torch.Tensor) -> torch.Tensor:
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

    @property
    def uses_autograd(self) -> bool:
        """Integers have no gradients."""
        return False

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Bottoms that are multiplied by a matrix stay integers; the others are dequantized."""
        multiplied = (0, STATIC) if self.has_static else (0,)
        taken = [
            factors.integers(bottom) if index in multiplied else factors.real(bottom)
            for index, (bottom, factors) in enumerate(zip(bottoms, self.factors, strict=True))
        ]
        return super().forward(taken, parameters)

    def drive(self, x: torch.Tensor, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> torch.Tensor:
        """The input part of the gates: exact integer sums, dequantized."""
        driven = self._product(x, self.factors[0], parameters, 0, bias=1)
        if self.has_static:
            static = bottoms[STATIC].reshape(x.shape[1], -1)
            driven = driven + self._product(static, self.factors[STATIC], parameters, STATIC)
        return driven

    def _product(
        self,
        x: torch.Tensor,
        factors: InputFactors,
        parameters: list[torch.Tensor],
        blob: int,
        *,
        bias: int | None = None,
    ) -> torch.Tensor:
        added = None if bias is None else _integers(parameters[bias], torch.int32)
        sums = integer_linear(x, _integers(parameters[blob], torch.int8), added, offset=int(factors.offset))
        return self._real(sums, factors.scale, blob)

    def _real(self, sums: torch.Tensor, data_scale: torch.Tensor, blob: int) -> torch.Tensor:
        """Return sums * (data scale * weight scale) in float64, rounded to float32 once, as in DeQuant."""
        step = (data_scale.double() * self.weight_scales[blob].double()).float()
        return (sums.double() * step.double()).float()

    def hidden_product(
        self,
        hidden: torch.Tensor,
        parameters: list[torch.Tensor],
        blob: int,
        *,
        rows: slice = EVERY_ROW,
        bias: int | None = None,
    ) -> torch.Tensor:
        """The quantized hidden state times an int8 matrix: exact sums, dequantized."""
        matrix = _integers(parameters[blob], torch.int8)[rows]
        added = None if bias is None else _integers(parameters[bias], torch.int32)
        sums = integer_linear(self.multiplied(hidden), matrix, added)
        return self._real(sums, self.hidden_scale, blob % len(parameters))

    def multiplied(self, hidden: torch.Tensor) -> torch.Tensor:
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
