"""Reads the boxes of a network from its float ONNX model, whose nodes are named after their layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.model.operators import PICTURE_CHEAP, RANDOM
from amct.report.network.boxes import Box, Network, merged_chains

if TYPE_CHECKING:
    from collections.abc import Collection

    from onnx import ModelProto, NodeProto

_REPEATED = "@"  # the second call of a layer is the node "conv@1"


def onnx_network(model: ModelProto, layers: Collection[str], integer_tensors: Collection[str] = ()) -> Network:
    """Return the network of an ONNX model; constants are left out.

    Args:
        model: The float model.
        layers: The quantized layers: the names of their nodes.
        integer_tensors: The tensors that are rounded to integers in the quantized model.
    """
    inputs = [value.name for value in model.graph.input]
    maker = {name: index for index, name in enumerate(inputs)}
    boxes = [Box(name=name, type="input", integer=name in integer_tensors) for name in inputs]
    for node in model.graph.node:
        sources = tuple(dict.fromkeys(maker[name] for name in _read(node) if name in maker))
        if not sources and node.op_type not in RANDOM:
            continue  # computed from constants only
        maker.update({name: len(boxes) for name in node.output})
        layer = node.name.partition(_REPEATED)[0] if node.name not in layers else node.name
        boxes.append(
            Box(
                name=node.name or node.op_type,
                type=node.op_type,
                inputs=sources,
                layer=layer if layer in layers else None,
                integer=layer in layers or any(name in integer_tensors for name in node.output),
            )
        )
    return merged_chains(boxes, PICTURE_CHEAP)


def _read(node: NodeProto) -> list[str]:
    """The tensors that a node reads, also inside its branches and loop bodies."""
    names = list(node.input)
    for attribute in node.attribute:
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            names += [name for each in inner.node for name in _read(each)]
    return names
