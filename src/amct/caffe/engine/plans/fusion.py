"""Fusion at run time: BatchNorm, Scale and Bias are folded into the weights of the layer before them.

Only inference is fused. The net's parameters are not changed, and the folded weights are recomputed when a parameter
changes. The fusion that rewrites model files is in ``amct.caffe.ptq``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Folded
from amct.numerics.arq import channels_first, from_channels_first

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from amct.caffe.engine.build.graph import Node
    from amct.caffe.engine.layer import Call


@dataclass(eq=False)
class FusedChain:
    """A layer with weights, the per-channel layers folded into them, and an optional activation."""

    nodes: list[Node]
    """All layers of the chain, in order."""
    activation: Node | None = None
    """The last layer, if it is an activation."""

    def bind(self, bottoms: list[torch.Tensor]) -> Call:
        """A call that computes the result of the last layer; valid as long as one of ``Layer.bind``."""
        code = self.activation.layer.activation() if self.activation is not None else None
        call, is_activated = self.nodes[0].layer.bind_folded(bottoms[0], self._folded(), code)
        if self.activation is None or is_activated:
            return lambda given: (call(given[0]),)
        last = self.activation.layer

        def activated(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            last.may_overwrite = True
            return last.forward([call(given[0])], [])

        return activated

    @property
    def affine(self) -> list[Node]:
        """The per-channel layers."""
        return [node for node in self.nodes[1:] if node is not self.activation]

    def _folded(self) -> Folded:
        head = self.nodes[0].layer
        if not self.affine:
            return Folded(head, lambda: [blob.tensor for blob in head.blobs], head.blobs)
        return Folded(head, self._fold, [blob for node in self.nodes for blob in node.layer.blobs])

    def _fold(self) -> list[torch.Tensor]:
        head = self.nodes[0].layer
        kind, groups = head.fold_kind, head.fold_groups()
        assert kind is not None, "find_chains only takes such layers as heads"
        weight, *bias = (blob.tensor.detach() for blob in head.blobs)
        rows = channels_first(weight, kind, groups).double()
        scale, shift = torch.ones_like(rows[:, 0]), torch.zeros_like(rows[:, 0])
        for node in self.affine:
            affine = node.layer.channel_affine()
            assert affine is not None, "find_chains only takes layers that are affine"
            factor, offset = affine
            if factor is not None:
                scale, shift = scale * factor, shift * factor
            if offset is not None:
                shift = shift + offset
        folded = from_channels_first(rows * scale[:, None], weight.shape, kind, groups)
        return [folded.float(), (shift + scale * bias[0].double() if bias else shift).float()]


def find_chains(nodes: list[Node], kept: Collection[int] | None) -> dict[int, FusedChain]:
    """The chains, by the index of their first layer."""
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for bottom in node.bottoms:
            readers.setdefault(bottom, []).append(node)
    chains = {}
    for node in nodes:
        if not _can_be_head(node):
            continue
        chain = FusedChain([node])
        while chain.activation is None and (following := _next(chain.nodes[-1], readers, kept)) is not None:
            if following.needs_backward:
                break
            if following.layer.activation() is not None:
                chain.activation = following
            elif following.layer.channel_affine() is None:
                break
            chain.nodes.append(following)
        if len(chain.nodes) > 1:
            chains[node.index] = chain
    return chains


def _can_be_head(node: Node) -> bool:
    return node.layer.fold_kind is not None and not node.needs_backward and len(node.tops) == len(node.bottoms) == 1


def _next(node: Node, readers: dict[int, list[Node]], kept: Collection[int] | None) -> Node | None:
    """The only reader of this layer's result, if fusing it cannot be observed."""
    top = node.tops[0]
    after = [reader for reader in readers.get(top, []) if reader.index > node.index]
    if not after:
        return None
    following = after[0]
    if len(following.bottoms) != 1 or len(following.tops) != 1:
        return None
    if following.tops == [top]:
        return following
    if kept is None or top in kept or len(after) > 1:
        return None
    return following
