"""LSTM, RNN and LSTMUnit on sequences (time, stream, ...), whose state is reset where ``cont`` is 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from amct.caffe.engine.layer import Layer, count, register
from amct.caffe.engine.layers.quantization import integer_factors, real_sums
from amct.numerics.affine import fake_quantize, integer_range, quantize
from amct.numerics.integer import find_integer_weights, integer_bias, integer_linear, sum_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.layers.quantization import InputFactors


CONTINUATION, STATIC = 1, 2
GATES = 4
EVERY_ROW = slice(None)


class Recurrent(Layer):
    """The common part of recurrent layers: bottoms, states carried from one forward pass to the next, exposed states.

    Bottoms: x (T, N, ...), cont (T, N), optionally x_static (N, ...), and with ``expose_hidden`` the initial states (1,
    N, H). Tops: the outputs (T, N, H), then the final states if exposed. As in Caffe no gradient passes through exposed
    states.
    """

    bottom_count = (2, None)
    top_count = (1, None)
    states = 1
    """The number of states carried."""
    gates = 1
    """The rows of the weights are this many times the number of outputs."""
    no_gradient = (CONTINUATION,)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options and create the parameters."""
        options = self.options = self.parameter.recurrent_param
        self.outputs: int = options.num_output
        self.exposed: bool = options.expose_hidden
        if self.outputs <= 0:
            raise self.error(f"num_output must be positive, got {self.outputs}")
        extra = self.states if self.exposed else 0
        if len(bottoms) - extra not in (2, 3) or len(self.top_blobs) != 1 + extra:
            raise self.error(
                f"needs the bottoms x, cont, optionally x_static{f', and {extra} state(s)' if extra else ''}, and has "
                f"{1 + extra} top(s); got {len(bottoms)} bottoms and {len(self.top_blobs)} tops"
            )
        self.has_static = len(bottoms) - extra == 3
        self.inputs = count(bottoms[0], 2)
        self.static_inputs = count(bottoms[2], 1) if self.has_static else 0
        self._carried: list[torch.Tensor] = []
        self.make_parameters()

    def make_parameters(self) -> None:
        """Create the weights of input, static input and hidden state."""
        rows = self.gates * self.outputs
        self.add_weight(rows, self.inputs)
        self.add_bias(rows)
        if self.has_static:
            self.add_weight(rows, self.static_inputs)
        self.add_weight(rows, self.outputs)

    def add_weight(self, rows: int, columns: int) -> None:
        """Add a matrix parameter with the weight filler."""
        self.add_parameter((rows, columns), self.options.weight_filler)

    def add_bias(self, size: int) -> None:
        """Add a vector parameter with the bias filler."""
        self.add_parameter((size,), self.options.bias_filler)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(T, N, H), and (1, N, H) for every exposed state."""
        x, cont = bottoms[:2]
        if len(x) < 2:
            raise self.error(f"bottom[0] must have at least 2 axes -- (#timesteps, #streams, ...), got {x}")
        if cont != x[:2]:
            raise self.error(f"bottom[1] must have shape {x[:2]} -- (#timesteps, #streams), got {cont}")
        if count(x, 2) != self.inputs:
            raise self.error(f"Input size incompatible: {count(x, 2)} values per step, weights expect {self.inputs}")
        if self.has_static and (bottoms[2][0] != x[1] or count(bottoms[2], 1) != self.static_inputs):
            raise self.error(f"bottom[2] must have {x[1]} streams of {self.static_inputs} values, got {bottoms[2]}")
        state = (1, x[1], self.outputs)
        for shape in bottoms[2 + self.has_static :]:
            if count(shape) != count(state):
                raise self.error(f"an exposed state must have shape {state}, got {shape}")
        return [(x[0], x[1], self.outputs), *[state] * (len(self.top_blobs) - 1)]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run all time steps."""
        x, cont = bottoms[0], bottoms[1].detach()
        streams = x.shape[1]
        states = self._first_states(bottoms, streams, x)
        drive = self.drive(x.reshape(x.shape[0], streams, -1), bottoms, parameters)
        results = []
        for step in range(x.shape[0]):
            output, states = self.step(drive[step], cont[step].unsqueeze(1), states, parameters)
            results.append(output)
        self._carried = [state.detach() for state in states]
        tops = [torch.stack(results)]
        if self.exposed:
            tops += [state.unsqueeze(0) for state in self._carried]
        return tops

    def _first_states(self, bottoms: list[torch.Tensor], streams: int, like: torch.Tensor) -> list[torch.Tensor]:
        if self.exposed:
            return [bottom.detach().reshape(streams, self.outputs) for bottom in bottoms[2 + self.has_static :]]
        if len(self._carried) == self.states and self._carried[0].shape[0] == streams:
            return [state.to(like.device) for state in self._carried]
        return [torch.zeros(streams, self.outputs, device=like.device) for _ in range(self.states)]

    def drive(self, x: torch.Tensor, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> torch.Tensor:
        """The input part of the gates at all time steps: W_x x + b (+ W_static x_static)."""
        driven = self.product(x, parameters, 0, bias=1)
        if self.has_static:
            driven = driven + self.product(bottoms[STATIC].reshape(x.shape[1], -1), parameters, STATIC)
        return driven

    def product(
        self,
        x: torch.Tensor,
        parameters: list[torch.Tensor],
        blob: int,
        *,
        rows: slice = EVERY_ROW,
        bias: int | None = None,
    ) -> torch.Tensor:
        """Return x times (selected rows of) parameters[blob], plus parameters[bias]."""
        return functional.linear(x, parameters[blob][rows], None if bias is None else parameters[bias])

    def rounded(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state as it is multiplied by a matrix."""
        return hidden

    def step(
        self, drive: torch.Tensor, cont: torch.Tensor, states: list[torch.Tensor], parameters: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One time step: return the output and the new states."""
        raise NotImplementedError


def lstm_step(gates: torch.Tensor, cell: torch.Tensor, cont: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New cell and hidden state from the gate inputs (order i, f, o, g)."""
    enter, forget, leave, new = gates.chunk(GATES, -1)
    cell = cont * torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
    return cell, torch.sigmoid(leave) * torch.tanh(cell)


@register("LSTM")
class LSTM(Recurrent):
    """Blobs: W_xc (4H, D), b_c (4H), W_xc_static if there is a static input, W_hc (4H, H); gate order i, f, o, g."""

    states = 2
    gates = GATES

    def step(
        self, drive: torch.Tensor, cont: torch.Tensor, states: list[torch.Tensor], parameters: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One time step; the states are h and c."""
        gates = drive + self.product(self.rounded(cont * states[0]), parameters, -1)
        cell, hidden = lstm_step(gates, states[1], cont)
        return hidden, [hidden, cell]


@register("RNN")
class RNN(Recurrent):
    """h = tanh(W_hh h + W_xh x + b_h), o = tanh(W_ho h + b_o); blobs W_xh, b_h, [W_xh_static], W_hh, W_ho, b_o."""

    def make_parameters(self) -> None:
        """Create the weights of input, static input, hidden state and output."""
        super().make_parameters()
        self.add_weight(self.outputs, self.outputs)
        self.add_bias(self.outputs)

    def step(
        self, drive: torch.Tensor, cont: torch.Tensor, states: list[torch.Tensor], parameters: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One time step; the only state is h."""
        hidden = torch.tanh(drive + self.product(self.rounded(cont * states[0]), parameters, -3))
        return torch.tanh(self.product(self.rounded(hidden), parameters, -2, bias=-1)), [hidden]


@register("LSTMUnit")
class LSTMUnit(Layer):
    """One LSTM time step: c_prev (1, N, H), gates (1, N, 4H), cont (1, N) to c and h (1, N, H)."""

    bottom_count = (3, 3)
    top_count = (2, 2)
    no_gradient = (2,)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shape of c, twice."""
        cell, gates, cont = bottoms
        if len(cell) != 3 or cell[0] != 1 or gates != (1, cell[1], GATES * cell[2]) or cont != cell[:2]:
            raise self.error(f"needs bottoms (1, N, H), (1, N, 4H) and (1, N), got {bottoms}")
        return [cell, cell]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return c = cont * f * c_prev + i * g, h = o * tanh(c)."""
        return lstm_step(bottoms[1], bottoms[0], bottoms[2].detach().unsqueeze(2))


@register("GRU")
class GRU(Recurrent):
    """Blobs: W_xc (3H, D), b_c (3H), W_xc_static if there is a static input, W_hc (3H, H); gates in the order z, r, h.

    The formulas are ONNX's (``linear_before_reset`` 0): z = sigmoid(W_z x + R_z h + b_z), r likewise, n = tanh(W_h x +
    R_h (r * h) + b_h), and the new h = (1 - z) * n + z * h. Bottoms, tops and options are those of Caffe's LSTM
    (``recurrent_param``); h is multiplied by ``cont`` before use.
    """

    gates = 3

    def step(
        self, drive: torch.Tensor, cont: torch.Tensor, states: list[torch.Tensor], parameters: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One time step; the only state is h."""
        gated = 2 * self.outputs
        before = cont * states[0]
        hidden = self.product(self.rounded(before), parameters, -1, rows=slice(0, gated))
        gates = torch.sigmoid(drive[:, :gated] + hidden)
        update, reset = gates.chunk(2, -1)
        hidden = self.product(self.rounded(reset * before), parameters, -1, rows=slice(gated, None))
        new = torch.tanh(drive[:, gated:] + hidden)
        hidden = (1 - update) * new + update * before
        return hidden, [hidden]


MATRIX_AXES = 2


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
        self.factors = integer_factors(self)
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
