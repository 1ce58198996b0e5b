"""A choice of channels to remove, and what the model costs without them: parameters, multiply-accumulate operations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from amct.pytorch.capture.program_reader import Operation, ProgramTensor
    from amct.pytorch.pruning.channels import Axis, ChannelMap, Labels

_WEIGHTED = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_MATRICES = ("matmul", "bmm", "mm")
_ATTENTION, _EINSUM = "scaled_dot_product_attention", "einsum"
MULTIPLYING = frozenset({*_WEIGHTED, *_MATRICES, _ATTENTION, _EINSUM})
"""The operations with MACs."""


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

    def shape(self, value: ProgramTensor) -> tuple[int, ...]:
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
    return sum(
        math.prod(removal.shape(one)[axis] for axis in axes) * math.prod(removal.shape(other))
        for one, axes, other in _factors(operation)
    )


def macs_of_weights(channel_map: ChannelMap) -> dict[str, int]:
    """The MACs of the whole model by the name of the weight that they are made with."""
    whole, found = Removal(channel_map), dict[str, int]()
    for operation in channel_map.program.operations:
        weight = operation.operand(1) if operation.kind in _WEIGHTED else None
        if weight is not None and weight.parameter:
            found[weight.parameter] = found.get(weight.parameter, 0) + _macs(operation, whole)
    return found


def _factors(operation: Operation) -> list[tuple[ProgramTensor, Sequence[int], ProgramTensor]]:
    """What the MACs of an operation are a sum of: the products of some axes of a tensor and all axes of another one."""
    if operation.constant or operation.kind not in MULTIPLYING:
        return []
    if operation.kind == _EINSUM:
        return _einsum_factors(operation)
    first, second, result = operation.operand(0), operation.operand(1), operation.results[0]
    assert first is not None
    assert second is not None
    rank = len(first.shape or ())
    if operation.kind == _ATTENTION:  # queries by keys, weights by values; the keys are as many as the values
        return [(second, [rank - 2], first), (second, [rank - 2], result)]
    if operation.kind in _MATRICES:
        return [(first, [rank - 1], result)]
    # A transposed convolution multiplies each of its inputs, any other each of its outputs, by a row of the weight.
    return [(second, range(1, len(second.shape or ())), first if "transpose" in operation.kind else result)]


def _einsum_factors(operation: Operation) -> list[tuple[ProgramTensor, Sequence[int], ProgramTensor]]:
    """The axes of the first of two tensors that are in no result; none of an equation that is not followed."""
    inputs, arrow, output = str(operation.arguments[0]).replace(" ", "").partition("->")
    if not arrow or "." in inputs or inputs.count(",") != 1:
        return []
    own = [axis for axis, letter in enumerate(inputs.partition(",")[0]) if letter not in output]
    return [(operation.arguments[1][0], own, operation.results[0])] if own else []


BLOCKS = (8, 16)
"""How many channels kernels compute at once: 8 floats with AVX2, 16 with AVX-512."""


class RemovalCosts:
    """What a model costs as a function of how many sets of channels each of some groups of sets loses.

    All functions take the share of its positions that each group loses, 0 to 1, or a column of shares for each of
    several removals, for which they return an array.

    Args:
        channel_map: The channels of the model.
        groups: Disjoint groups of sets, by their roots.
    """

    def __init__(self, channel_map: ChannelMap, groups: Sequence[Sequence[int]]) -> None:
        terms = []
        for one, places, other in (each for found in channel_map.program.operations for each in _factors(found)):
            own = [(axis, size, False) for place, (axis, size) in enumerate(_axes(channel_map, one)) if place in places]
            terms.append(own + [(axis, size, True) for axis, size in _axes(channel_map, other)])
        self._macs = _Products(channel_map, groups, terms)
        self._map, self._groups = channel_map, groups

    @cached_property
    def _parameters(self) -> _Products:
        terms = []
        for name, parameter in self._map.model.named_parameters():
            axes = self._map.parameters.get(name, (None,) * parameter.ndim)
            terms.append([(axis, size, False) for axis, size in zip(axes, parameter.shape, strict=True)])
        return _Products(self._map, self._groups, terms)

    def macs(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """The MACs."""
        return self._macs.total(self._macs.left(shares))

    def parameters(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """The number of parameters."""
        return self._parameters.total(self._parameters.left(shares))

    def work(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """The MACs as kernels compute them, in blocks of channels; the mean over the sizes of blocks.

        A last block that is not full costs as much as a full one. Inputs of less than one block are read as they are.
        """
        left, found = self._macs.left(shares), np.zeros(())
        varies, made = (each.reshape(-1, *[1] * (left.ndim - 1)) for each in (self._macs.varies, self._macs.made))
        for block in BLOCKS:
            whole = np.ceil(left / block) * block
            exact = ~varies | (~made & (left < block))
            found = found + self._macs.total(np.where(exact, left, whole))
        mean: NDArray[np.float64] = found / len(BLOCKS)
        return mean


def _axes(channel_map: ChannelMap, value: ProgramTensor) -> Iterator[tuple[Axis, int]]:
    return ((axis, size or 0) for axis, size in zip(channel_map.of(value), value.shape or (), strict=True))


class _Products:
    """A sum of products of axes, each of which has positions that belong to the groups.

    Args:
        channel_map: The channels.
        groups: The groups of sets.
        terms: The axes of each product: labels, size, and whether it is one of a result.
    """

    def __init__(
        self, channel_map: ChannelMap, groups: Sequence[Sequence[int]], terms: Sequence[list[tuple[Axis, int, bool]]]
    ) -> None:
        group_of = np.full(channel_map.sets.count, -1, np.int64)
        for number, roots in enumerate(groups):
            group_of[list(roots)] = number

        def counts(axis: Axis) -> NDArray[np.float64]:
            """How many positions of an axis belong to a set of each group."""
            found = np.zeros(0, np.int64) if axis is None else group_of[channel_map.sets.roots(axis)]
            return np.bincount(found[found >= 0], minlength=len(groups)).astype(np.float64)

        rows: list[NDArray[np.float64]] = []
        sizes, starts, made = [], [], []
        for term in terms:
            counted = [(counts(axis), size, of_result) for axis, size, of_result in term]
            fixed = math.prod(size for found, size, _ in counted if not found.any())
            starts.append(len(rows))
            for found, size, of_result in [
                (np.zeros(len(groups)), fixed, False),
                *(each for each in counted if each[0].any()),
            ]:
                rows.append(found)
                sizes.append(size)
                made.append(of_result)
        self._rows = np.array(rows, np.float64).reshape(len(rows), len(groups))
        self._sizes, self._starts = np.array(sizes, np.float64), np.array(starts, np.int64)
        self.varies, self.made = self._rows.any(axis=1), np.array(made, np.bool_)

    def left(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sizes of all axes without the shares."""
        found: NDArray[np.float64] = (self._sizes - (self._rows @ shares).T).T
        return found

    def total(self, left: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of the products of axes of these sizes."""
        if not len(self._starts):
            return np.zeros(left.shape[1:])
        found: NDArray[np.float64] = np.multiply.reduceat(left, self._starts, axis=0).sum(axis=0)
        return found
