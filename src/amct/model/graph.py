"""The graph: nodes in execution order, joined by named tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from amct.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


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

    def edges(self) -> Iterator[tuple[Node, str, Node]]:
        """Every (producer, tensor, consumer), in execution order of the producer."""
        for node in self:
            for tensor in node.outputs:
                for consumer in self.consumers(tensor):
                    yield node, tensor, consumer

    def sole_consumer(self, node: Node) -> Node | None:
        """The one node that reads what ``node`` makes; None when several do, none does, or it is a graph output."""
        readers = self.successors(node)
        is_output = any(tensor in self.outputs for tensor in node.outputs)
        return readers[0] if len(readers) == 1 and not is_output else None
