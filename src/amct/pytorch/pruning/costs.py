"""Parameters and multiply-accumulate operations (MACs) of a model, before and after channels are removed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.pytorch.pruning.propagation import Removal

if TYPE_CHECKING:
    from amct.pytorch.capture.program_reader import Operation
    from amct.pytorch.pruning.propagation import ChannelMap

_WEIGHTED = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_PRODUCTS = ("matmul", "bmm", "mm")


@dataclass(frozen=True)
class Cost:
    """What a model costs for the example input: its parameters and its MACs."""

    parameters: int
    macs: int


def cost_of(channel_map: ChannelMap, stored: dict[str, tuple[int, ...]], removal: Removal | None = None) -> Cost:
    """The cost of a model after a removal; without one, of the whole model.

    MACs are those of convolutions, linear layers and products of activations.

    Args:
        channel_map: The channels of the model.
        stored: The shapes of its parameters by name.
        removal: The channels to remove.
    """
    chosen = removal or Removal(channel_map)
    parameters = 0
    for name, shape in stored.items():
        axes = channel_map.parameters.get(name, (None,) * len(shape))
        parameters += math.prod(chosen.left(labels, size) for labels, size in zip(axes, shape, strict=True))
    macs = sum(_macs(operation, chosen) for operation in channel_map.program.operations)
    return Cost(parameters=parameters, macs=macs)


def _macs(operation: Operation, removal: Removal) -> int:
    if operation.constant:
        return 0
    if operation.kind in _WEIGHTED:
        given, weight = operation.operand(0), operation.operand(1)
        assert given is not None
        assert weight is not None
        each = math.prod(removal.shape(weight)[1:])
        # A transposed convolution multiplies each of its inputs, any other each of its outputs, by a row of the weight.
        return each * math.prod(removal.shape(given if "transpose" in operation.kind else operation.results[0]))
    if operation.kind in _PRODUCTS:
        first = operation.operand(0)
        return 0 if first is None else removal.shape(first)[-1] * math.prod(removal.shape(operation.results[0]))
    return 0
