"""A choice of channels to remove, and what the model costs without them: parameters, multiply-accumulate operations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from amct.pytorch.capture.program_reader import Operation, Value
    from amct.pytorch.pruning.channels import Axis, ChannelMap, Labels

_WEIGHTED = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_PRODUCTS = ("matmul", "bmm", "mm")


@dataclass(frozen=True, eq=False)
class Removal:
    """A choice of channels to remove, as a set of roots of a channel map."""

    channel_map: ChannelMap
    roots: frozenset[int] = field(default_factory=frozenset)

    def removed(self, labels: Labels) -> Labels:
        """The positions of an axis that are removed."""
        found: Labels = np.flatnonzero(self._is_removed[self.channel_map.sets.roots(labels)])
        return found

    @cached_property
    def _is_removed(self) -> NDArray[np.bool_]:
        """Whether each label is the root of a removed set."""
        found = np.zeros(self.channel_map.sets.count, np.bool_)
        found[list(self.roots)] = True
        return found

    def left(self, labels: Labels | None, size: int) -> int:
        """How many positions of an axis are left."""
        return size if labels is None else size - len(self.removed(labels))

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of an activation or parameter after the removal."""
        axes = zip(self.channel_map.of(value), value.shape or (), strict=True)
        return tuple(self.left(labels, size or 0) for labels, size in axes)


@dataclass(frozen=True)
class Cost:
    """What a model costs for the example input: its parameters and its MACs."""

    parameters: int
    macs: int


def cost_of(removal: Removal) -> Cost:
    """The cost of a model after a removal.

    MACs are those of convolutions, linear layers and products of activations.
    """
    channels, parameters = removal.channel_map, 0
    for name, parameter in channels.model.named_parameters():
        axes = channels.parameters.get(name, (None,) * parameter.ndim)
        parameters += math.prod(removal.left(labels, size) for labels, size in zip(axes, parameter.shape, strict=True))
    return Cost(parameters=parameters, macs=sum(_macs(operation, removal) for operation in channels.program.operations))


def _macs(operation: Operation, removal: Removal) -> int:
    factors = _factors(operation)
    if factors is None:
        return 0
    weight, read, other = factors
    return math.prod(removal.shape(weight)[read:]) * math.prod(removal.shape(other))


def _factors(operation: Operation) -> tuple[Value, int, Value] | None:
    """What the MACs of an operation are the product of; None if it has none.

    Returns:
        A tensor, its first axis that counts, and a tensor all of whose axes count.
    """
    first = operation.operand(0)
    if operation.constant or first is None:
        return None
    result = operation.results[0]
    if operation.kind in _WEIGHTED:
        weight = operation.operand(1)
        assert weight is not None
        # A transposed convolution multiplies each of its inputs, any other each of its outputs, by a row of the weight.
        return weight, 1, first if "transpose" in operation.kind else result
    return (first, len(first.shape or ()) - 1, result) if operation.kind in _PRODUCTS else None


BLOCKS = (8, 16)
"""How many channels kernels compute at once: 8 floats with AVX2, 16 with AVX-512."""


class RemovalCosts:
    """The MACs of a model as a function of how many sets of channels each of some groups of sets loses.

    Args:
        channel_map: The channels of the model.
        groups: Disjoint groups of sets, by their roots.
    """

    def __init__(self, channel_map: ChannelMap, groups: Sequence[Sequence[int]]) -> None:
        self._group_of = np.full(channel_map.sets.count, -1, np.int64)
        for number, roots in enumerate(groups):
            self._group_of[list(roots)] = number
        self._map = channel_map
        rows: list[NDArray[np.float64]] = []
        sizes, starts, made = [], [], []
        for operation in channel_map.program.operations:
            factors = _factors(operation)
            if factors is None:
                continue
            weight, read, other = factors
            axes = [(axis, size, False) for axis, size in islice(self._axes(weight), read, None)]
            axes += [(axis, size, True) for axis, size in self._axes(other)]
            counted = [(self._counts(axis, len(groups)), size, of_other) for axis, size, of_other in axes]
            fixed = math.prod(size for counts, size, _ in counted if not counts.any())
            starts.append(len(rows))
            for counts, size, of_other in [
                (np.zeros(len(groups)), fixed, False),
                *(each for each in counted if each[0].any()),
            ]:
                rows.append(counts)
                sizes.append(size)
                made.append(of_other)
        self._rows = np.array(rows, np.float64).reshape(len(rows), len(groups))
        self._varies = self._rows.any(axis=1)
        self._sizes, self._made = np.array(sizes, np.float64), np.array(made, np.bool_)
        self._starts = np.array(starts, np.int64)

    def _axes(self, value: Value) -> Iterator[tuple[Axis, int]]:
        return ((axis, size or 0) for axis, size in zip(self._map.of(value), value.shape or (), strict=True))

    def _counts(self, axis: Axis, groups: int) -> NDArray[np.float64]:
        """How many positions of an axis belong to a set of each group."""
        if axis is None:
            return np.zeros(groups)
        found = self._group_of[self._map.sets.roots(axis)]
        return np.bincount(found[found >= 0], minlength=groups).astype(np.float64)

    def macs(self, shares: NDArray[np.float64]) -> float:
        """The MACs if each group loses a share of its positions, 0 to 1."""
        return self._product(self._sizes - self._rows @ shares)

    def work(self, shares: NDArray[np.float64]) -> float:
        """The MACs as kernels compute them, in blocks of channels; the mean over the sizes of blocks.

        A last block that is not full costs as much as a full one. Inputs of less than one block are read as they are.
        """
        left, found = self._sizes - self._rows @ shares, 0.0
        for block in BLOCKS:
            whole = np.ceil(left / block) * block
            exact = ~self._varies | (~self._made & (left < block))
            found += self._product(np.where(exact, left, whole))
        return found / len(BLOCKS)

    def _product(self, left: NDArray[np.float64]) -> float:
        return float(np.multiply.reduceat(left, self._starts).sum()) if len(self._starts) else 0.0
