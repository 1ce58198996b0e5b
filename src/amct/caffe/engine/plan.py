"""How a range of layers is run: the steps, which layers are fused, what is overwritten and freed, how to repeat a pass.

In the default mode a value is fused away only if it can never be observed (the following layers work in place on the
same blob), and each blob keeps its content. With ``keep_blobs=False`` layers are also fused across blobs with one
reader, and blobs are freed after their last reader. In both modes the results of the last forward pass are freed before
the next one, unless a NumPy array of them is alive.

Only inference is fused: BatchNorm, Scale and Bias are folded into the weights of the layer before them. The net's
parameters are not changed, and the folded weights are recomputed when a parameter changes. The fusion that rewrites
model files is in ``amct.caffe.ptq``.

Small nets take less time in their kernels than in finding them. So a step keeps the call that its layer prepared
(``Layer.bind``) until a parameter or a shape changes, and a plan that frees its blobs can repeat all calls on a list of
tensors, without blobs in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

from amct.caffe.engine.blob import BYTES_PER_VALUE
from amct.caffe.engine.graph import shared_memory
from amct.caffe.engine.layer import FoldedParameters
from amct.memory import LiveTensors, gibibytes, machine_bytes, number_from_environment
from amct.numerics.fold import ChannelAffine, scaled_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from amct.caffe.engine.blob import Blob, Buffer
    from amct.caffe.engine.graph import LayerNode, NetGraph
    from amct.caffe.engine.layer import Call, Layer

    #: Layer, whether it may overwrite its bottom, call, and the places of bottoms, tops and what is freed.
    Move: TypeAlias = tuple[Layer, bool, Call, list[int], list[int], list[int]]


class Unchanged:
    """Tells whether blobs still have the content and shapes that they had; an array taken of one counts as a change."""

    __slots__ = ("_contents", "_shapes")

    def __init__(self, contents: Sequence[Blob], shapes: Sequence[Blob]) -> None:
        self._contents = [(blob, blob.values, blob.values.epoch) for blob in contents]
        self._shapes = [(blob, blob.shape) for blob in shapes]

    def __bool__(self) -> bool:
        for blob, values, epoch in self._contents:
            if blob.values is not values or values.epoch != epoch:
                return False
        for blob, shape in self._shapes:  # noqa: SIM110  all() with a generator takes three times as long
            if blob.shape != shape:
                return False
        return True


@dataclass(eq=False)
class Step:
    """One step: a layer, or several fused layers."""

    node: LayerNode
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
    has_loss: bool = False
    call: Call | None = None
    """What the layer prepared for these shapes and parameters; None if they may change at any time."""
    unchanged: Unchanged | None = None

    @property
    def parameters(self) -> list[Blob]:
        """The parameters of all layers of the step."""
        return [blob for node in self.nodes for blob in node.layer.blobs]

    @property
    def nodes(self) -> list[LayerNode]:
        """The layers of the step."""
        return [self.node] if self.chain is None else self.chain.nodes

    def run(self) -> None:
        """Compute the tops and free what has no other reader; prepare the call if there is none."""
        layer, call = self.node.layer, self.call
        layer.may_overwrite = self.overwrite
        if call is None:
            call = (self.chain or layer).bind([blob.tensor for blob in self.bottoms])
            self.unchanged = Unchanged(self.parameters, self.bottoms)
            if not any(blob.values.is_exposed for blob in self.parameters):
                self.call = call
        results = call([blob.tensor for blob in self.bottoms])
        if len(results) == 1:
            self.tops[0].set_tensor(results[0])
        else:
            for blob, value in zip(self.tops, results, strict=True):
                blob.set_tensor(value)
        del results
        for blob in self.release:
            blob.values.release()


class PassPlan:
    """The steps of a forward pass, and after the first pass, if nothing but the values changes, a way to repeat it."""

    def __init__(self, steps: list[Step], *, is_whole: bool, frees_blobs: bool) -> None:
        self.steps = steps
        self.is_whole = is_whole
        """Whether it runs all layers of the net."""
        self.stale = _stale(steps)
        """Blobs to free before the first step, because they are written before they are read."""
        self.repeat: Callable[[], None] | None = None
        """Computes the blobs that are kept; if it fails, all that the pass reads is unchanged."""
        self.unchanged: Unchanged | None = None
        """Whether ``repeat`` still computes what the steps would."""
        self._frees_blobs = frees_blobs

    def bind(self) -> bool:
        """Set ``repeat`` for the pass that was just run; returns False if its steps have to be run one by one.

        It is possible if blobs between the layers are freed, so that nobody sees them. It is valid until a shape or a
        parameter changes or such a blob is looked at.
        """
        self.repeat = None
        steps = [step for step in self.steps if not step.node.layer.is_filled_by_user]
        if not self._frees_blobs or any(step.call is None or step.has_loss for step in steps):
            return False
        unseen = self._blobs(freed=True)
        if any(blob.values.is_exposed for blob in unseen):
            return False
        parameters = [blob for step in steps for blob in step.parameters]
        self.unchanged = Unchanged([*parameters, *unseen], [blob for step in steps for blob in step.bottoms])
        self.repeat = self._calls(steps)
        return True

    def results(self) -> list[Blob]:
        """The blobs that ``repeat`` writes."""
        return self._blobs(freed=False)

    def _blobs(self, *, freed: bool) -> list[Blob]:
        released = {id(blob) for step in self.steps for blob in step.release}
        written = {id(blob): blob for step in self.steps if step.call is not None for blob in step.tops}
        return [blob for key, blob in written.items() if (key in released) == freed]

    def _calls(self, steps: list[Step]) -> Callable[[], None]:
        """The calls of all steps on a list of tensors, in which each blob has a place."""
        places: dict[int, int] = {}
        loads: list[tuple[int, Blob]] = []
        moves: list[Move] = []

        def place(blob: Blob) -> int:
            return places.setdefault(id(blob), len(places))

        for step in steps:
            loads += [(place(blob), blob) for blob in step.bottoms if id(blob) not in places]
            bottoms, tops, freed = (
                [place(blob) for blob in blobs] for blobs in (step.bottoms, step.tops, step.release)
            )
            assert step.call is not None, "bind has looked"
            moves.append((step.node.layer, step.overwrite, step.call, bottoms, tops, freed))
        loaded = {id(blob) for _, blob in loads}
        stores = [(places[id(blob)], blob) for blob in self.results()]
        old = [blob.values for _, blob in stores if id(blob) not in loaded]
        return lambda: _repeat(len(places), loads, moves, stores, old)


def _repeat(
    size: int, loads: list[tuple[int, Blob]], moves: list[Move], stores: list[tuple[int, Blob]], old: list[Buffer]
) -> None:
    for values in old:
        values.release()
    tensors: list[torch.Tensor] = [None] * size  # type: ignore[list-item]  # no reader before a writer
    for place, blob in loads:
        tensors[place] = blob.tensor
    for layer, overwrite, call, bottoms, tops, freed in moves:
        layer.may_overwrite = overwrite
        if len(tops) == 1:
            tensors[tops[0]] = call([tensors[place] for place in bottoms])[0]
        else:
            for place, value in zip(tops, call([tensors[place] for place in bottoms]), strict=True):
                tensors[place] = value
        for place in freed:
            tensors[place] = None  # type: ignore[call-overload]
    for place, blob in stores:
        blob.set_tensor(tensors[place])


def build_plan(graph: NetGraph, start: int, end: int, *, literal: bool, kept: Collection[int] | None) -> PassPlan:
    """Plan the run of layers ``start`` to ``end`` (both included).

    Args:
        graph: The net.
        start: Index of the first layer.
        end: Index of the last layer.
        literal: Run each layer separately (gradients are recorded, or callbacks are set).
        kept: None to keep every blob, else the blobs to keep.
    """
    nodes = graph.nodes[start : end + 1]
    chains = {} if literal else fusible_chains(nodes, kept)
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
    return PassPlan(steps, is_whole=len(nodes) == len(graph.nodes), frees_blobs=kept is not None)


def _allow_overwriting(graph: NetGraph, steps: list[Step], kept: Collection[int] | None) -> None:
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


def _find_mirrors(graph: NetGraph, steps: list[Step]) -> None:
    """A layer in place changes all blobs that in Caffe lie in the same memory (Reshape's bottom), as it does there."""
    groups = shared_memory(graph)
    writer = {top: node.index for node in reversed(graph.nodes) for top in node.tops}
    for step in steps:
        changed = _tops(step)
        if len(changed) != 1 or step.node.bottoms[:1] != changed:
            continue
        others = sorted(groups[changed[0]] - {changed[0]})
        step.mirrors = [graph.blobs[index] for index in others if writer.get(index, -1) < step.node.index]


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


def _release_after_last_use(graph: NetGraph, steps: list[Step], kept: Collection[int]) -> None:
    keep = {id(graph.blobs[index]) for index in kept}
    last: dict[int, tuple[Step, Blob]] = {}
    for step in steps:
        merged = [graph.blobs[top] for node in (step.chain.nodes if step.chain else ()) for top in node.tops]
        for blob in (*step.bottoms, *merged, *step.tops):
            if id(blob) not in keep:
                last[id(blob)] = (step, blob)
    for step, blob in last.values():
        step.release.append(blob)


@dataclass(eq=False)
class FusedChain:
    """A layer with weights, the per-channel layers folded into them, and an optional activation."""

    nodes: list[LayerNode]
    """All layers of the chain, in order."""
    activation: LayerNode | None = None
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
    def affine(self) -> list[LayerNode]:
        """The per-channel layers."""
        return [node for node in self.nodes[1:] if node is not self.activation]

    def _folded(self) -> FoldedParameters:
        head = self.nodes[0].layer
        if not self.affine:
            return FoldedParameters(head, lambda: [blob.tensor for blob in head.blobs], head.blobs)
        return FoldedParameters(head, self._fold, [blob for node in self.nodes for blob in node.layer.blobs])

    def _fold(self) -> list[torch.Tensor]:
        head = self.nodes[0].layer
        kind, groups = head.fold_kind, head.fold_groups()
        assert kind is not None, "fusible_chains only takes such layers as heads"
        weight, *bias = (blob.tensor for blob in head.blobs)
        parts = [affine for node in self.affine if (affine := node.layer.channel_affine()) is not None]
        return [*scaled_outputs(weight, bias[0] if bias else None, kind, groups, reduce(ChannelAffine.then, parts))]


def fusible_chains(nodes: list[LayerNode], kept: Collection[int] | None) -> dict[int, FusedChain]:
    """The chains, by the index of their first layer."""
    readers: dict[int, list[LayerNode]] = {}
    for node in nodes:
        for bottom in node.bottoms:
            readers.setdefault(bottom, []).append(node)
    chains = {}
    for node in nodes:
        if node.layer.fold_kind is None or node.needs_backward or not len(node.tops) == len(node.bottoms) == 1:
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


def _next(node: LayerNode, readers: dict[int, list[LayerNode]], kept: Collection[int] | None) -> LayerNode | None:
    """The only reader of this layer's result, if fusing it cannot be observed."""
    top = node.tops[0]
    after = [reader for reader in readers.get(top, []) if reader.index > node.index]
    if not after or len(after[0].bottoms) != 1 or len(after[0].tops) != 1:
        return None
    is_unseen = kept is not None and top not in kept and len(after) == 1
    return after[0] if after[0].tops == [top] or is_unseen else None


#: Environment variable that raises the limit of all blobs of a net together, in bytes.
NET_LIMIT_VARIABLE = "AMCT_CAFFE_MAX_NET_BYTES"


#: Environment variable that raises the limit of the operations of a forward pass over a net.
WORK_LIMIT_VARIABLE = "AMCT_CAFFE_MAX_NET_OPERATIONS"
DEFAULT_WORK = 2 * 10**12
"""ResNet-50 on 480 pictures, VGG-16 on 128: less than a minute on one core."""


class NetMemory:
    """Counts what a forward pass takes before it takes it: memory at the same time, and operations. Each step must fit.

    The limit of memory is half of the machine's: gradients and copies inside of layers need as much again.
    """

    def __init__(self, plan: PassPlan) -> None:
        self._steps = iter(plan.steps)
        self._last: Step | None = None
        self._tensors: LiveTensors | None = None
        self._operations = 0

    @property
    def is_counting(self) -> bool:
        """Whether a step of this pass was counted: then all later ones must be, too."""
        return self._tensors is not None

    def count_until(self, step: Step) -> None:
        """Count the steps up to and including one; their shapes are known.

        Raises:
            ModelError: There are too many blobs, or operations.
        """
        if self._tensors is None:
            self._tensors = LiveTensors(number_from_environment(NET_LIMIT_VARIABLE, machine_bytes() // 2))
        while self._last is not step:
            if self._last is not None:
                self._tensors.free(map(id, self._last.release))
            self._last = next(self._steps)
            _add_step(self._tensors, self._last)
            self._count_operations(self._last)

    def _count_operations(self, step: Step) -> None:
        layer = step.node.layer
        self._operations += layer.operations([b.shape for b in step.bottoms], [b.shape for b in step.tops])
        if self._operations > DEFAULT_WORK:
            limit = number_from_environment(WORK_LIMIT_VARIABLE, DEFAULT_WORK, "operations")
            if self._operations > limit:
                raise layer.error(
                    f"with this layer a pass over the net takes {self._operations:.2g} operations; the limit is "
                    f"{limit:.2g}. Use a smaller batch; or, if this is intended, set {WORK_LIMIT_VARIABLE} to a "
                    "larger number"
                )


def _add_step(tensors: LiveTensors, step: Step) -> None:
    """Add the parameters and the tops of a step."""
    layer = step.node.layer
    for node in (step.node,) if step.chain is None else step.chain.nodes:
        # Shared parameters have one memory, which is counted once.
        tensors.make({id(blob.values): _bytes(blob) for blob in node.layer.blobs})
    is_view = step.chain is None and layer.shares_memory and bool(step.bottoms)
    tensors.make({id(blob): _bytes(blob) for blob in step.tops}, view_of=id(step.bottoms[0]) if is_view else None)
    if tensors.is_too_much:
        raise layer.error(
            f"with this layer the net holds {gibibytes(tensors.bytes)} of parameters and blobs at the same time; the "
            f"limit is {gibibytes(tensors.limit)}. Use a smaller batch; or, if this size is intended, set "
            f"{NET_LIMIT_VARIABLE} to a larger number of bytes"
        )


def check_net_memory(graph: NetGraph, kept: Collection[int] | None) -> None:
    """Check a forward pass over the whole net before anything is allocated.

    Args:
        graph: The net.
        kept: None if every blob is kept, else the blobs that are not freed after their last reader.

    Raises:
        ModelError: The net needs too much memory; the message names the layer at which the limit is reached.
    """
    plan = build_plan(graph, 0, len(graph.nodes) - 1, literal=True, kept=kept)
    if plan.steps:
        NetMemory(plan).count_until(plan.steps[-1])


def _bytes(blob: Blob) -> int:
    return math.prod(blob.shape) * BYTES_PER_VALUE
