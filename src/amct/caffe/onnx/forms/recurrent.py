"""LSTM, RNN, GRU and LSTMUnit.

ONNX's LSTM cannot reset a stream in the middle of a sequence (``cont``), so the time steps are the body of a Scan.
States are not carried from one run to the next: a run starts from zeros, or from the states of ``expose_hidden``.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from amct.caffe.engine.layers.recurrent import GATES, GRU, LSTM, RNN, LSTMUnit, Recurrent
from amct.caffe.onnx.forms.place import Place, fixed, onnx_form


@onnx_form(LSTM)
def lstm(place: Place[LSTM]) -> None:
    """A Scan with the states h and c."""
    recurrent = place.parameter(len(place.layer.blobs) - 1, "recurrent", transposed=True)
    sizes = place.value("gates", [place.layer.outputs] * GATES)
    nodes = [
        helper.make_node("Mul", ["h", "going"], ["h_kept"]),
        helper.make_node("MatMul", ["h_kept", recurrent], ["h_part"]),
        helper.make_node("Add", ["drive", "h_part"], ["sums"]),
        *_lstm_step("sums", "c", "going", sizes, ("c_new", "h_new")),
        helper.make_node("Identity", ["h_new"], ["out"]),
    ]
    _scan(place, nodes, ["h", "c"])


@onnx_form(RNN)
def rnn(place: Place[RNN]) -> None:
    """A Scan with the state h, followed by an output layer."""
    count = len(place.layer.blobs)
    recurrent = place.parameter(count - 3, "recurrent", transposed=True)
    outward = place.parameter(count - 2, "outward", transposed=True)
    nodes = [
        helper.make_node("Mul", ["h", "going"], ["h_kept"]),
        helper.make_node("MatMul", ["h_kept", recurrent], ["h_part"]),
        helper.make_node("Add", ["drive", "h_part"], ["sums"]),
        helper.make_node("Tanh", ["sums"], ["h_new"]),
        helper.make_node("MatMul", ["h_new", outward], ["raw"]),
        helper.make_node("Add", ["raw", place.parameter(count - 1, "outward_bias")], ["shifted"]),
        helper.make_node("Tanh", ["shifted"], ["out"]),
    ]
    _scan(place, nodes, ["h"])


@onnx_form(GRU)
def gru(place: Place[GRU]) -> None:
    """A Scan with the state h; gate order z, r, h."""
    size = place.layer.outputs
    weight = place.layer.blobs[-1].tensor.detach().cpu().numpy()
    gates = place.value("recurrent_gates", weight[: 2 * size].T)
    new = place.value("recurrent_new", weight[2 * size :].T)
    sizes = place.value("parts", [2 * size, size])
    halves = place.value("halves", [size, size])
    one = place.value("one", 1.0)
    nodes = [
        helper.make_node("Mul", ["h", "going"], ["before"]),
        helper.make_node("Split", ["drive", sizes], ["drive_gates", "drive_new"], axis=-1),
        helper.make_node("MatMul", ["before", gates], ["gates_part"]),
        helper.make_node("Add", ["drive_gates", "gates_part"], ["gate_sums"]),
        helper.make_node("Sigmoid", ["gate_sums"], ["both"]),
        helper.make_node("Split", ["both", halves], ["update", "reset"], axis=-1),
        helper.make_node("Mul", ["reset", "before"], ["left"]),
        helper.make_node("MatMul", ["left", new], ["new_part"]),
        helper.make_node("Add", ["drive_new", "new_part"], ["new_sums"]),
        helper.make_node("Tanh", ["new_sums"], ["fresh"]),
        helper.make_node("Sub", [one, "update"], ["rest"]),
        helper.make_node("Mul", ["rest", "fresh"], ["entered"]),
        helper.make_node("Mul", ["update", "before"], ["kept"]),
        helper.make_node("Add", ["entered", "kept"], ["h_new"]),
        helper.make_node("Identity", ["h_new"], ["out"]),
    ]
    _scan(place, nodes, ["h"])


def _lstm_step(sums: str, cell: str, going: str, sizes: str, results: tuple[str, str]) -> list[NodeProto]:
    """The new cell and hidden state; gate order i, f, o, g."""
    new_cell, hidden = results
    return [
        helper.make_node("Split", [sums, sizes], ["i", "f", "o", "g"], axis=-1),
        helper.make_node("Sigmoid", ["i"], ["enter"]),
        helper.make_node("Sigmoid", ["f"], ["keep"]),
        helper.make_node("Sigmoid", ["o"], ["leave"]),
        helper.make_node("Tanh", ["g"], ["new"]),
        helper.make_node("Mul", [going, "keep"], ["keep_going"]),
        helper.make_node("Mul", ["keep_going", cell], ["kept"]),
        helper.make_node("Mul", ["enter", "new"], ["entered"]),
        helper.make_node("Add", ["kept", "entered"], [new_cell]),
        helper.make_node("Tanh", [new_cell], ["shown"]),
        helper.make_node("Mul", ["leave", "shown"], [hidden]),
    ]


def _scan(place: Place[LSTM] | Place[RNN] | Place[GRU], nodes: list[NodeProto], states: list[str]) -> None:
    """Run the body for each step; it reads the states, ``drive`` and ``going``, writes ``<state>_new`` and ``out``."""
    layer = place.layer
    axis = place.value("behind", [1])
    first = [helper.make_node("Unsqueeze", ["cont", axis], ["going"])]
    inputs = [*states, "drive", "cont"]
    outputs = [*(f"{state}_new" for state in states), "out"]
    body = helper.make_graph([*first, *nodes], f"{layer.name}.step", _values(inputs), _values(outputs))
    (streams,) = fixed(place.bottom_dims[0][1:2])
    ends = [place.writer.tensor(f"{layer.name}.{state}_end") for state in states]
    scan_inputs = [*_first_states(place, states, streams), _drive(place, streams), place.bottoms[1]]
    place.node("Scan", "", scan_inputs, [*ends, place.tops[0]], body=body, num_scan_inputs=2)
    for index, end in enumerate(ends, 1):
        if layer.exposed:
            place.top_reshaped(end, index)


def _values(names: list[str]) -> list[ValueInfoProto]:
    return [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]


def _first_states(place: Place[LSTM] | Place[RNN] | Place[GRU], states: list[str], streams: int) -> list[str]:
    layer = place.layer
    if layer.exposed:
        given = place.bottoms[2 + layer.has_static :]
        return [
            place.reshaped(bottom, (streams, layer.outputs), f"{state}_first")
            for bottom, state in zip(given, states, strict=True)
        ]
    place.writer.notes.append(
        f'layer "{layer.name}" ({layer.type}): every run starts from zeros; Caffe continues from the previous run'
    )
    zeros = np.zeros((streams, layer.outputs), dtype=np.float32)
    return [place.value(f"{state}_first", zeros) for state in states]


def _drive(place: Place[LSTM] | Place[RNN] | Place[GRU], streams: int) -> str:
    """The input part of the gates at all time steps: W_x x + b (+ W_static x_static)."""
    layer: Recurrent = place.layer
    x = place.reshaped(place.bottom, (place.bottom_dims[0][0], streams, layer.inputs), "x")
    driven = place.step("driven", "MatMul", x, place.parameter(0, "weight", transposed=True))
    driven = place.step("shifted", "Add", driven, place.parameter(1, "bias"))
    if not layer.has_static:
        return driven
    static = place.reshaped(place.bottoms[2], (streams, layer.static_inputs), "static")
    static = place.step("static_part", "MatMul", static, place.parameter(2, "static_weight", transposed=True))
    return place.step("drive", "Add", driven, static)


@onnx_form(LSTMUnit)
def lstm_unit(place: Place[LSTMUnit]) -> None:
    """One time step."""
    name = place.layer.name
    cell, gates, cont = place.bottoms
    going = place.step("going", "Unsqueeze", cont, place.value("behind", [2]))
    (hidden,) = fixed(place.bottom_dims[0][2:])
    sizes = place.value("sizes", [hidden] * GATES)
    outer = {gates, cell, going, sizes, *place.tops}
    for node in _lstm_step(gates, cell, going, sizes, (place.tops[0], place.tops[1])):
        inputs, outputs = (
            [text if text in outer else f"{name}.{text}" for text in part] for part in (node.input, node.output)
        )
        attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        place.node(node.op_type, outputs[0].rpartition(".")[2], inputs, outputs, **attributes)
