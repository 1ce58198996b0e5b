"""The chains of a record: made from removed channels (who makes them, who reads them), and cut from a model.

A producer loses output channels, a consumer the input channels that it read from it. Batch norms, other normalizations
and depthwise convolutions are consumers that lose their channels altogether. Every fault of a record is found before a
tensor is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from amct.errors import RecordError, did_you_mean
from amct.record import PruneNode, PruneRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from amct.pytorch.pruning.channels import ChannelMap, Labels, LayerChannels
    from amct.pytorch.pruning.removal import Removal
    from amct.pytorch.pruning.selection import ChannelCell


PARAMETER = "Parameter"
"""The type of a node that is a parameter or buffer by itself, cut along the attribute ``axis``."""
NUMBER = "Number"
"""The type of a node that is an attribute of a module, a number of channels such as ``num_heads``."""
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


def chain_records(removal: Removal, cells: Sequence[ChannelCell]) -> list[PruneRecord]:
    """One chain for each cell that loses channels, in the order of the cells."""
    found = []
    for cell in cells:
        gone = [root for root in cell.roots if root in removal.roots]
        if gone:
            found.append(_ChainWriter(removal.channel_map, np.array(cell.roots), np.array(gone)).write(cell))
    return found


@dataclass(frozen=True, eq=False)
class _ChainWriter:
    """Writes the chain of one cell: its sets of channels, and those of them that are removed."""

    channel_map: ChannelMap
    members: Labels
    gone: Labels

    def write(self, cell: ChannelCell) -> PruneRecord:
        channel_map, sets = self.channel_map, self.channel_map.sets
        producers = [self._node(maker, sets.roots(maker.outputs), produces=True) for maker in cell.makers]
        consumers: dict[str, PruneNode] = {}
        for layer in channel_map.layers:
            roots = sets.roots(layer.outputs if layer.inputs is None else layer.inputs)
            if layer.name == layer.weight and channel_map.tensors[layer.name].shape[layer.axes[0]] != len(roots):
                continue  # the weight of a grouped function, of which each group reads its own inputs: see below
            if layer.name not in consumers and np.isin(roots, self.gone).any():
                consumers[layer.name] = self._node(layer, roots)
        cut_with_module = _tensors_of_layers(channel_map)
        for name, axes in channel_map.parameters.items():
            for axis, own in enumerate(axes if name not in cut_with_module else ()):
                if own is not None and len(positions := self._places(sets.roots(own))):
                    node = PruneNode.channels(name, PARAMETER, 0, len(own), positions, axis=axis)
                    consumers[f"{name}:{axis}"] = node
        for name, own in channel_map.sizes.changed(channel_map):
            if len(positions := self._places(sets.roots(own))):
                consumers.setdefault(name, PruneNode.channels(name, NUMBER, 0, len(own), positions))
        return PruneRecord(producers=tuple(producers), consumers=tuple(consumers.values()))

    def _places(self, roots: Labels) -> list[int]:
        """Where an axis has removed channels."""
        places: list[int] = np.flatnonzero(np.isin(roots, self.gone)).tolist()
        return places

    def _node(self, layer: LayerChannels, roots: Labels, *, produces: bool = False) -> PruneNode:
        """The node of a layer; a consumer has the range of the chain's channels in its input."""
        module = self.channel_map.modules.get(layer.name)
        given = layer.operation.operand(0)
        kind = node_type(module, len(given.shape or ()) if given is not None else None)
        more: dict[str, int] = {}
        repeat = 1 if produces or layer.inputs is None else _repeat(roots)
        if repeat > 1:
            more[REPEAT], roots = repeat, roots[::repeat]
        if kind == PARAMETER:
            more["axis"] = layer.axes[1] if produces else layer.axes[0]
        groups = getattr(module, "groups", 1)
        if groups > 1:
            more["group"] = groups
        members = np.flatnonzero(np.isin(roots, self.members))
        begin, end = (0, len(roots)) if produces else (int(members[0]), int(members[-1]) + 1)
        return PruneNode.channels(layer.name, kind, begin, end, self._places(roots), **more)


def _tensors_of_layers(channel_map: ChannelMap) -> set[str]:
    """The parameters and buffers that are cut with their module."""
    modules = {layer.name: channel_map.modules.get(layer.name) for layer in channel_map.layers}
    return {
        f"{path}.{name}"
        for path, module in modules.items()
        if module is not None and node_type(module) != PARAMETER
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }


def _repeat(roots: Labels) -> int:
    """The length of the runs of equal labels that an axis consists of."""
    changes = np.flatnonzero(np.diff(roots)) + 1
    borders = np.concatenate([[0], changes, [len(roots)]])
    lengths = np.diff(borders)
    run = int(np.gcd.reduce(lengths))
    return run if run > 1 and len(roots) % run == 0 else 1


def removed_positions(node: PruneNode) -> list[int]:
    """The positions along its axis that a node removes."""
    repeat = node.whole(REPEAT) or 1
    return [index * repeat + offset for index in node.prune_index for offset in range(repeat)]


