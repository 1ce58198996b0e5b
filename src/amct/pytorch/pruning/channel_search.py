"""AMCT's search for channels to prune: it writes a simple config for ``create_prune_retrain_model``.

Each channel has a sensitivity (by how much the loss changes without it, in first order) and a gain, the bit operations
that it costs. The greedy search removes the channels of the least sensitivity for their gain, from one chain at a time,
until the bit operations of the model are few enough. Both parts can be classes of the user's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct.errors import EvaluatorError, ModelArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Records = Sequence[Any]
    """AMCT's PruneRecord messages: each a chain, with ``producer`` and ``consumer`` nodes and their attributes."""
    GraphInfo = dict[str, dict[str, float]]
    """For each layer: ``cin``, ``cout``, ``ori_cout``, ``bitops``."""

SENSITIVITY, BITOPS = "sensitivity", "bitops"
"""Attributes of the first producer of a chain: of each channel what is lost without it, and what one channel costs."""
WEIGHTED_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""The types of nodes with weights."""
CHANNELS_AT_ONCE = 16


def attribute(node: Any, name: str, default: Any = None) -> Any:  # noqa: ANN401  protobuf's own classes
    """The value of an attribute of a node of a record."""
    for each in node.attr:
        if each.name == name:
            values = {1: each.f, 2: each.i, 3: each.s.decode(), 4: list(each.floats), 5: list(each.ints)}
            return values.get(each.type, default)
    return default


def set_attribute(node: Any, name: str, values: float | Sequence[float]) -> None:  # noqa: ANN401  as above
    """Set an attribute of a node to a number or several."""
    found = next((each for each in node.attr if each.name == name), None) or node.attr.add(name=name)
    if isinstance(values, (int, float)):
        found.type, found.f = 1, float(values)
    else:
        found.type = 4
        del found.floats[:]
        found.floats.extend(float(each) for each in values)


@dataclass(frozen=True, eq=False)
class SearchedGraph:
    """The network as a sensitivity gets it: ``model`` is a copy of the user's, in eval mode."""

    model: nn.Module


class ChannelSensitivity(ABC):
    """Says how much is lost without each channel."""

    @abstractmethod
    def setup_initialization(
        self,
        graph_tuple: tuple[Any, GraphInfo],
        input_data: list[Any],
        test_iteration: int,
        output_nodes: object = None,
    ) -> None:
        """Prepare for one search.

        Args:
            graph_tuple: The graph, whose ``model`` is the module, and the numbers of each layer.
            input_data: ``[data, label]`` as the user gave it.
            test_iteration: How many samples are used.
            output_nodes: None.
        """

    @abstractmethod
    def get_sensitivity(self, search_records: Records) -> None:
        """Write the sensitivity of each channel of a chain into the attribute of its first producer."""


class SearchChannelBase(ABC):
    """Chooses the channels that stay."""

    @abstractmethod
    def channel_prune_search(
        self, graph_info: GraphInfo, search_records: Records, prune_config: tuple[float, bool, float]
    ) -> dict[str, list[int]]:
        """Choose channels.

        Args:
            graph_info: The numbers of each layer.
            search_records: The chains, with the sensitivity of each channel.
            prune_config: How many times fewer bit operations are wanted, whether 16 channels go at once, and the
                largest share that a chain may lose.

        Returns:
            For each producer of a chain: 1 for each channel that stays, 0 for those that go.
        """


