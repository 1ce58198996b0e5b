"""The graph of a network: nodes in execution order, joined by named tensors; and which may be folded into others.

Conv → BatchNorm, and Caffe's Conv → BatchNorm → Scale → Bias. Fusions are found here; the front door folds the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from amct.errors import AmctError, ModelError, did_you_mean
from amct.model.kinds import Skip

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class Node:
    """One layer or operation.

    ``op`` is the layer's type where it is a layer ("Conv2d", "BatchNorm2d", Caffe's "Convolution") and the operation's
    name elsewhere ("relu", "add"). ``inputs`` and ``outputs`` name the activations; parameters are not among them.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attributes: Mapping[str, object] = field(default_factory=dict)


N = TypeVar("N")


class TensorIndex(Generic[N]):
    """Which node makes each tensor and which nodes read it; nodes are compared by identity. Base of every graph."""

    def __init__(self) -> None:
        self.producers: dict[str, N] = {}
        self._consumers: dict[str, list[N]] = {}

    def add(self, node: N, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """Add a node with the tensors it reads and makes."""
        for tensor in dict.fromkeys(inputs):
            self._consumers.setdefault(tensor, []).append(node)
        for tensor in outputs:
            self.producers[tensor] = node

    def producer(self, tensor: str) -> N | None:
        """The node that makes ``tensor``; None for graph inputs and stored values."""
        return self.producers.get(tensor)

    def consumers(self, tensor: str) -> tuple[N, ...]:
        """The nodes that read ``tensor``, in the order in which they were added, each once."""
        return tuple(self._consumers.get(tensor, ()))

    def connect(self, tensor: str, node: N) -> None:
        """Let a node read a tensor."""
        readers = self._consumers.setdefault(tensor, [])
        if not any(reader is node for reader in readers):
            readers.append(node)

    def disconnect(self, tensor: str, node: N) -> None:
        """Let a node no longer read a tensor."""
        self._consumers[tensor] = [reader for reader in self._consumers.get(tensor, ()) if reader is not node]


class Graph(TensorIndex[Node]):
    """Nodes in execution order; never changes once built."""

    def __init__(self, nodes: Iterable[Node], *, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> None:
        super().__init__()
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._nodes: dict[str, Node] = {}
        known = set(self.inputs)
        for node in nodes:
            self._add(node, known)
        for tensor in self.outputs:
            if tensor not in known:
                raise ModelError(f'graph output "{tensor}" is made by no node')

    def _add(self, node: Node, known: set[str]) -> None:
        if node.name in self._nodes:
            raise ModelError(f'two nodes are named "{node.name}"; node names must be unique')
        for tensor in dict.fromkeys(node.inputs):
            if tensor not in known:
                raise ModelError(f'node "{node.name}" reads "{tensor}", which nothing before it makes')
        for tensor in node.outputs:
            if tensor in known:
                raise ModelError(f'node "{node.name}" makes "{tensor}", which exists already')
            known.add(tensor)
        self.add(node, node.inputs, node.outputs)
        self._nodes[node.name] = node

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def __getitem__(self, name: str) -> Node:
        if name not in self._nodes:
            raise ModelError(f'no node is named "{name}".{did_you_mean(name, self._nodes)}')
        return self._nodes[name]

    def predecessors(self, node: Node) -> tuple[Node, ...]:
        """The nodes whose outputs ``node`` reads, in the order of its inputs, each once."""
        found = (self.producer(tensor) for tensor in node.inputs)
        return tuple({producer.name: producer for producer in found if producer is not None}.values())

    def successors(self, node: Node) -> tuple[Node, ...]:
        """The nodes that read any output of ``node``, each once."""
        found = (consumer for tensor in node.outputs for consumer in self.consumers(tensor))
        return tuple({consumer.name: consumer for consumer in found}.values())

    def sole_consumer(self, node: Node) -> Node | None:
        """The one node that reads what ``node`` makes; None when several do, none does, or it is a graph output."""
        readers = self.successors(node)
        is_output = any(tensor in self.outputs for tensor in node.outputs)
        return readers[0] if len(readers) == 1 and not is_output else None


logger = logging.getLogger(__name__)

_Model = TypeVar("_Model")

Refusal = Callable[[Node, Node], str | None]
"""Called with (head, candidate): None allows the fold, a text is the reason against it."""


@dataclass(frozen=True, kw_only=True)
class FusionPattern:
    """What may be folded into a head: at most one node of each stage, in the order of the stages; each is optional."""

    heads: frozenset[str]
    stages: tuple[frozenset[str], ...]

    @property
    def foldable(self) -> frozenset[str]:
        """The ops of all stages."""
        return frozenset().union(*self.stages)


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """``folded`` nodes disappear into ``head``, in this order (for a leading fusion they come before it)."""

    head: Node
    folded: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Folded(Generic[_Model]):
    """A copy of a model with folded batch norms.

    Attributes:
        model: The copy.
        fusions: By layer: the batch norm folded into it.
        skips: The batch norms that were not folded, with the reason.
    """

    model: _Model
    fusions: Mapping[str, str]
    skips: tuple[Skip, ...]

    @classmethod
    def unchanged(cls, model: _Model, norms: Iterable[str], reason: str) -> Folded[_Model]:
        """A model in which nothing is folded."""
        return cls(model=model, fusions={}, skips=tuple(Skip(name, f"not folded: {reason}") for name in norms))


def fold_batch_norms(
    graph: Graph,
    pattern: FusionPattern,
    fold: Callable[[Node, Node], None],
    *,
    skip: Collection[str] = (),
    refuse: Refusal | None = None,
) -> tuple[dict[str, str], tuple[Skip, ...]]:
    """Find every batch norm that can be folded, and call ``fold(layer, norm)`` for it.

    A pair for which ``fold`` raises an ``AmctError`` stays as it is.

    Returns:
        By layer the batch norm folded into it, and every batch norm that stays, with the reason.
    """
    found, skips = find_fusions(graph, pattern, skip=skip, refuse=refuse)
    fusions: dict[str, str] = {}
    refused: list[Skip] = []
    for fusion in found:
        head, norm = fusion.head, fusion.folded[0]
        try:
            fold(head, norm)
        except AmctError as error:
            refused.append(Skip(norm.name, f'not folded into "{head.name}": {error}'))
            logger.warning("%s", refused[-1])
        else:
            fusions[head.name] = norm.name
    return fusions, (*skips, *refused)


def find_fusions(
    graph: Graph,
    pattern: FusionPattern,
    *,
    skip: Collection[str] = (),
    refuse: Refusal | None = None,
) -> tuple[tuple[Fusion, ...], tuple[Skip, ...]]:
    """Find every head with foldable nodes after it, and report every foldable node that stays, with the reason.

    A node is folded when it is the only consumer of the node before it. ``skip`` names heads (or foldable nodes) that
    the user excluded.
    """
    fusions: list[Fusion] = []
    taken: set[str] = set()
    skips: dict[str, Skip] = {}
    for head in graph:
        if head.op not in pattern.heads:
            continue
        folded, refused = _foldable(head, pattern.stages, graph.sole_consumer, skip, refuse)
        if refused:
            skips[refused.layer] = refused
        if folded:
            fusions.append(Fusion(head=head, folded=tuple(folded)))
            taken.update(node.name for node in folded)
    for node in graph:
        if node.op in pattern.foldable and node.name not in taken and node.name not in skips:
            skips[node.name] = Skip(node.name, _why_alone(graph, node, pattern, taken))
    return tuple(fusions), tuple(skips.values())


def _foldable(
    head: Node,
    stages: Iterable[frozenset[str]],
    next_to: Callable[[Node], Node | None],
    skip: Collection[str],
    refuse: Refusal | None,
) -> tuple[list[Node], Skip | None]:
    """The nodes next to a head that can be folded into it, from the head on, and the one that is refused."""
    folded: list[Node] = []
    for stage in stages:
        candidate = next_to(folded[-1] if folded else head)
        if candidate is None or candidate.op not in stage:
            continue
        reason = _reason_against(head, candidate, skip, refuse)
        if reason:
            return folded, Skip(candidate.name, f'not folded into "{head.name}": {reason}')
        folded.append(candidate)
    return folded, None


def _reason_against(head: Node, candidate: Node, skip: Collection[str], refuse: Refusal | None) -> str | None:
    for node in (head, candidate):
        if node.name in skip:
            return f'"{node.name}" is listed in skip_fusion_layers'
    return refuse(head, candidate) if refuse else None


def _why_alone(graph: Graph, node: Node, pattern: FusionPattern, taken: set[str]) -> str:
    before = graph.predecessors(node)
    if not before:
        return "not folded: it reads an input of the model, not a layer that could take it"
    producer = before[0]
    if producer.op not in pattern.heads and producer.name not in taken:
        return f'not folded: it follows "{producer.name}" ({producer.op}), which cannot take it'
    others = [other.name for other in graph.successors(producer) if other.name != node.name]
    if others:
        return f'not folded into "{producer.name}": "{others[0]}" reads the same tensor'
    if any(tensor in graph.outputs for tensor in producer.outputs):
        return f'not folded into "{producer.name}": the model also returns what "{producer.name}" makes'
    return f'not folded into "{producer.name}": out of the order in which layers are folded'


def find_leading_fusions(
    graph: Graph,
    pattern: FusionPattern,
    *,
    skip: Collection[str] = (),
    refuse: Refusal | None = None,
) -> tuple[tuple[Fusion, ...], tuple[Skip, ...]]:
    """Find heads with foldable nodes *before* them (Caffe's BatchNorm → Scale → Conv), read only by the next in line.

    The stages must appear in their order directly before the head; ``Fusion.folded`` is in execution order. Only folds
    that ``refuse`` or ``skip`` prevent are reported; foldable nodes without a head behind them are not.
    """

    def before(node: Node) -> Node | None:
        found = graph.predecessors(node)
        return found[0] if len(found) == 1 and graph.sole_consumer(found[0]) is node else None

    fusions: list[Fusion] = []
    skips: list[Skip] = []
    for head in [node for node in graph if node.op in pattern.heads]:
        folded, refused = _foldable(head, pattern.stages[::-1], before, skip, refuse)
        skips += [refused] if refused else []
        if folded:
            fusions.append(Fusion(head=head, folded=tuple(folded[::-1])))
    return tuple(fusions), tuple(skips)
