"""How a range of layers is run: the order of steps, what is merged, what may be overwritten, what is freed.

Two rules keep pycaffe's promises in the default mode: a value is only merged away when nobody could ever have
looked at it (the layers behind it work in place on the same blob), and every blob keeps its content. With
``keep_blobs=False`` layers are also merged across blobs that have one reader, and blobs are freed after their last
reader. In both modes what the last forward left is freed before the next one, unless someone holds an array of it: old
and new results are not in memory together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amct.caffe.engine.fusion import FusedChain, find_chains

if TYPE_CHECKING:
    from collections.abc import Collection

    from amct.caffe.engine.blob import Blob
    from amct.caffe.engine.build.graph import Graph, Node


@dataclass(eq=False)
class Step:
    """One thing to run: a layer, or several merged into one."""

    node: Node
    """The layer that is run (of a chain: its first)."""
    bottoms: list[Blob]
    tops: list[Blob]
    chain: FusedChain | None = None
    release: list[Blob] = field(default_factory=list)
    """Blobs nobody reads after this step."""
    overwrite: bool = False
    mirrors: list[Blob] = field(default_factory=list)
    """Blobs that in Caffe are the same memory as the one this in-place layer changes (Reshape's bottom, ...)."""
    shapes: list[tuple[int, ...]] | None = None
    """The bottoms' shapes that the layer was last prepared for."""


@dataclass(eq=False, frozen=True)
class Plan:
    """What a forward does."""

    steps: list[Step]
    stale: list[Blob]
    """Blobs to free before the first step: they get new values, and nobody looks at the old ones."""


def build_plan(graph: Graph, start: int, end: int, *, literal: bool, kept: Collection[int] | None) -> Plan:
    """How to run layers ``start`` to ``end`` (both included).

    Args:
        graph: The net.
        start: Index of the first layer.
        end: Index of the last layer.
        literal: Run every layer by itself (gradients are recorded, or someone watches each layer).
        kept: None to keep every blob, else the blobs to keep.
    """
    nodes = graph.nodes[start : end + 1]
    chains = {} if literal else find_chains(nodes, kept)
    merged = {node.index for chain in chains.values() for node in chain.nodes[1:]}
    steps = []
    for node in nodes:
        if node.index in merged:
            continue
        chain = chains.get(node.index)
        last = chain.nodes[-1] if chain else node
        steps.append(
            Step(
                node=node,
                bottoms=[graph.blobs[index] for index in node.bottoms],
                tops=[graph.blobs[index] for index in last.tops],
                chain=chain,
            )
        )
    _allow_overwriting(graph, steps, kept)
    if kept is None:
        _find_mirrors(graph, steps)
    if kept is not None:
        _release_after_last_use(graph, steps, kept)
    return Plan(steps, _stale(steps))


def _allow_overwriting(graph: Graph, steps: list[Step], kept: Collection[int] | None) -> None:
    """Let a layer reuse its bottom's memory when a layer of this plan made that memory for this blob alone."""
    fresh: set[int] = set()
    last_read = _last_readers(steps)
    for position, step in enumerate(steps):
        node = step.node
        bottom = node.bottoms[0] if node.bottoms else -1
        in_place = step.tops and bottom >= 0 and step.tops[0] is graph.blobs[bottom]
        dies = kept is not None and bottom not in kept and last_read.get(id(graph.blobs[bottom])) == position
        step.overwrite = bool(bottom in fresh and (in_place or dies))
        if not node.layer.returns_views or step.chain is not None:
            fresh.update(_tops(step))
        else:
            fresh.difference_update(_tops(step))
            fresh.difference_update(node.bottoms)


def _find_mirrors(graph: Graph, steps: list[Step]) -> None:
    """Where a layer shares its bottom's memory (Reshape), an in-place layer behind it changes both in Caffe."""
    source: dict[int, int] = {}
    for node in graph.nodes:
        if node.layer.shares_memory and node.bottoms:
            source.update(dict.fromkeys(node.tops, node.bottoms[0]))
    for step in steps:
        changed = _tops(step)
        if len(changed) != 1 or step.node.bottoms[:1] != changed:
            continue
        index = changed[0]
        while (index := source.get(index, -1)) >= 0:
            step.mirrors.append(graph.blobs[index])


def _tops(step: Step) -> list[int]:
    return (step.chain.nodes[-1] if step.chain else step.node).tops


def _last_readers(steps: list[Step]) -> dict[int, int]:
    return {id(blob): position for position, step in enumerate(steps) for blob in step.bottoms}


def _stale(steps: list[Step]) -> list[Blob]:
    """The blobs that are written before they are read; not those of layers that may leave a top as it is."""
    read: set[int] = set()
    stale: dict[int, Blob] = {}
    for step in steps:
        read.update(id(blob) for blob in step.bottoms if id(blob) not in stale)
        if step.chain is not None or step.node.layer.replaces_tops:
            stale.update((id(blob), blob) for blob in step.tops if id(blob) not in read)
    return list(stale.values())


def _release_after_last_use(graph: Graph, steps: list[Step], kept: Collection[int]) -> None:
    keep = {id(graph.blobs[index]) for index in kept}
    last: dict[int, tuple[Step, Blob]] = {}
    for step in steps:
        merged = [graph.blobs[top] for node in (step.chain.nodes if step.chain else ()) for top in node.tops]
        for blob in (*step.bottoms, *merged, *step.tops):
            if id(blob) not in keep:
                last[id(blob)] = (step, blob)
    for step, blob in last.values():
        step.release.append(blob)
