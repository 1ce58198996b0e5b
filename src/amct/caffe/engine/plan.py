"""Fusion at run time: BatchNorm, Scale and Bias are folded into the weights of the layer before them.

Only inference is fused. The net's parameters are not changed, and the folded weights are recomputed when a parameter
changes. The fusion that rewrites model files is in ``amct.caffe.ptq``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch

from amct.caffe.engine.layer import Folded
from amct.numerics.arq import channels_first, from_channels_first

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Protocol

    from amct.caffe.engine.blob import Blob
    from amct.caffe.engine.graph import Graph, Node
    from amct.caffe.engine.layer import Call, Layer

    #: Layer, whether it may overwrite its bottom, call, and the places of bottoms, tops and what is freed.
    Move: TypeAlias = tuple[Layer, bool, Call, list[int], list[int], list[int]]

    class BoundPass(Protocol):
        """A way to run a plan again."""

        def is_current(self) -> bool:
            """Whether it still computes what the steps would."""

        def run(self) -> None:
            """Compute the blobs that are kept; if this fails, all that the pass reads is unchanged."""


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


def bind_plan(plan: Plan) -> BoundPlan | None:
    """The plan as it was just run, if it frees blobs and all its steps can be run again in the same way."""
    steps = [step for step in plan.steps if not step.node.layer.is_filled_by_user]
    if not plan.frees_blobs or any(step.bound is None or step.has_loss for step in steps):
        return None
    bound = BoundPlan(plan)
    return None if any(blob.values.is_exposed for blob in bound.unseen) else bound


class BoundPlan:
    """The calls of all steps; valid until a shape or a parameter changes or a blob between the layers is looked at."""

    __slots__ = ("_loads", "_moves", "_old", "_places", "_shapes", "_states", "_stores", "unseen")

    def __init__(self, plan: Plan) -> None:
        self._places: dict[int, int] = {}
        self._moves: list[Move] = []
        self._loads: list[tuple[int, Blob]] = []
        written: dict[int, Blob] = {}
        freed: set[int] = set()
        parameters: list[Blob] = []
        self._shapes: list[tuple[Blob, tuple[int, ...]]] = []
        for step in plan.steps:
            if step.bound is None:
                continue
            for blob in step.bottoms:
                if id(blob) not in self._places:
                    self._loads.append((self._place(blob), blob))
            bottoms, tops, release = (
                [self._place(blob) for blob in blobs] for blobs in (step.bottoms, step.tops, step.release)
            )
            self._moves.append((step.node.layer, step.overwrite, step.bound.call, bottoms, tops, release))
            written.update((id(blob), blob) for blob in step.tops)
            freed.update(id(blob) for blob in step.release)
            parameters += parameters_of(step)
            self._shapes += [(blob, blob.shape) for blob in step.bottoms]
        self._stores = [(self._places[key], blob) for key, blob in written.items() if key not in freed]
        loaded = {id(blob) for _, blob in self._loads}
        self._old = [blob.values for _, blob in self._stores if id(blob) not in loaded]
        #: Blobs that this pass does not write, though a layer does.
        self.unseen = [blob for key, blob in written.items() if key in freed]
        self._states = [(blob, blob.values, blob.values.epoch) for blob in (*parameters, *self.unseen)]

    @property
    def stored(self) -> list[Blob]:
        """The blobs that a pass writes."""
        return [blob for _, blob in self._stores]

    def _place(self, blob: Blob) -> int:
        return self._places.setdefault(id(blob), len(self._places))

    def is_current(self) -> bool:
        """Whether no parameter and no shape has changed, and no blob between the layers was written or looked at."""
        for blob, values, epoch in self._states:
            if blob.values is not values or values.epoch != epoch:
                return False
        for blob, shape in self._shapes:  # noqa: SIM110  all() with a generator takes three times as long
            if blob.shape != shape:
                return False
        return True

    def run(self) -> None:
        """Compute the blobs that are kept; if this fails, all that the pass reads is unchanged."""
        for values in self._old:
            values.release()
        tensors: list[torch.Tensor] = [None] * len(self._places)  # type: ignore[list-item]  # no reader before a writer
        for place, blob in self._loads:
            tensors[place] = blob.tensor
        for layer, overwrite, call, bottoms, tops, freed in self._moves:
            layer.may_overwrite = overwrite
            if len(tops) == 1:
                tensors[tops[0]] = call([tensors[place] for place in bottoms])[0]
            else:
                for place, value in zip(tops, call([tensors[place] for place in bottoms]), strict=True):
                    tensors[place] = value
            for place in freed:
                tensors[place] = None  # type: ignore[call-overload]
        for place, blob in self._stores:
            blob.set_tensor(tensors[place])
