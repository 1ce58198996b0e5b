"""What the graph tells of the values of its tensors: which 8 bits cannot hold, and which have no effect.

Placement ``fast`` leaves tensors between layers float although they have parameters:

1. Residual streams (below).
2. Partial sums: a sum of many addends, such as the branches of a MobileOne block, is rounded once, not at every Add.
3. Probabilities of many alternatives, as in attention over many positions. If all n alternatives are equally probable,
   the sum of n independent values weighted by 1/n is √n times smaller than a value; rounding each weight with step s
   adds an error of s/√12 · √n times a value. The ratio √12 / (n · s) must be at least ``_PROBABILITY_SQNR``.
4. Those that the user requests.

No integers are spent on values without effect: a hard swish, ``x · clip(x + 3, 0, 6) / 6``, is zero for every x below
-3, and swish, GELU, sigmoid and erf are so nearly constant below some x that rounding to 8 bits changes more. In a
network of convolutions with such an activation most outputs of a convolution lie there, often as far below zero as
others lie above: a range that begins at -3 has half the step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from amct.export.onnx.messages import attribute_value
from amct.model.operators import MOVING, NORMALIZING, REDUCING, STATISTIC, STREAM, STREAM_START

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from onnx import NodeProto

    from amct.export.onnx.graph import OnnxGraph
    from amct.numerics.qparams import Observed, QParams

PROBABILITY_STEP = 1 / 255
"""The step of a probability that was not observed."""
_PROBABILITY_SQNR = 10 ** (30 / 20)
"""30 dB, the order of what the 8-bit layers themselves reach."""
_LONGEST_STATISTIC = 24
"""The largest number of tensors between the values of a sample and their standard deviation."""


def tensors_kept_float(
    graph: OnnxGraph, observed: Mapping[str, Observed], requested: Collection[str]
) -> dict[str, str]:
    """The tensors that only layers read quantized, with the reason.

    Args:
        graph: the float model.
        observed: factors of the tensors between layers.
        requested: tensors that the user wants in float.
    """
    return {
        **imprecise_sums(graph),
        **dict.fromkeys(_fine_probabilities(graph, observed), "8 bits cannot represent probabilities this small"),
        **dict.fromkeys(requested, "it was requested in float"),
    }


def imprecise_sums(graph: OnnxGraph) -> dict[str, str]:
    """The tensors that stay float whatever their factors are, with the reason."""
    return {
        **dict.fromkeys(_partial_sums(graph), "it is a partial sum, and the whole sum is rounded once"),
        **dict.fromkeys(residual_streams(graph), "it is part of a residual stream that a normalization reads"),
    }


def _partial_sums(graph: OnnxGraph) -> list[str]:
    found = []
    for node in graph.nodes:
        if is_computed_sum(graph, node):
            user = graph.only_consumer(node.output[0])
            if user is not None and is_computed_sum(graph, user):
                found.append(node.output[0])
    return found


def _fine_probabilities(graph: OnnxGraph, observed: Mapping[str, Observed]) -> list[str]:
    found = []
    for node in graph.nodes:
        if node.op_type != "Softmax":
            continue
        result = node.output[0]
        alternatives = graph.dimension(result, attribute_value(node, "axis", -1)) or math.inf
        step = observed[result].step if result in observed else PROBABILITY_STEP
        if math.sqrt(12) / (alternatives * step) < _PROBABILITY_SQNR:
            found += _moved(graph, result)
    return found


def _moved(graph: OnnxGraph, tensor: str) -> list[str]:
    """A tensor and the tensors with the same values, moved."""
    found = [tensor]
    for name in found:
        found += [user.output[0] for user in graph.consumers(name) if user.op_type in MOVING and user.input[0] == name]
    return found


# -- residual streams --------------------------------------------------------------------------------------------------


def residual_streams(graph: OnnxGraph) -> frozenset[str]:
    """The tensors of all residual streams, and those between a stream and the layers that start it.

    A residual stream is a sum that a normalization of each sample reads (LayerNorm, RMSNorm, GroupNorm, not
    BatchNorm). Such a stream runs through the whole model, and a few of its channels are much larger than the
    others. A quantizer of 8 bits takes its step from the large ones, and the normalization amplifies the rounding
    error of the small ones; every block adds the same error again. So placement ``fast`` leaves the stream float,
    and the output of each layer that starts it, also through a normalization: a patch convolution whose output is
    normalized before the first block, or a convolution between two stages. All later blocks get its error. A
    convolution whose output is only added to the stream is no part of it, normalized or not.

    Exporters write a normalization as one operator or as arithmetic: ``(x - mean(x)) / sqrt(mean((x - mean(x))²) +
    eps)``, without the subtraction for RMSNorm. Both are found.
    """
    normalized = dict(normalizations(graph))
    found: set[str] = set()
    for source in normalized.values():
        if source in found:
            continue
        members = _reachable([source], lambda tensor: _neighbours(graph, tensor, normalized))
        makers = (graph.producer(tensor) for tensor in members)
        if any(node is not None and is_computed_sum(graph, node) for node in makers):
            found |= _reachable(members, lambda tensor: _sources(graph, tensor, STREAM_START, normalized))
    starts = [source for result, source in normalized.items() if result in found and not _is_only_added(graph, result)]
    found |= _reachable(starts, lambda tensor: _sources(graph, tensor, STREAM_START, normalized))
    return frozenset(tensor for tensor in found if not _is_added_convolution(graph, tensor))


def _is_added_convolution(graph: OnnxGraph, tensor: str) -> bool:
    """Whether a tensor is the output of a convolution that is only added to a stream, at most moved and scaled.

    onnxruntime computes a convolution in integers only if its output is quantized. That rounds the addend in steps of
    its own range, once; the stream itself is not rounded.
    """
    producer = graph.producer(tensor)
    return producer is not None and producer.op_type == "Conv" and _is_only_added(graph, tensor)


def _is_only_added(graph: OnnxGraph, tensor: str) -> bool:
    """Whether a tensor is an addend of one sum and nothing else, at most moved and scaled."""
    user = graph.only_consumer(tensor)
    while user is not None and not is_computed_sum(graph, user):
        scales = user.op_type == "Mul" and len(_data(graph, user)) == 1
        moves = user.op_type in MOVING and user.op_type != "Concat"
        user = graph.only_consumer(user.output[0]) if scales or moves else None
    return user is not None


def _reachable(start: Iterable[str], neighbours: Callable[[str], list[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        tensor = waiting.pop()
        if tensor not in found:
            found.add(tensor)
            waiting += neighbours(tensor)
    return found


def _neighbours(graph: OnnxGraph, tensor: str, normalized: Collection[str]) -> list[str]:
    """The tensors before and behind a tensor of a stream."""
    behind = [
        name
        for user in graph.consumers(tensor)
        if user.op_type in STREAM and tensor in _data(graph, user)
        for name in user.output
        if name
    ]
    return [*_sources(graph, tensor, STREAM, normalized), *behind]


def _sources(graph: OnnxGraph, tensor: str, operators: Collection[str], normalized: Collection[str]) -> list[str]:
    """The tensors from which one of these operators computes a tensor; the result of a normalization has none."""
    producer = graph.producer(tensor)
    if producer is None or producer.op_type not in operators or tensor in normalized:
        return []
    return _data(graph, producer)


def _data(graph: OnnxGraph, node: NodeProto) -> list[str]:
    """The computed inputs of a node, without shapes and indices."""
    inputs = node.input[:1] if node.op_type in MOVING and node.op_type != "Concat" else node.input
    return [name for name in inputs if name and not graph.is_constant(name)]


def is_computed_sum(graph: OnnxGraph, node: NodeProto) -> bool:
    """Whether a node adds two or more computed tensors."""
    return node.op_type in ("Add", "Sum") and len(_data(graph, node)) > 1


def normalizations(graph: OnnxGraph) -> Iterator[tuple[str, str]]:
    """The result and the input of each normalization."""
    for node in graph.nodes:
        if node.op_type in NORMALIZING:
            yield node.output[0], node.input[0]
        elif node.op_type in ("Div", "Mul") and len(_data(graph, node)) > 1:
            source = _normalized_input(graph, node)
            if source is not None:
                yield node.output[0], source


def _normalized_input(graph: OnnxGraph, node: NodeProto) -> str | None:
    """The tensor that a Div or Mul normalizes: one operand holds its values, the other only their statistics."""
    first, second = node.input
    for values, statistic in ((first, second), (second, first)) if node.op_type == "Mul" else ((first, second),):
        producer = graph.producer(values)
        centered = producer.input[0] if producer is not None and producer.op_type == "Sub" else values
        for source in dict.fromkeys((centered, values)):
            if _is_statistic(graph, statistic, source):
                return source
    return None


def _is_statistic(graph: OnnxGraph, tensor: str, source: str) -> bool:
    """Whether a tensor is computed from means or sums of ``source`` and from constants only."""
    seen: set[tuple[str, bool]] = set()
    waiting = [(tensor, False)]
    uses_source = False
    while waiting:
        name, reduced = waiting.pop()
        if (name, reduced) in seen or graph.is_constant(name):
            continue
        seen.add((name, reduced))
        if name == source and reduced:
            uses_source = True
            continue
        producer = graph.producer(name)
        if name == source or producer is None or producer.op_type not in STATISTIC or len(seen) > _LONGEST_STATISTIC:
            return False
        reduced = reduced or producer.op_type in REDUCING
        inputs = producer.input[:1] if producer.op_type in REDUCING else producer.input
        waiting += [(each, reduced) for each in inputs if each]
    return uses_source


# -- values without effect ---------------------------------------------------------------------------------------------


LOWEST, HIGHEST = -128, 127
HARD_SWISH_FLOOR = -3.0
SIGMOID_FLOOR = -7.0
"""Below it sigmoid(x) is less than 0.001 and x · sigmoid(x) less than 0.0064: half a step of 7 / 255 is twice that."""
ERF_FLOOR = -3.5 / math.sqrt(2)
"""Below it 1 + erf(x) is less than 0.0005; of GELU this is x < -3.5, where it is less than 0.001."""
_FLOORS = {"HardSwish": HARD_SWISH_FLOOR, "Sigmoid": SIGMOID_FLOOR, "Erf": ERF_FLOOR, "Gelu": ERF_FLOOR * math.sqrt(2)}


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
    if reader.op_type in _FLOORS:
        return _FLOORS[reader.op_type]
    factor = constant_factor(graph, reader)
    if factor is not None:
        floor = without_effect_below(graph, reader.output[0])
        return None if floor is None else floor / factor
    if reader.op_type == "Mul":  # tensor · gate(tensor)
        other = [name for name in reader.input if name != tensor]
        return _zero_below(graph, tensor, other[0]) if len(other) == 1 else None
    if reader.op_type == "Add":  # the sum must end in the activation
        user = graph.only_consumer(reader.output[0])
        return None if user is None else _zero_below(graph, tensor, user.output[0])
    return _zero_below(graph, tensor, reader.output[0])


def _zero_below(graph: OnnxGraph, tensor: str, gate: str) -> float | None:
    """The value of ``tensor`` below which ``gate``, which is computed from it, is zero or next to it; None: none."""
    node = graph.producer(gate)
    if node is None:
        return None
    if constant_factor(graph, node) is not None:
        return _zero_below(graph, tensor, node.input[0])
    if node.op_type == "Sigmoid" and node.input[0] == tensor:
        return SIGMOID_FLOOR
    if node.op_type == "HardSigmoid" and node.input[0] == tensor:
        return -float(attribute_value(node, "beta", 0.5)) / float(attribute_value(node, "alpha", 0.2))
    if node.op_type == "Add":
        return _one_plus_erf(graph, tensor, node)
    if node.op_type not in ("Relu", "Clip") or activation_limits(graph, node)[0] != 0:
        return None
    if node.input[0] == tensor:
        return 0.0
    added = graph.producer(node.input[0])
    if added is None or added.op_type != "Add" or tensor not in added.input:
        return None
    constants = [_single_constant(graph, name) for name in added.input if name != tensor]
    return -constants[0] if len(constants) == 1 and constants[0] is not None else None


def _one_plus_erf(graph: OnnxGraph, tensor: str, node: NodeProto) -> float | None:
    """The value of ``tensor`` below which an Add that is 1 + erf(tensor · factor) is next to zero, as in GELU."""
    one = any(_single_constant(graph, name) == 1 for name in node.input)
    erf = next((each for each in map(graph.producer, node.input) if each is not None and each.op_type == "Erf"), None)
    if not one or erf is None:
        return None
    scaled = graph.producer(erf.input[0])
    factor = constant_factor(graph, scaled) if scaled is not None and scaled.input[0] == tensor else None
    return None if factor is None else ERF_FLOOR / factor


def _single_constant(graph: OnnxGraph, name: str) -> float | None:
    value = graph.constant(name) if graph.is_constant(name) else None
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None
