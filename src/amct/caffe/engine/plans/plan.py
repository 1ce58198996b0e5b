"""How a range of layers is run: the steps, which layers are fused, what may be overwritten, what is freed.

In the default mode a value is fused away only if it can never be observed (the following layers work in place on the
same blob), and each blob keeps its content. With ``keep_blobs=False`` layers are also fused across blobs with one
reader, and blobs are freed after their last reader. In both modes the results of the last forward pass are freed before
the next one, unless a NumPy array of them is alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amct.caffe.engine.plans.fusion import FusedChain, find_chains

if TYPE_CHECKING:
    from collections.abc import Collection

    from amct.caffe.engine.blob import Blob
    from amct.caffe.engine.build.graph import Graph, Node
    from amct.caffe.engine.plans.bound_plan import BoundPass


@dataclass(eq=False)
class Step:
    """One step: a layer, or several fused layers."""

    node: Node
    """The layer that is run (of a chain: its first)."""
    bottoms: list[Blob]
    tops: list[Blob]
    chain: FusedChain | None = None
    release: list[Blob] = field(default_factory=list)
    """Blobs without a reader after this step."""
    overwrite: bool = False
    mirrors: list[Blob] = field(default_factory=list)
    """Blobs that in Caffe share memory with the one this in-place layer changes (such as Reshape's bottom)."""
    shapes: list[tuple[int, ...]] | None = None
    """The bottoms' shapes at the last reshape of the layer."""
    bound: BoundStep | None = None
    """The step as it was last run, if it can be run again in the same way."""
    has_loss: bool = False


class BoundStep:
    """A step of which nothing changes from one forward pass to the next: only its call is left to do.

    Small nets take less time in their kernels than in finding them. So a layer chooses its kernel and prepares its
    parameters once (``Layer.bind``), and the call is used until a bottom's shape or a parameter changes (a plan is for
    one device). Parameters of which a NumPy array is alive may change at any time: such steps are not kept.
    """

    __slots__ = ("_bottoms", "_layer", "_overwrite", "_parameters", "_release", "_tops", "call")

    def __init__(self, step: Step) -> None:
        self._layer, self._overwrite = step.node.layer, step.overwrite
        self._bottoms, self._tops = [(blob, blob.shape) for blob in step.bottoms], step.tops
        self._release = [blob.values for blob in step.release]
        maker = self._layer if step.chain is None else step.chain
        self._layer.may_overwrite = step.overwrite
        self.call = maker.bind([blob.tensor for blob in step.bottoms])
        # An array that is taken later counts as a change.
        self._parameters = [(blob, blob.values, blob.values.epoch) for blob in parameters_of(step)]

    def is_current(self) -> bool:
        """Whether no parameter and no shape has changed."""
        for blob, values, epoch in self._parameters:
            if blob.values is not values or values.epoch != epoch:
                return False
        for blob, shape in self._bottoms:  # noqa: SIM110  all() with a generator takes three times as long
            if blob.shape != shape:
                return False
        return True

    def run(self) -> None:
        """Compute the tops and free what has no other reader."""
        self._layer.may_overwrite = self._overwrite
        results = self.call([blob.tensor for blob, _ in self._bottoms])
        if len(results) == 1:
            self._tops[0].set_tensor(results[0])
        else:
            for blob, value in zip(self._tops, results, strict=True):
                blob.set_tensor(value)
        del results
        for values in self._release:
            values.release()


def parameters_of(step: Step) -> list[Blob]:
    """The parameters of all layers of a step."""
    nodes = [step.node] if step.chain is None else step.chain.nodes
    return [blob for node in nodes for blob in node.layer.blobs]


@dataclass(eq=False)
class Plan:
    """The steps of a forward pass."""

    steps: list[Step]
    stale: list[Blob]
    """Blobs to free before the first step, because they are written before they are read."""
    frees_blobs: bool
    """Whether blobs are freed after their last reader."""
    bound: BoundPass | None = None
    """The pass as it was last run, if it can be run again in the same way."""


def build_plan(graph: Graph, start: int, end: int, *, literal: bool, kept: Collection[int] | None) -> Plan:
    """Plan the run of layers ``start`` to ``end`` (both included).

    Args:
        graph: The net.
        start: Index of the first layer.
        end: Index of the last layer.
        literal: Run each layer separately (gradients are recorded, or callbacks are set).
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
                has_loss=any(node.layer.loss_weights),
            )
        )
    _allow_overwriting(graph, steps, kept)
    if kept is None:
        _find_mirrors(graph, steps)
    else:
        _release_after_last_use(graph, steps, kept)
    return Plan(steps, _stale(steps), frees_blobs=kept is not None)


def _allow_overwriting(graph: Graph, steps: list[Step], kept: Collection[int] | None) -> None:
    """Let a layer reuse its bottom's memory if a layer of this plan allocated it for this blob alone."""
    fresh: set[int] = set()
    last_read = {id(blob): position for position, step in enumerate(steps) for blob in step.bottoms}
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
    """Where a layer shares its bottom's memory (Reshape), a later in-place layer changes both blobs, as in Caffe."""
    source: dict[int, int] = {}
    for node in graph.nodes:
        if node.layer.shares_memory and node.bottoms and node.bottoms[0] not in node.tops:  # not in place
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


def _stale(steps: list[Step]) -> list[Blob]:
    """The blobs that are written before they are read, except tops that their layer may leave unchanged."""
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
