"""Removes Identity nodes from the main graph: their readers read what they copy.

Some exporters write one behind every operator. It would hide what follows a layer: a constant or a batch norm that is
folded into it, an activation that its quantizer absorbs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.export.onnx.messages import captures

if TYPE_CHECKING:
    from onnx import ModelProto


def remove_identities(model: ModelProto) -> None:
    """Remove them, in place; those that write an output, or what the body of an If, Loop or Scan reads, stay."""
    graph = model.graph
    fixed = {value.name for value in graph.output}.union(*(captures(node) for node in graph.node))
    source: dict[str, str] = {}
    kept = []
    for node in graph.node:
        if node.op_type == "Identity" and not node.domain and node.output[0] not in fixed:
            source[node.output[0]] = source.get(node.input[0], node.input[0])
        else:
            kept.append(node)
    if not source:
        return
    for node in kept:
        for index, name in enumerate(node.input):
            if name in source:
                node.input[index] = source[name]
    known = [value for value in graph.value_info if value.name not in source]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(kept)
    graph.value_info.extend(known)
