"""LSTM, RNN and LSTMUnit on sequences (time, stream, ...), whose state is reset where ``cont`` is 0."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from amct.caffe.engine.layer import Layer, Place, Shape, Tensors, count, register
from amct.caffe.engine.onnx_place import fixed

CONTINUATION, STATIC = 1, 2
GATES = 4
ALL = slice(None)
#: One of ONNX: the operator, the tensors that it reads, those that it writes. A Split is along the last axis.
Operation: TypeAlias = tuple[str, list[str], list[str]]


def _attributes(operator: str) -> dict[str, Any]:
    return {"axis": -1} if operator == "Split" else {}


#: The operations in whose time torch is called for one time step.
STEP_COST = 2**22


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
        self._carried: Tensors = []
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

    def operations(self, bottoms: list[Shape], tops: list[Shape]) -> int:
        """For each time step all weights with each stream, and the calls of a step."""
        steps, streams = bottoms[0][:2]
        return steps * (streams * sum(blob.count for blob in self.blobs) + STEP_COST)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
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

    def _first_states(self, bottoms: Tensors, streams: int, like: torch.Tensor) -> Tensors:
        if self.exposed:
            return [bottom.detach().reshape(streams, self.outputs) for bottom in bottoms[2 + self.has_static :]]
        if len(self._carried) == self.states and self._carried[0].shape[0] == streams:
            return [state.to(like.device) for state in self._carried]
        return [torch.zeros(streams, self.outputs, device=like.device) for _ in range(self.states)]

    def drive(self, x: torch.Tensor, bottoms: Tensors, parameters: Tensors) -> torch.Tensor:
        """The input part of the gates at all time steps: W_x x + b (+ W_static x_static)."""
        driven = self.product(x, parameters, 0, bias=1)
        if self.has_static:
            driven = driven + self.product(bottoms[STATIC].reshape(x.shape[1], -1), parameters, STATIC)
        return driven

    def product(
        self, x: torch.Tensor, parameters: Tensors, blob: int, *, rows: slice = ALL, bias: int | None = None
    ) -> torch.Tensor:
        """Return x times (selected rows of) parameters[blob], plus parameters[bias]."""
        return functional.linear(x, parameters[blob][rows], None if bias is None else parameters[bias])

    def rounded(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state as it is multiplied by a matrix."""
        return hidden

    def step(
        self, drive: torch.Tensor, cont: torch.Tensor, states: Tensors, parameters: Tensors
    ) -> tuple[torch.Tensor, Tensors]:
        """One time step: return the output and the new states."""
        raise NotImplementedError

    def write_scan(self, place: Place, operations: list[Operation], states: list[str]) -> None:
        """Run the operations for each time step as the body of a Scan.

        ONNX's LSTM cannot reset a stream in the middle of a sequence (``cont``). The body reads the states, ``drive``
        and ``going``, and writes ``<state>_new`` and ``out``. States are not carried from one run to the next: a run
        starts from zeros, or from the states of ``expose_hidden``.
        """
        from onnx import TensorProto, helper

        def values(names: list[str]) -> list[Any]:
            return [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]

        first: Operation = ("Unsqueeze", ["cont", place.value("behind", [1])], ["going"])
        body = helper.make_graph(
            [helper.make_node(*each, **_attributes(each[0])) for each in (first, *operations)],
            f"{self.name}.step",
            values([*states, "drive", "cont"]),
            values([*(f"{state}_new" for state in states), "out"]),
        )
        (streams,) = fixed(place.bottom_dims[0][1:2])
        ends = [place.writer.tensor(f"{self.name}.{state}_end") for state in states]
        inputs = [*self._onnx_states(place, states, streams), self._onnx_drive(place, streams), place.bottoms[1]]
        place.node("Scan", "", inputs, [*ends, place.tops[0]], body=body, num_scan_inputs=2)
        for index, end in enumerate(ends, 1):
            if self.exposed:
                place.top_reshaped(end, index)

    def _onnx_states(self, place: Place, states: list[str], streams: int) -> list[str]:
        """``_first_states`` in ONNX."""
        if self.exposed:
            given = zip(place.bottoms[2 + self.has_static :], states, strict=True)
            return [place.reshaped(bottom, (streams, self.outputs), f"{state}_first") for bottom, state in given]
        place.writer.notes.append(
            f'layer "{self.name}" ({self.type}): every run starts from zeros; Caffe continues from the previous run'
        )
        zeros = np.zeros((streams, self.outputs), dtype=np.float32)
        return [place.value(f"{state}_first", zeros) for state in states]

    def _onnx_drive(self, place: Place, streams: int) -> str:
        """``drive`` in ONNX."""
        x = place.reshaped(place.bottom, (place.bottom_dims[0][0], streams, self.inputs), "x")
        driven = place.step("driven", "MatMul", x, place.parameter(0, "weight", transposed=True))
        driven = place.step("shifted", "Add", driven, place.parameter(1, "bias"))
        if not self.has_static:
            return driven
        static = place.reshaped(place.bottoms[2], (streams, self.static_inputs), "static")
        static = place.step("static_part", "MatMul", static, place.parameter(2, "static_weight", transposed=True))
        return place.step("drive", "Add", driven, static)


