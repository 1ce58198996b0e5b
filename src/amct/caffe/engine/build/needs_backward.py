"""Decides which layers and blobs need gradients, by Caffe's rule: those between a loss and a learnable parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amct.caffe.engine.build.graph import Graph, Node


def decide_backward(graph: Graph) -> None:
    """Clear ``needs_backward`` of nodes that do not lead to a loss, then set it for ``force_backward``."""
    under_loss: set[int] = set()
    skipped: set[int] = set()
    for node in reversed(graph.nodes):
        _narrow(node, under_loss, skipped)
    if graph.force_backward:
        for node in graph.nodes:
            node.needs_backward = True
            node.bottom_needs_gradient = [
                needs or position not in node.layer.no_gradient
                for position, needs in enumerate(node.bottom_needs_gradient)
            ]
            node.layer.parameter_needs_gradient = [True] * len(node.layer.blobs)


def _narrow(node: Node, under_loss: set[int], skipped: set[int]) -> None:
    weighted = any(weight != 0 for weight in node.layer.loss_weights)
    contributes = weighted or any(top in under_loss for top in node.tops)
    all_skipped = all(top in skipped for top in node.tops)
    if node.needs_backward and all_skipped:
        node.needs_backward = False
        node.bottom_needs_gradient = [False] * len(node.bottoms)
    if not contributes:
        node.needs_backward = False
    for position, bottom in enumerate(node.bottoms):
        if contributes:
            under_loss.add(bottom)
        else:
            node.bottom_needs_gradient[position] = False
        if not node.bottom_needs_gradient[position]:
            skipped.add(bottom)