@dataclass(eq=False)
class _ModuleCut:
    """Positions to remove from one module."""

    module: nn.Module
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)


def cut_channels(model: nn.Module, chains: Iterable[PruneRecord], source: str = "the record") -> None:
    """Remove the channels of some chains from a model, in place.

    Args:
        model: The model, with all its channels.
        chains: Chains with ``prune_index``.
        source: The name of the record, for messages.

    Raises:
        RecordError: A chain does not fit the model; the model was not changed.
    """
    cuts = _Cuts(model)
    for chain in chains:
        for node in chain.producers:
            cuts.note(node, f'{source}: producer "{node.name}"', produces=True)
        for node in chain.consumers:
            cuts.note(node, f'{source}: consumer "{node.name}"', produces=False)
    for name, cut in cuts.of_modules.items():
        _check_groups(name, cut, source)
    with torch.no_grad():
        for cut in cuts.of_modules.values():
            _cut_module(cut)
        for (name, axis), positions in cuts.of_tensors.items():
            path, _, leaf = name.rpartition(".")
            _replace(cuts.modules[path], leaf, axis, positions)
        for name, positions in cuts.of_numbers.items():
            path, _, leaf = name.rpartition(".")
            setattr(cuts.modules[path], leaf, getattr(cuts.modules[path], leaf) - len(positions))


class _Cuts:
    """What the chains of a record remove from a model: from its modules, from tensors along an axis, from numbers."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors.update(model.named_buffers(remove_duplicate=False))
        self.of_modules: dict[str, _ModuleCut] = {}
        self.of_tensors: dict[tuple[str, int], set[int]] = {}
        self.of_numbers: dict[str, set[int]] = {}

    def note(self, node: PruneNode, where: str, *, produces: bool) -> None:
        """Check a node against the model and note what it removes."""
        axis = node.whole("axis")
        if node.kind == PARAMETER and axis is not None:
            if node.name not in self.tensors or not 0 <= axis < self.tensors[node.name].ndim:
                raise RecordError(f"{where}: the model has no parameter with this name and axis {axis}")
            positions = _positions(node, self.tensors[node.name].shape[axis], where)
            self.of_tensors.setdefault((node.name, axis), set()).update(positions)
            return
        if node.kind == NUMBER:
            path, _, leaf = node.name.rpartition(".")
            number = getattr(self.modules.get(path), leaf, None)
            if type(number) is not int or number != node.end:
                raise RecordError(f"{where}: expected an attribute with the value {node.end}, got {number!r}")
            self.of_numbers.setdefault(node.name, set()).update(_positions(node, number, where))
            return
        module = self.modules.get(node.name)
        if module is None:
            raise RecordError(f"{where}: the model has no such layer.{did_you_mean(node.name, list(self.modules))}")
        known = node_type(module)
        if known == PARAMETER or (node.kind is not None and node.kind not in (known, "MatMul")):
            raise RecordError(f"{where}: the record says {node.kind}, the model has {type(module).__name__}")
        inputs, outputs = channel_counts(module)
        follows = _follows_input(module)
        cut = self.of_modules.setdefault(node.name, _ModuleCut(module))
        if produces:
            if follows:
                raise RecordError(f"{where}: {type(module).__name__} makes no channels of its own")
            cut.outputs.update(_positions(node, outputs, where))
        else:
            positions = _positions(node, inputs, where)
            cut.inputs.update(positions)
            if follows:
                each = outputs // inputs
                cut.outputs.update(position * each + offset for position in positions for offset in range(each))


_COUNTS = (
    ("in_channels", "out_channels"),
    ("in_features", "out_features"),
    *((name, name) for name in ("num_features", "num_channels", "num_parameters", "embedding_dim")),
)
"""The attributes of modules that have the numbers of input and output channels."""


def channel_counts(module: nn.Module) -> tuple[int, int]:
    """The numbers of input and output channels of a module that can be cut."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return int(module.normalized_shape[-1]), int(module.normalized_shape[-1])
    inputs, outputs = next(names for names in _COUNTS if hasattr(module, names[0]))
    return int(getattr(module, inputs)), int(getattr(module, outputs))