def lstm_step(gates: torch.Tensor, cell: torch.Tensor, cont: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New cell and hidden state from the gate inputs (order i, f, o, g)."""
    enter, forget, leave, new = gates.chunk(GATES, -1)
    cell = cont * torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
    return cell, torch.sigmoid(leave) * torch.tanh(cell)


def _lstm_operations(sums: str, cell: str, going: str, sizes: str, results: tuple[str, str]) -> list[Operation]:
    """``lstm_step`` in ONNX: the new cell and hidden state."""
    new_cell, hidden = results
    return [
        ("Split", [sums, sizes], ["i", "f", "o", "g"]),
        ("Sigmoid", ["i"], ["enter"]),
        ("Sigmoid", ["f"], ["keep"]),
        ("Sigmoid", ["o"], ["leave"]),
        ("Tanh", ["g"], ["new"]),
        ("Mul", [going, "keep"], ["keep_going"]),
        ("Mul", ["keep_going", cell], ["kept"]),
        ("Mul", ["enter", "new"], ["entered"]),
        ("Add", ["kept", "entered"], [new_cell]),
        ("Tanh", [new_cell], ["shown"]),
        ("Mul", ["leave", "shown"], [hidden]),
    ]


@register("LSTM")
class LSTM(Recurrent):
    """Blobs: W_xc (4H, D), b_c (4H), W_xc_static if there is a static input, W_hc (4H, H); gate order i, f, o, g."""

    states = 2
    gates = GATES

    def step(
        self, drive: torch.Tensor, cont: torch.Tensor, states: Tensors, parameters: Tensors
    ) -> tuple[torch.Tensor, Tensors]:
        """One time step; the states are h and c."""
        gates = drive + self.product(self.rounded(cont * states[0]), parameters, -1)
        cell, hidden = lstm_step(gates, states[1], cont)
        return hidden, [hidden, cell]

    def to_onnx(self, place: Place) -> None:
        """A Scan with the states h and c."""
        recurrent = place.parameter(len(self.blobs) - 1, "recurrent", transposed=True)
        sizes = place.value("gates", [self.outputs] * GATES)
        operations: list[Operation] = [
            ("Mul", ["h", "going"], ["h_kept"]),
            ("MatMul", ["h_kept", recurrent], ["h_part"]),
            ("Add", ["drive", "h_part"], ["sums"]),
            *_lstm_operations("sums", "c", "going", sizes, ("c_new", "h_new")),
            ("Identity", ["h_new"], ["out"]),
        ]
        self.write_scan(place, operations, ["h", "c"])


@register("RNN")
class RNN(Recurrent):
    """h = tanh(W_hh h + W_xh x + b_h), o = tanh(W_ho h + b_o); blobs W_xh, b_h, [W_xh_static], W_hh, W_ho, b_o."""

    def make_parameters(self) -> None:
        """Create the weights of input, static input, hidden state and output."""
        super().make_parameters()
        self.add_weight(self.outputs, self.outputs)
        self.add_bias(self.outputs)

    def step(
        self, drive: torch.Tensor, cont: torch.Tensor, states: Tensors, parameters: Tensors
    ) -> tuple[torch.Tensor, Tensors]:
        """One time step; the only state is h."""
        hidden = torch.tanh(drive + self.product(self.rounded(cont * states[0]), parameters, -3))
        return torch.tanh(self.product(self.rounded(hidden), parameters, -2, bias=-1)), [hidden]

    def to_onnx(self, place: Place) -> None:
        """A Scan with the state h, followed by an output layer."""
        count = len(self.blobs)
        recurrent = place.parameter(count - 3, "recurrent", transposed=True)
        outward = place.parameter(count - 2, "outward", transposed=True)
        operations: list[Operation] = [
            ("Mul", ["h", "going"], ["h_kept"]),
            ("MatMul", ["h_kept", recurrent], ["h_part"]),
            ("Add", ["drive", "h_part"], ["sums"]),
            ("Tanh", ["sums"], ["h_new"]),
            ("MatMul", ["h_new", outward], ["raw"]),
            ("Add", ["raw", place.parameter(count - 1, "outward_bias")], ["shifted"]),
            ("Tanh", ["shifted"], ["out"]),
        ]
        self.write_scan(place, operations, ["h"])


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

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Return c = cont * f * c_prev + i * g, h = o * tanh(c)."""
        return list(lstm_step(bottoms[1], bottoms[0], bottoms[2].detach().unsqueeze(2)))

    def to_onnx(self, place: Place) -> None:
        """One time step."""
        cell, gates, cont = place.bottoms
        going = place.step("going", "Unsqueeze", cont, place.value("behind", [2]))
        (hidden,) = fixed(place.bottom_dims[0][2:])
        sizes = place.value("sizes", [hidden] * GATES)
        outer = {gates, cell, going, sizes, *place.tops}
        for operator, *tensors in _lstm_operations(gates, cell, going, sizes, (place.tops[0], place.tops[1])):
            inputs, outputs = (
                [name if name in outer else f"{self.name}.{name}" for name in names] for names in tensors
            )
            place.node(operator, outputs[0].rpartition(".")[2], inputs, outputs, **_attributes(operator))


@register("GRU")
class GRU(Recurrent):
    """Blobs: W_xc (3H, D), b_c (3H), W_xc_static if there is a static input, W_hc (3H, H); gates in the order z, r, h.

    The formulas are ONNX's (``linear_before_reset`` 0): z = sigmoid(W_z x + R_z h + b_z), r likewise, n = tanh(W_h x +
    R_h (r * h) + b_h), and the new h = (1 - z) * n + z * h. Bottoms, tops and options are those of Caffe's LSTM
    (``recurrent_param``); h is multiplied by ``cont`` before use.
    """

    gates = 3

    def step(
        self, drive: torch.Tensor, cont: torch.Tensor, states: Tensors, parameters: Tensors
    ) -> tuple[torch.Tensor, Tensors]:
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

    def to_onnx(self, place: Place) -> None:
        """A Scan with the state h; gate order z, r, h."""
        size = self.outputs
        weight = self.blobs[-1].tensor.detach().cpu().numpy()
        gates = place.value("recurrent_gates", weight[: 2 * size].T)
        new = place.value("recurrent_new", weight[2 * size :].T)
        sizes = place.value("parts", [2 * size, size])
        halves = place.value("halves", [size, size])
        one = place.value("one", 1.0)
        operations: list[Operation] = [
            ("Mul", ["h", "going"], ["before"]),
            ("Split", ["drive", sizes], ["drive_gates", "drive_new"]),
            ("MatMul", ["before", gates], ["gates_part"]),
            ("Add", ["drive_gates", "gates_part"], ["gate_sums"]),
            ("Sigmoid", ["gate_sums"], ["both"]),
            ("Split", ["both", halves], ["update", "reset"]),
            ("Mul", ["reset", "before"], ["left"]),
            ("MatMul", ["left", new], ["new_part"]),
            ("Add", ["drive_new", "new_part"], ["new_sums"]),
            ("Tanh", ["new_sums"], ["fresh"]),
            ("Sub", [one, "update"], ["rest"]),
            ("Mul", ["rest", "fresh"], ["entered"]),
            ("Mul", ["update", "before"], ["kept"]),
            ("Add", ["entered", "kept"], ["h_new"]),
            ("Identity", ["h_new"], ["out"]),
        ]
        self.write_scan(place, operations, ["h"])
