"""The weights of an ONNX model's layers: where they are, and how rounded ones are put back."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.export.binding import LayerKind
from amct.export.onnx.weights import replace_weight
from amct.numerics.arq import WeightKind
from amct.ptq.weights import WeightPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import Layer
    from amct.ptq.weights import LayerWeights

WEIGHT_KINDS: Mapping[LayerKind, WeightKind] = MappingProxyType(
    {
        LayerKind.CONV: WeightKind.CONV,
        LayerKind.CONV_TRANSPOSE: WeightKind.CONV_TRANSPOSE,
        LayerKind.LINEAR: WeightKind.LINEAR,
        LayerKind.LSTM: WeightKind.RNN,
        LayerKind.GRU: WeightKind.RNN,
    }
)
_GATES = {LayerKind.LSTM: 4, LayerKind.GRU: 3}


def weight_parts(layer: Layer) -> tuple[WeightPart, ...]:
    """The float weights of a layer; none for average pooling."""
    arrays = {"weight": layer.weight, "recurrent weight": layer.recurrent_weight}
    return tuple(
        WeightPart(
            name=name,
            tensor=torch.from_numpy(np.array(array)),
            kind=WEIGHT_KINDS[layer.kind],
            groups=layer.groups,
            gates=_GATES.get(layer.kind, 0),
            balanced=name == "weight",
        )
        for name, array in arrays.items()
        if array is not None
    )


def channel_axis(layer: Layer) -> int:
    """The axis of the layer's input that holds the channels."""
    return 1 if layer.kind in (LayerKind.CONV, LayerKind.CONV_TRANSPOSE) else -1


def put_weights(weights: LayerWeights, graph: OnnxGraph, layer: Layer) -> None:
    """Let the layer's node in a graph compute with the rounded weights; its input is not balanced there."""
    for index, weight in enumerate(weights.unbalanced().values(), start=1):
        array: NDArray[np.floating] = weight.numpy()
        replace_weight(graph, layer, array[np.newaxis] if layer.kind.is_recurrent else array, index)