def _follows_input(module: nn.Module) -> bool:
    """Whether the output channels of a module are its input channels: normalizations, depthwise convolutions."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.groups == module.in_channels and module.groups > 1
    return not isinstance(module, nn.Linear)


def _positions(node: PruneNode, size: int, where: str) -> list[int]:
    """The positions that a node removes from an axis, checked."""
    repeat = node.whole(REPEAT) or 1
    if repeat < 1 or size % repeat:
        raise RecordError(f"{where}: {size} inputs are no multiple of repeat {repeat}")
    channels = size // repeat
    begin, end = node.begin or 0, channels if node.end is None else node.end
    if not 0 <= begin < end <= channels:
        raise RecordError(f"{where}: the channels {begin}..{end} are not within its {channels}")
    wrong = [index for index in node.prune_index if not begin <= index < end]
    if wrong:
        raise RecordError(f"{where}: prune_index {wrong[0]} is not within its channels {begin}..{end}")
    if len(set(node.prune_index)) == channels:
        raise RecordError(f"{where}: prune_index removes all of its {channels} channels")
    return removed_positions(node)


def _check_groups(name: str, cut: _ModuleCut, source: str) -> None:
    module = cut.module
    groups: int = getattr(module, "groups", 0) or getattr(module, "num_groups", 1)
    if groups == 1 or (_follows_input(module) and not isinstance(module, nn.GroupNorm)):
        return
    if isinstance(module, nn.modules.conv._ConvNd) and _whole_groups(module, cut.inputs, cut.outputs):
        return
    for size, positions in zip(channel_counts(module), (cut.inputs, cut.outputs), strict=True):
        counts = np.bincount([position // (size // groups) for position in positions], minlength=groups)
        if len(set(counts.tolist())) > 1:
            raise RecordError(f'{source}: "{name}" has {groups} groups, which lose different numbers of channels')


def _whole_groups(module: nn.modules.conv._ConvNd, inputs: set[int], outputs: set[int]) -> set[int]:
    """The groups of a convolution of which all channels are removed, if nothing else is; else none."""
    gone = []
    for size, positions in ((module.in_channels, inputs), (module.out_channels, outputs)):
        counts = np.bincount([position // (size // module.groups) for position in positions], minlength=module.groups)
        if not np.isin(counts, (0, size // module.groups)).all():
            return set()
        gone.append(set(np.flatnonzero(counts).tolist()))
    return gone[0] if gone[0] == gone[1] else set()


# -- cutting -----------------------------------------------------------------------------------------------------------


def _cut_module(cut: _ModuleCut) -> None:
    module = cut.module
    if isinstance(module, nn.modules.conv._ConvNd):
        _cut_convolution(module, cut.inputs, cut.outputs)
    elif isinstance(module, nn.Linear):
        _replace(module, "weight", 1, cut.inputs)
        _replace(module, "weight", 0, cut.outputs)
        _replace(module, "bias", 0, cut.outputs)
        module.in_features -= len(cut.inputs)
        module.out_features -= len(cut.outputs)
    elif isinstance(module, nn.Embedding):
        _replace(module, "weight", 1, cut.inputs)
        module.embedding_dim -= len(cut.inputs)
    else:
        for name in ("weight", "bias", "running_mean", "running_var"):
            _replace(module, name, 0, cut.inputs)
        _shrink_attributes(module, len(cut.inputs))


def _shrink_attributes(module: nn.Module, removed: int) -> None:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        module.normalized_shape = (*module.normalized_shape[:-1], module.normalized_shape[-1] - removed)
    for name in ("num_features", "num_channels", "num_parameters"):
        if hasattr(module, name):
            setattr(module, name, getattr(module, name) - removed)


def _cut_convolution(module: nn.modules.conv._ConvNd, inputs: set[int], outputs: set[int]) -> None:
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    if groups := _whole_groups(module, inputs, outputs):  # of a depthwise one: its channels
        _replace(module, "weight", 0, inputs if transposed else outputs)
        module.groups -= len(groups)
    elif module.groups > 1:
        _replace_tensor(module, "weight", _cut_grouped(module, inputs, outputs, transposed=transposed))
    else:
        _replace(module, "weight", 0 if transposed else 1, inputs)
        _replace(module, "weight", 1 if transposed else 0, outputs)
    _replace(module, "bias", 0, outputs)
    module.in_channels -= len(inputs)
    module.out_channels -= len(outputs)


def _cut_grouped(module: nn.modules.conv._ConvNd, inputs: set[int], outputs: set[int], *, transposed: bool) -> Tensor:
    """The weight of a grouped convolution, of which each group may lose other channels."""
    rows_gone, columns_gone = (inputs, outputs) if transposed else (outputs, inputs)
    parts = []
    for group, part in enumerate(module.weight.chunk(module.groups)):
        rows = _left(part.shape[0], [p - group * part.shape[0] for p in rows_gone])
        columns = _left(part.shape[1], [p - group * part.shape[1] for p in columns_gone])
        parts.append(part[rows][:, columns])
    return torch.cat(parts)


def _left(size: int, gone: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.setdiff1d(np.arange(size), np.fromiter(gone, np.int64)))


def _replace(module: nn.Module, name: str, axis: int, positions: Sequence[int] | set[int]) -> None:
    """Remove positions from an axis of a parameter or buffer, if the module has it."""
    tensor = getattr(module, name, None)
    if isinstance(tensor, torch.Tensor) and positions and tensor.ndim and tensor.shape[axis] > 1:
        kept = _left(tensor.shape[axis], positions).to(tensor.device)
        _replace_tensor(module, name, tensor.detach().index_select(axis, kept))


def _replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    old = getattr(module, name)
    tensor = tensor.detach().contiguous()
    if isinstance(old, nn.Parameter):
        setattr(module, name, nn.Parameter(tensor, requires_grad=old.requires_grad))
    else:
        setattr(module, name, tensor)
