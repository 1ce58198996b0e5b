"""LSTM, RNN and GRU of quantized models: the hidden state, which lies in -1..1, is rounded to integers at every step.

In a deploy model the matrices are int8 and the biases int32; they are taken for the real numbers they stand for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layers.gru import GRU
from amct.caffe.engine.layers.recurrent import LSTM, RNN, Recurrent
from amct.caffe.engine.registry import register
from amct.numerics.affine import fake_quantize, integer_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

MATRIX_AXES = 2


class QuantizedRecurrent(Recurrent):
    """What the quantized forms share; the class beside it in the bases is the plain layer."""

    keeps_integers = True

    def setup(self, bottoms: list[Shape]) -> None:
        """As the plain layer; the hidden state's largest value, 1, is the largest integer."""
        super().setup(bottoms)
        options = self.parameter.lstm_quant_param
        self.bits: int = options.num_bits_d
        self.hidden_scale = torch.tensor(1.0 / integer_range(self.bits)[1])
        self.data_scale = 1.0
        if self.parameter.HasField("integer_param"):
            self.data_scale = self.parameter.integer_param.input[0].scale

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """With the real numbers that integer parameters stand for."""
        scales = list(self.parameter.lstm_quant_param.scale_w)
        return super().forward(bottoms, self._real(parameters, scales) if scales else parameters)

    def _real(self, parameters: list[torch.Tensor], scales: list[float]) -> list[torch.Tensor]:
        real: list[torch.Tensor] = []
        remaining = iter(scales)
        latest = first = None
        for parameter in parameters:
            if parameter.dim() == MATRIX_AXES:
                latest = torch.tensor(next(remaining), dtype=torch.float64)
                first = latest if first is None else first
                real.append((parameter.double() * latest).float())
                continue
            assert latest is not None, "a matrix stands before each bias"
            step = torch.tensor(self.data_scale, dtype=torch.float64) if latest is first else self.hidden_scale.double()
            real.append((parameter.double() * latest * step).float())
        return real

    def rounded(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state on its grid."""
        return fake_quantize(hidden, self.hidden_scale, torch.zeros((), dtype=torch.int32), self.bits)

    def step(
        self, drive: torch.Tensor, cont: torch.Tensor, states: list[torch.Tensor], parameters: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One step from the rounded state."""
        return super().step(drive, cont, [self.rounded(states[0]), *states[1:]], parameters)


@register("LSTMQuant")
class LSTMQuant(QuantizedRecurrent, LSTM):
    """A quantized LSTM."""


@register("RNNQuant")
class RNNQuant(QuantizedRecurrent, RNN):
    """A quantized RNN."""


@register("GRUQuant")
class GRUQuant(QuantizedRecurrent, GRU):
    """A quantized GRU."""
