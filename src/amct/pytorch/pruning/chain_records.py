"""Turns removed channels into the chains of a record: who makes them, who reads them, which are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from amct.record import PruneNode, PruneRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.pytorch.pruning.channel_sets import Labels
    from amct.pytorch.pruning.propagation import ChannelMap, Removal
    from amct.pytorch.pruning.rules.registry import LayerChannels
    from amct.pytorch.pruning.selection import Cell

PARAMETER = "Parameter"
"""The type of a node that is a parameter or buffer by itself, cut along the attribute ``axis``."""
REPEAT = "repeat"
"""Of a Linear behind a Flatten: the number of its inputs per channel."""

_TYPES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Linear, "Gemm"),
    (nn.modules.batchnorm._NormBase, "BatchNormalization"),
    (nn.LayerNorm, "LayerNormalization"),
    (nn.RMSNorm, "RMSNormalization"),
    (nn.GroupNorm, "GroupNormalization"),
    (nn.PReLU, "PRelu"),
    (nn.Embedding, "Gather"),
    (nn.modules.conv._ConvTransposeNd, "ConvTranspose"),
    (nn.modules.conv._ConvNd, "Conv"),
)


def node_type(module: nn.Module | None, rank: int | None = None) -> str:
    """The ONNX type of a module in a record; ``rank`` is that of its input, on which the type of a Linear depends."""
    found = next((name for kind, name in _TYPES if isinstance(module, kind)), PARAMETER)
    matrix = isinstance(module, nn.Linear) and rank is not None and (rank != 2 or module.bias is None)
    return "MatMul" if matrix else found


def chain_records(removal: Removal, cells: Sequence[Cell], modules: Mapping[str, nn.Module]) -> list[PruneRecord]:
    """One chain for each cell that loses channels, in the order of the cells."""
    channel_map = removal.channel_map
    handled = handled_tensors(channel_map, modules)
    found = []
    for cell in cells:
        gone = np.array([root for root in cell.roots if root in removal.roots], np.int64)
        if len(gone):
            members = np.array(cell.roots, np.int64)
            found.append(_chain(cell, channel_map, modules, handled, (members, gone)))
    return found


def _chain(
    cell: Cell,
    channel_map: ChannelMap,
    modules: Mapping[str, nn.Module],
    handled: frozenset[str],
    chosen: tuple[Labels, Labels],
) -> PruneRecord:
    sets = channel_map.sets
    producers = [_node(maker, modules, sets.roots(maker.outputs), chosen, whole=True) for maker in cell.makers]
    consumers: dict[str, PruneNode] = {}
    for layer in channel_map.layers:
        labels = layer.outputs if layer.inputs is None else layer.inputs
        roots = sets.roots(labels)
        if layer.name not in consumers and np.isin(roots, chosen[1]).any():
            consumers[layer.name] = _node(layer, modules, roots, chosen)
    for name, axes in channel_map.parameters.items():
        for axis, own in enumerate(axes if name not in handled else ()):
            roots = sets.roots(own) if own is not None else np.zeros(0, np.int64)
            positions = np.flatnonzero(np.isin(roots, chosen[1])).tolist()
            if positions:
                node = PruneNode.channels(name, PARAMETER, 0, len(roots), positions, axis=axis)
                consumers[f"{name}:{axis}"] = node
    return PruneRecord(producers=tuple(producers), consumers=tuple(consumers.values()))


def handled_tensors(channel_map: ChannelMap, modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """The parameters and buffers that are cut with their module."""
    paths = {layer.name for layer in channel_map.layers if node_type(modules.get(layer.name)) != PARAMETER}
    names = (
        (path, name)
        for path in paths
        for name, _ in (*modules[path].named_parameters(recurse=False), *modules[path].named_buffers(recurse=False))
    )
    return frozenset(f"{path}.{name}" for path, name in names)


def _node(
    layer: LayerChannels,
    modules: Mapping[str, nn.Module],
    roots: Labels,
    chosen: tuple[Labels, Labels],
    *,
    whole: bool = False,
) -> PruneNode:
    """The node of a layer; a consumer has the range of the chain's channels in its input."""
    module = modules.get(layer.name)
    given = layer.operation.operand(0)
    kind = node_type(module, len(given.shape or ()) if given is not None else None)
    more: dict[str, int] = {}
    repeat = 1 if whole or layer.inputs is None else _repeat(roots)
    if repeat > 1:
        more[REPEAT], roots = repeat, roots[::repeat]
    if kind == PARAMETER:
        more["axis"] = layer.axes[1] if whole else layer.axes[0]
    groups = getattr(module, "groups", 1)
    if groups > 1:
        more["group"] = groups
    members = np.flatnonzero(np.isin(roots, chosen[0]))
    gone = np.flatnonzero(np.isin(roots, chosen[1])).tolist()
    begin, end = (0, len(roots)) if whole else (int(members[0]), int(members[-1]) + 1)
    return PruneNode.channels(layer.name, kind, begin, end, gone, **more)


def _repeat(roots: Labels) -> int:
    """The length of the runs of equal labels that an axis consists of."""
    changes = np.flatnonzero(np.diff(roots)) + 1
    borders = np.concatenate([[0], changes, [len(roots)]])
    lengths = np.diff(borders)
    run = int(np.gcd.reduce(lengths))
    return run if run > 1 and len(roots) % run == 0 else 1


def axis_attribute(node: PruneNode, name: str) -> int | None:
    """A whole-number attribute of a node; None if it has none."""
    value = node.get(name)
    return value if isinstance(value, int) else None
