"""Equalization across layers of a float ONNX model: for the doors of PyTorch and ONNX.

The output channels of a layer are divided by factors, and the weights of all layers that read them multiplied: nothing
changes in float, but channels that share one quantization step become more alike. The factors are chosen by the rule of
``numerics/balancing.py``, which Caffe nets use too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct import log
from amct.errors import CalibrationError, ConfigError
from amct.export.onnx.messages import attribute_value
from amct.export.onnx.runtime import Runner, as_tensor
from amct.model.kinds import LayerKind
from amct.numerics.arq import channels_first, from_channels_first
from amct.numerics.balancing import ChannelStatistics, ConsumerNoise, balance_weight, choose_factors
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto
    from torch import Tensor

    from amct.config.plan import Plan
    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import OnnxLayer
    from amct.numerics.settings import WeightKind

logger = logging.getLogger(__name__)

PASSING = frozenset(
    {
        "AveragePool", "Dropout", "GlobalAveragePool", "GlobalMaxPool", "Identity", "LeakyRelu", "MaxPool", "PRelu",
        "Relu",
    }
)  # fmt: skip
"""Operators that compute each channel alone, so that a positive factor of its input is one of its output.

ReLU6 is none: its cap would have to be divided channel by channel, which neither Clip nor the chip can do.
"""
_PRODUCTS = (LayerKind.CONV, LayerKind.CONV_TRANSPOSE, LayerKind.LINEAR)


@dataclass(frozen=True, kw_only=True)
class ChannelUse:
    """A layer that reads the channels; behind a Flatten it reads several positions of each."""

    layer: str
    tensor: str
    channel_axis: int = 1
    positions: int = 1


@dataclass(frozen=True, kw_only=True)
class ChannelRoute:
    """A layer whose output channels may be divided, and all layers that read them."""

    layer: str
    channels: int
    uses: tuple[ChannelUse, ...]


@dataclass(frozen=True, kw_only=True)
class Equalization:
    """By layer: the divisors of its output channels, and the multipliers of its input channels."""

    divisors: dict[str, Tensor] = field(default_factory=dict)
    multipliers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[str, ...]:
        """Every layer whose weight changes."""
        return tuple(dict.fromkeys((*self.divisors, *self.multipliers)))

    def weight(self, layer: str, weight: Tensor, kind: WeightKind, groups: int) -> Tensor:
        """The weight of a layer, in the layout of its kind, that goes with the factors."""
        if layer in self.multipliers:
            weight = balance_weight(weight, self.multipliers[layer], kind, groups)
        if layer in self.divisors:
            rows = channels_first(weight, kind, groups).double() / self.divisors[layer][:, None]
            weight = from_channels_first(rows.to(weight.dtype), weight.shape, kind, groups)
        return weight

    def bias(self, layer: str, bias: Tensor) -> Tensor:
        """The bias that goes with the factors."""
        return bias if layer not in self.divisors else (bias.double() / self.divisors[layer]).to(bias.dtype)


def equalization(
    model: ModelProto,
    graph: OnnxGraph,
    layers: Sequence[OnnxLayer],
    feeds: Iterable[Mapping[str, NDArray[Any]]],
    *,
    one_scale: Collection[str] = (),
) -> Equalization:
    """Choose the factors from the activations of a float model on data.

    Args:
        model: The folded float model.
        graph: The same, opened, with ``layers``.
        layers: All its layers.
        feeds: The data by input name.
        one_scale: Layers with one weight scale for all outputs: dividing single ones costs accuracy.

    Raises:
        CalibrationError: There is no data.
    """
    by_name = {layer.name: layer for layer in layers}
    routes = [route for route in free_routes(graph, layers) if route.layer not in one_scale]
    statistics = _statistics(model, {use.tensor: use.channel_axis for route in routes for use in route.uses}, feeds)
    found = Equalization()
    for route in routes:
        readers = []
        for use in route.uses:
            ranges = statistics[use.tensor].result()
            readers.append(
                (ConsumerNoise(_columns(by_name[use.layer], use), ranges, one_scale=use.layer in one_scale), 0)
            )
        factors = choose_factors(readers, route.channels)
        if factors is None:
            continue
        found.divisors[route.layer] = factors
        for use in route.uses:
            found.multipliers[use.layer] = factors.repeat_interleave(use.positions)
    logger.info("equalized the channels of %s", counted(len(found.divisors), "layer"))
    return found


def check_alone(plan: Plan) -> None:
    """Refuse equalization together with DMQ, which scales the same channels.

    Raises:
        ConfigError: The plan balances a layer.
    """
    if plan.balanced:
        raise ConfigError(
            f'{plan.source}: layer "{plan.balanced[0].name}": dmq_balancer and equalize scale the same channels; leave '
            "out one of them"
        )


def free_routes(graph: OnnxGraph, layers: Sequence[OnnxLayer]) -> list[ChannelRoute]:
    """The layers whose output channels may be divided: all that reads these are products that can be multiplied."""
    repeated = {layer.layer for layer in layers if layer.call}
    usable = {
        id(layer.node): layer
        for layer in layers
        if layer.kind in _PRODUCTS and layer.is_wide_float and layer.layer not in repeated and _owns(graph, layer)
    }
    found = []
    for layer in usable.values():
        uses = _uses(graph, layer.output if layer.adds_integers else layer.node.output[0], layer, usable)
        if uses and (layer.bias is None or layer.adds_integers):
            found.append(ChannelRoute(layer=layer.name, channels=layer.channels_out, uses=tuple(uses)))
    return found


def _owns(graph: OnnxGraph, layer: OnnxLayer) -> bool:
    """Whether no other node reads the weight or the bias of a layer."""
    names = [layer.node.input[1]]
    if layer.bias is not None:
        place, index = layer.bias_place
        names.append(place.input[index])
    return all(len(graph.consumers(name)) == 1 for name in names)


def _uses(graph: OnnxGraph, tensor: str, source: OnnxLayer, usable: Mapping[int, OnnxLayer]) -> list[ChannelUse] | None:
    """All layers that read the channels of a tensor; None if something else reads them, or nothing does."""
    if graph.is_output(tensor) or graph.is_captured(tensor):
        return None
    found: list[ChannelUse] = []
    for node in graph.consumers(tensor):
        behind: list[ChannelUse] | None = None
        if id(node) in usable:
            behind = _use_of(source, usable[id(node)], tensor)
        elif _passes(graph, node, tensor):
            behind = _uses(graph, node.output[0], source, usable)
        elif node.op_type == "Flatten" and attribute_value(node, "axis", 1) == 1:
            behind = _behind_flatten(graph, node, source, usable)
        if behind is None:
            return None
        found += behind
    return found or None


def _use_of(source: OnnxLayer, reader: OnnxLayer, tensor: str) -> list[ChannelUse] | None:
    is_linear = source.kind is LayerKind.LINEAR
    fits = reader.channels_in == source.channels_out and is_linear == (reader.kind is LayerKind.LINEAR)
    if not fits or list(reader.node.input).count(tensor) != 1 or reader.node.input[0] != tensor:
        return None
    return [ChannelUse(layer=reader.name, tensor=tensor, channel_axis=-1 if is_linear else 1)]


def _behind_flatten(
    graph: OnnxGraph, node: NodeProto, source: OnnxLayer, usable: Mapping[int, OnnxLayer]
) -> list[ChannelUse] | None:
    """The linear layers behind a Flatten, which read a position of a channel after the other."""
    flat, found = node.output[0], []
    if source.kind is LayerKind.LINEAR or graph.is_output(flat) or graph.is_captured(flat):
        return None
    for each in graph.consumers(flat):
        reader = usable.get(id(each))
        if reader is None or reader.kind is not LayerKind.LINEAR or reader.channels_in % source.channels_out:
            return None
        positions = reader.channels_in // source.channels_out
        found.append(ChannelUse(layer=reader.name, tensor=node.input[0], positions=positions))
    return found or None


def _passes(graph: OnnxGraph, node: NodeProto, tensor: str) -> bool:
    if node.op_type not in PASSING or len(node.output) != 1 or node.input[0] != tensor:
        return False
    if node.op_type != "PRelu":
        return True
    slope = graph.constant(node.input[1])
    return slope is not None  # the sign of a value stays, whatever the slope is


# -- activations -------------------------------------------------------------------------------------------------------


def _statistics(
    model: ModelProto, tensors: Mapping[str, int], feeds: Iterable[Mapping[str, NDArray[Any]]]
) -> dict[str, ChannelStatistics]:
    found = {name: ChannelStatistics() for name in tensors}
    runner = Runner(model, list(found), lean=True)
    seen = False
    for each in log.track(feeds, "Equalizing"):
        seen = True
        values = runner.run(dict(each))
        for name, statistics in found.items():
            tensor = as_tensor(values[name])
            statistics.add(tensor.movedim(tensors[name], 1) if tensor.ndim > 1 else tensor[None])
    if not seen:
        raise CalibrationError("equalization: data has no batch")
    return found


def _columns(layer: OnnxLayer, use: ChannelUse) -> Tensor:
    """The weight of a reading layer as ``[groups, rows, channels of a group, taps]``."""
    assert layer.weight is not None
    weight, groups = torch.from_numpy(np.array(layer.weight, np.float64)), layer.groups
    if layer.kind is LayerKind.CONV_TRANSPOSE:
        grouped = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        return grouped.transpose(1, 2)
    channels = layer.channels_in // use.positions
    return weight.reshape(groups, weight.shape[0] // groups, channels // groups, -1)
