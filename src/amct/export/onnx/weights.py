"""Stores new weights and biases in the graph, in the layout of the layer's operator."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.model.kinds import LayerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from numpy.typing import NDArray
    from onnx import NodeProto

    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import Layer


def straighten_gemm(graph: OnnxGraph, layer: Layer) -> None:
    """Make a Gemm read its weight as ``[Cin, Cout]``; ``replace_weight`` then stores it in this layout."""
    if layer.node.op_type == "Gemm":
        graph.set_attribute(layer.node, "transB", 0)


def stored_weight(layer: Layer, weight: NDArray[Any]) -> NDArray[Any]:
    """Convert a weight from the layer's own layout to that of its operator: ``[Cin, Cout]`` for MatMul and Gemm."""
    if layer.kind is LayerKind.LINEAR and not layer.transposed_gemm:
        return np.ascontiguousarray(weight.T)
    return weight


def replace_weight(
    graph: OnnxGraph, layer: Layer, weight: NDArray[Any], index: int = 1, dtype: npt.DTypeLike | None = None
) -> str:
    """Store a weight (layer's own layout) as an initializer of the layer's node; returns its name.

    ``dtype`` is its type in the file, if it is another one.
    """
    name = owned_name(graph, layer.node, index, f"{layer.name}.{_SUFFIX[index]}")
    graph.set_initializer(name, stored_weight(layer, weight), dtype)
    graph.set_input(layer.node, index, name)
    return name


def replace_bias(graph: OnnxGraph, layer: Layer, bias: NDArray[Any]) -> str:
    """Store a bias ``[Cout]`` as an initializer of the layer's node, or of the Add behind it; returns its name."""
    node, index = layer.bias_place
    name = owned_name(graph, node, index, f"{layer.name}.bias")
    graph.set_initializer(name, bias)
    graph.set_input(node, index, name)
    return name


_SUFFIX = {1: "weight", 2: "recurrent_weight", 3: "bias"}


def share_weights(graph: OnnxGraph, layers: Sequence[Layer]) -> None:
    """Make the nodes of a layer that is computed several times read the same stored weights again.

    Each node was given its own; equal ones are stored once.
    """
    repeated = {layer.layer for layer in layers if layer.call}
    stored: dict[tuple[object, ...], str] = {}
    for layer in layers:
        if layer.layer not in repeated:
            continue
        operands = (*layer.node.input[1:], *(layer.bias_node.input if layer.bias_node is not None else ()))
        makers = (graph.producer(name) for name in operands)
        for node in (layer.node, layer.bias_node, *makers):
            for index, name in enumerate(node.input if node is not None else ()):
                if node is not None and graph.is_initializer(name):
                    array = graph.constant(name)
                    assert array is not None
                    key = (layer.layer, str(array.dtype), array.shape, sha256(array.tobytes()).digest())
                    graph.set_input(node, index, stored.setdefault(key, name))


def owned_name(graph: OnnxGraph, node: NodeProto, index: int, fallback: str) -> str:
    """The name of an initializer that only this node reads, or a new name if it is shared or computed."""
    current = node.input[index]
    if graph.is_initializer(current) and graph.only_consumer(current) is node:
        return current
    return graph.fresh_name(fallback)
