"""What an activation or a reader leaves of a tensor's range, so that no integers are spent on values without effect.

A hard swish, ``x · clip(x + 3, 0, 6) / 6``, is zero for every x below -3. In a network of convolutions with this
activation most outputs of a convolution lie there, often as far below zero as others lie above: a range that begins at
-3 has half the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from amct.export.onnx.messages import attribute_value

if TYPE_CHECKING:
    from onnx import NodeProto

    from amct.export.onnx.graph import OnnxGraph
    from amct.numerics.qparams import QParams

LOWEST, HIGHEST = -128, 127
HARD_SWISH_FLOOR = -3.0


def activation_limits(graph: OnnxGraph, activation: NodeProto) -> tuple[float, float]:
    """The smallest and the largest value that a Relu or a Clip lets pass."""
    if activation.op_type == "Relu":
        return 0.0, np.inf
    limits = []
    for index, default in ((1, -np.inf), (2, np.inf)):
        name = activation.input[index] if len(activation.input) > index else ""
        value = graph.constant(name) if name else None
        if name and value is None:
            return np.inf, -np.inf  # computed limits are never absorbed
        limits.append(default if value is None else float(value))
    return limits[0], limits[1]


def constant_factor(graph: OnnxGraph, node: NodeProto) -> float | None:
    """The positive number by which a Mul or a Div multiplies its first input; None for every other node."""
    if node.op_type not in ("Mul", "Div"):
        return None
    value = _single_constant(graph, node.input[1])
    if value is None or not 0 < value < np.inf:
        return None
    return value if node.op_type == "Mul" else 1 / value


def without_effect_below(graph: OnnxGraph, tensor: str) -> float | None:
    """The largest value such that every reader treats all smaller ones as it treats this one; None if there is none."""
    readers = graph.consumers(tensor)
    if not readers or graph.is_output(tensor) or graph.is_captured(tensor):
        return None
    floors = [_floor_of(graph, tensor, reader) for reader in readers]
    known = [floor for floor in floors if floor is not None]
    return min(known) if len(known) == len(floors) else None


def raised_to(qparams: QParams, floor: float) -> QParams:
    """Parameters of the range from ``floor`` to the upper end of the given ones; the floor itself is within it."""
    step, zero_point = qparams.step, qparams.zero_point
    top = (HIGHEST - zero_point) * step
    if (LOWEST - zero_point) * step >= floor or top <= max(0.0, floor):
        return qparams
    floor = min(floor, 0.0)  # zero must be one of the values
    scale = (top - floor) / (HIGHEST - LOWEST - 1)  # one step less, because the zero point is rounded upwards
    return qparams.moved(scale, int(np.ceil(LOWEST - floor / scale)))


def _floor_of(graph: OnnxGraph, tensor: str, reader: NodeProto) -> float | None:
    if reader.op_type == "HardSwish":
        return HARD_SWISH_FLOOR
    if reader.op_type == "Mul":  # tensor · gate(tensor)
        other = [name for name in reader.input if name != tensor]
        return _zero_below(graph, tensor, other[0]) if len(other) == 1 else None
    if reader.op_type == "Add":  # the sum must end in the activation
        user = graph.only_consumer(reader.output[0])
        return None if user is None else _zero_below(graph, tensor, user.output[0])
    return _zero_below(graph, tensor, reader.output[0])


def _zero_below(graph: OnnxGraph, tensor: str, gate: str) -> float | None:
    """The value of ``tensor`` below which ``gate`` is zero; None unless it is a hard gate computed from the tensor."""
    node = graph.producer(gate)
    if node is None:
        return None
    if constant_factor(graph, node) is not None:
        return _zero_below(graph, tensor, node.input[0])
    if node.op_type == "HardSigmoid" and node.input[0] == tensor:
        return -float(attribute_value(node, "beta", 0.5)) / float(attribute_value(node, "alpha", 0.2))
    if node.op_type not in ("Relu", "Clip") or activation_limits(graph, node)[0] != 0:
        return None
    if node.input[0] == tensor:
        return 0.0
    added = graph.producer(node.input[0])
    if added is None or added.op_type != "Add" or tensor not in added.input:
        return None
    constants = [_single_constant(graph, name) for name in added.input if name != tensor]
    return -constants[0] if len(constants) == 1 and constants[0] is not None else None


def _single_constant(graph: OnnxGraph, name: str) -> float | None:
    value = graph.constant(name) if graph.is_constant(name) else None
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None
