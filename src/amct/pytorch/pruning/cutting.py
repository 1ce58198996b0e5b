"""Removes channels from a model as the chains of a record say; every fault of a record is found before a tensor is cut.

A producer loses output channels, a consumer the input channels that it read from it. Batch norms, other normalizations
and depthwise convolutions are consumers that lose their channels altogether.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from amct.errors import RecordError, did_you_mean
from amct.pytorch.pruning.chain_records import PARAMETER, REPEAT, axis_attribute, node_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from amct.record import PruneNode, PruneRecord


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
    modules = dict(model.named_modules(remove_duplicate=False))
    cuts: dict[str, _ModuleCut] = {}
    tensors: dict[tuple[str, int], set[int]] = {}
    for chain in chains:
        for node in chain.producers:
            _note(node, modules, cuts, tensors, model, f'{source}: producer "{node.name}"', produces=True)
        for node in chain.consumers:
            _note(node, modules, cuts, tensors, model, f'{source}: consumer "{node.name}"', produces=False)
    for name, cut in cuts.items():
        _check_groups(name, cut, source)
    with torch.no_grad():
        for cut in cuts.values():
            _cut_module(cut)
        for (name, axis), positions in tensors.items():
            path, _, leaf = name.rpartition(".")
            _replace(modules[path], leaf, axis, positions)


def _note(
    node: PruneNode,
    modules: Mapping[str, nn.Module],
    cuts: dict[str, _ModuleCut],
    tensors: dict[tuple[str, int], set[int]],
    model: nn.Module,
    where: str,
    *,
    produces: bool,
) -> None:
    """Check a node against the model and note what it removes."""
    axis = axis_attribute(node, "axis")
    if node.kind == PARAMETER and axis is not None:
        stored = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
        if node.name not in stored or not 0 <= axis < stored[node.name].ndim:
            raise RecordError(f"{where}: the model has no parameter with this name and axis {axis}")
        positions = _positions(node, stored[node.name].shape[axis], where)
        tensors.setdefault((node.name, axis), set()).update(positions)
        return
    module = modules.get(node.name)
    if module is None:
        raise RecordError(f"{where}: the model has no such layer.{did_you_mean(node.name, list(modules))}")
    known = node_type(module)
    if known == PARAMETER or (node.kind is not None and node.kind not in (known, "MatMul")):
        raise RecordError(f"{where}: the record says {node.kind}, the model has {type(module).__name__}")
    inputs, outputs = channel_counts(module)
    follows = _follows_input(module)
    cut = cuts.setdefault(node.name, _ModuleCut(module))
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


def channel_counts(module: nn.Module) -> tuple[int, int]:
    """The numbers of input and output channels of a module that can be cut."""
    for names in (("in_channels", "out_channels"), ("in_features", "out_features")):
        if hasattr(module, names[0]):
            return int(getattr(module, names[0])), int(getattr(module, names[1]))
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return int(module.normalized_shape[-1]), int(module.normalized_shape[-1])
    name = next(
        key for key in ("num_features", "num_channels", "num_parameters", "embedding_dim") if hasattr(module, key)
    )
    return int(getattr(module, name)), int(getattr(module, name))


def _follows_input(module: nn.Module) -> bool:
    """Whether the output channels of a module are its input channels: normalizations, depthwise convolutions."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.groups == module.in_channels and module.groups > 1
    return not isinstance(module, nn.Linear)


def _positions(node: PruneNode, size: int, where: str) -> list[int]:
    """The positions that a node removes from an axis, checked."""
    repeat = axis_attribute(node, REPEAT) or 1
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
    return [index * repeat + offset for index in node.prune_index for offset in range(repeat)]


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
