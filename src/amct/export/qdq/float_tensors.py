"""The tensors between layers that placement ``fast`` leaves float although they have factors, with the reason.

1. Residual streams (``residual_streams.py``).
2. Partial sums: a sum of many addends, such as the branches of a MobileOne block, is rounded once, not at every Add.
3. Probabilities of many alternatives, as in attention over many positions. If all n alternatives are equally probable,
   the sum of n independent values weighted by 1/n is √n times smaller than a value; rounding each weight with step s
   adds an error of s/√12 · √n times a value. The ratio √12 / (n · s) must be at least ``_PROBABILITY_SQNR``.
4. Those that the user requests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from amct.export.onnx.messages import attribute_value
from amct.export.qdq.residual_streams import is_computed_sum, residual_streams
from amct.model.operators import MOVING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from amct.export.onnx.graph import OnnxGraph
    from amct.numerics.qparams import Observed

PROBABILITY_STEP = 1 / 255
"""The step of a probability that was not observed."""
_PROBABILITY_SQNR = 10 ** (30 / 20)
"""30 dB, the order of what the 8-bit layers themselves reach."""


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