class TaylorLossSensitivity(ChannelSensitivity):
    """The first term of the Taylor series of a loss: the sum of ``|weight · gradient|`` over the weights of a channel.

    Gradients are those of single samples; their terms are added up. The loss is L1 unless ``set_loss_func`` gets
    another one.
    """

    def __init__(self) -> None:
        self.loss_func: Callable[[Tensor, Tensor], Tensor] = nn.L1Loss()
        self._terms: dict[str, Tensor] = {}
        self._model: nn.Module = nn.Identity()

    def set_loss_func(self, loss_func: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Use another loss of prediction and label."""
        self.loss_func = loss_func

    def setup_initialization(
        self,
        graph_tuple: tuple[Any, GraphInfo],
        input_data: list[Any],
        test_iteration: int,
        output_nodes: object = None,
    ) -> None:
        """Run single samples forward and backward.

        Raises:
            ModelArgumentError: There are fewer samples than ``test_iteration``.
            EvaluatorError: The loss fails, or is no finite number.
        """
        del output_nodes
        graph, graph_info = graph_tuple
        data, label = input_data
        if len(data) < test_iteration or len(label) < test_iteration:
            raise ModelArgumentError(
                f"input_data: test_iteration is {test_iteration}, but there are {min(len(data), len(label))} samples"
            )
        self._model = graph.model
        found = {name: self._model.get_submodule(name).weight for name in graph_info}
        weights = {name: weight for name, weight in found.items() if isinstance(weight, Tensor)}
        for weight in weights.values():
            weight.requires_grad_()
        self._terms = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for number in range(test_iteration):
            some = slice(number, number + 1)
            gradients = self._gradients(data[some], label[some], list(weights.values()))
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                if gradient is not None:
                    self._terms[name] += (weight.detach() * gradient).abs()

    def _gradients(self, data: Tensor, label: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        with torch.enable_grad():
            output = self._model(data.to(weights[0].device))
            try:
                loss = self.loss_func(output, label.to(weights[0].device))
            except Exception as error:
                raise EvaluatorError(
                    f"input_data: the loss fails on the output and the label: {type(error).__name__}: {error}. Give "
                    "labels of the shape of the output, or a TaylorLossSensitivity whose set_loss_func got your loss"
                ) from error
            if not torch.isfinite(loss).all():
                raise EvaluatorError(f"input_data: the loss is {loss.item():g}; look for broken data")
            return torch.autograd.grad(loss, weights, allow_unused=True)

    def get_sensitivity(self, search_records: Records) -> None:
        """Add the terms of all layers that make or read a channel."""
        for record in search_records:
            first = record.producer[0]
            total = torch.zeros(attribute(first, "end") - attribute(first, "begin"), dtype=torch.float64)
            for node, axis in [*((each, 0) for each in record.producer), *((each, 1) for each in record.consumer)]:
                if node.name in self._terms and attribute(node, "type") in WEIGHTED_TYPES:
                    total += self._of_channels(node, axis)
            set_attribute(first, SENSITIVITY, total.tolist())

    def _of_channels(self, node: Any, axis: int) -> Tensor:  # noqa: ANN401  protobuf's own classes
        """The terms of the channels of a node, along the axis of outputs (0) or inputs (1)."""
        terms, module = self._terms[node.name].to("cpu", torch.float64), self._model.get_submodule(node.name)
        groups, begin, end = int(getattr(module, "groups", 1)), attribute(node, "begin"), attribute(node, "end")
        if isinstance(module, nn.ConvTranspose2d):
            terms = terms.transpose(0, 1)
        if axis == 0 or groups == 1:
            return terms.transpose(0, axis).flatten(1).sum(1)[begin:end]
        parts = terms.reshape(groups, -1, *terms.shape[1:]).transpose(1, 2)  # group, inputs of a group, its filters
        return parts.flatten(2).sum(2).flatten()[begin:end]


class GreedySearch(SearchChannelBase):
    """Removes channels from the chain that loses least for what it saves, until few enough operations are left."""

    def channel_prune_search(
        self, graph_info: GraphInfo, search_records: Records, prune_config: tuple[float, bool, float]
    ) -> dict[str, list[int]]:
        """Choose channels; what is left is counted after each step."""
        wanted, ascend_optimized, largest = prune_config
        chains = [
            _ShrinkingChain(record, largest, CHANNELS_AT_ONCE if ascend_optimized else 1) for record in search_records
        ]
        whole = total_bitops(graph_info)
        while total_bitops(graph_info) * wanted > whole:
            found = [
                (chain.loss() / chain.gain(graph_info), number) for number, chain in enumerate(chains) if chain.step
            ]
            if not found:
                break
            chains[min(found)[1]].remove(graph_info)
        return {
            node.name: chain.kept(node, int(graph_info[node.name]["ori_cout"]))
            for chain in chains
            for node in chain.record.producer
        }


class _ShrinkingChain:
    """The channels of a chain that are left, from the least sensitive one."""

    def __init__(self, record: Any, largest: float, at_once: int) -> None:  # noqa: ANN401  protobuf's own classes
        first = record.producer[0]
        self.record, self._at_once = record, at_once
        self._sensitivity = list(attribute(first, SENSITIVITY, []))
        self._groups = max(int(attribute(node, "prune_group", 1)) for node in (*record.producer, *record.consumer))
        each = len(self._sensitivity) // self._groups
        parts = [range(group * each, (group + 1) * each) for group in range(self._groups)]
        ranked = [sorted(part, key=self._sensitivity.__getitem__) for part in parts]
        self._order = [channel for row in zip(*ranked, strict=True) for channel in row]  # of each group the next one
        self._least = len(self._sensitivity) * (1 - largest)
        self.removed = 0

    @property
    def step(self) -> int:
        """How many channels go next; 0 if none may."""
        left = len(self._order) - self.removed
        step = left % self._at_once or self._at_once
        step = -(-step // self._groups) * self._groups
        return step if left - step > 0 and left - step >= self._least else 0

    def _next(self) -> list[int]:
        return self._order[self.removed : self.removed + self.step]

    def loss(self) -> float:
        """The sensitivity of the channels that go next."""
        return float(sum(self._sensitivity[channel] for channel in self._next()))

    def gain(self, graph_info: GraphInfo) -> float:
        """What one channel costs."""
        return max(channel_bitops(self.record, graph_info), 1e-30)

    def remove(self, graph_info: GraphInfo) -> None:
        """Remove the next channels, from the numbers of all layers too."""
        step = self.step
        self.removed += step
        for node in self.record.producer:
            _shrink(graph_info, node.name, "cout", step)
        for node in self.record.consumer:
            _shrink(graph_info, node.name, "cin", step)

    def kept(self, node: Any, count: int) -> list[int]:  # noqa: ANN401  protobuf's own classes
        """1 for each channel of a producer that stays."""
        gone = {attribute(node, "begin") + channel for channel in self._order[: self.removed]}
        return [0 if channel in gone else 1 for channel in range(count)]


def _shrink(graph_info: GraphInfo, name: str, side: str, count: int) -> None:
    layer = graph_info.get(name)
    if layer is not None:
        layer[BITOPS] *= (layer[side] - count) / layer[side]
        layer[side] -= count


def total_bitops(graph_info: Mapping[str, Mapping[str, float]]) -> float:
    """The bit operations of all layers."""
    return sum(layer[BITOPS] for layer in graph_info.values())


def channel_bitops(record: Any, graph_info: Mapping[str, Mapping[str, float]]) -> float:  # noqa: ANN401  protobuf's own
    """The bit operations that go with one channel of a chain."""
    made = [(node.name, "cout") for node in record.producer]
    read = [(node.name, "cin") for node in record.consumer]
    return sum(graph_info[name][BITOPS] / graph_info[name][side] for name, side in made + read if name in graph_info)


SENSITIVITIES: dict[str, type[ChannelSensitivity]] = {"TaylorLossSensitivity": TaylorLossSensitivity}
SEARCHES: dict[str, type[SearchChannelBase]] = {"GreedySearch": GreedySearch}
