"""Folds batch norms into the layers before them, on a copy of the model. The outputs are unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from amct.model import Folded, FusionPattern, Node, fold_batch_norms
from amct.model.kinds import KIND_OF_TORCH_TYPE
from amct.numerics.fold import ChannelAffine, fold_after
from amct.pytorch.capture.layer_types import BATCH_NORMS, layer_type
from amct.pytorch.model_copy import copy_model

if TYPE_CHECKING:
    from collections.abc import Collection

    from amct.pytorch.capture.trace import Traced

_HEADS = frozenset(name for name, kind in KIND_OF_TORCH_TYPE.items() if kind.folds_batch_norm)
PATTERN = FusionPattern(heads=_HEADS, stages=(frozenset(BATCH_NORMS),))
Fused = Folded[nn.Module]
"""A folded copy of the model in eval mode; layers and batch norms are named by their module path."""


def fuse(traced: Traced, *, do_fusion: bool = True, skip: Collection[str] = ()) -> Fused:
    """Copy the model and fold every batch norm that is the only reader of a convolution's or linear layer's output.

    A folded batch norm becomes nn.Identity; a layer without bias gets one. Batch norms that are not folded are reported
    with the reason. The model may be in train mode; the copy is in eval mode.

    Args:
        traced: the model.
        do_fusion: False only copies.
        skip: layers (or batch norms) that are not folded, AMCT's ``skip_fusion_layers``.

    Raises:
        ModelError: the model cannot be copied.
    """
    model = copy_model(traced.model)
    if not do_fusion:
        return Fused.unchanged(model, _batch_norms(model), "do_fusion is false")
    if traced.graph is None:
        reason = f"what reads which tensor is unknown, because the model cannot be captured ({traced.failure})"
        return Fused.unchanged(model, _batch_norms(model), reason)
    shared = _shared_parameters(model)

    def refuse(head: Node, norm: Node) -> str | None:
        return _refusal(model, head, norm, shared)

    def fold(head: Node, norm: Node) -> None:
        _fold(model, head, norm)

    fusions, skips = fold_batch_norms(traced.graph, PATTERN, fold, skip=skip, refuse=refuse)
    return Fused(model=model, fusions=fusions, skips=skips)


def _refusal(model: nn.Module, head: Node, norm_node: Node, shared: Collection[int]) -> str | None:
    layer, norm = model.get_submodule(_path(head)), model.get_submodule(_path(norm_node))
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    for node in (head, norm_node):
        if node.attributes["calls"] != 1:
            return f'"{_path(node)}" is called {node.attributes["calls"]} times'
    return _norm_problem(norm, norm_node) or _layer_problem(layer, head, shared) or _shape_problem(layer, norm, head)


def _norm_problem(norm: nn.modules.batchnorm._BatchNorm, node: Node) -> str | None:
    if norm.running_mean is None or norm.running_var is None:
        return "it keeps no running statistics (track_running_stats=False)"
    if not norm.affine:
        return "it has no weight and bias (affine=False)"
    return None if node.attributes["exact"] else f"{node.attributes['class']} does more than normalize"


def _layer_problem(layer: nn.Module, node: Node, shared: Collection[int]) -> str | None:
    padding_mode = getattr(layer, "padding_mode", "zeros")
    if padding_mode != "zeros":
        return f'padding_mode of "{node.name}" is "{padding_mode}"'
    if not node.attributes["exact"]:
        return f'"{node.name}" ({node.attributes["class"]}) computes its weight or changes its output'
    if any(id(parameter) in shared for parameter in layer.parameters(recurse=False)):
        return f'"{node.name}" shares its weight with another module'
    return None


def _shape_problem(layer: nn.Module, norm: nn.modules.batchnorm._BatchNorm, head: Node) -> str | None:
    """Why the shapes prevent folding: a batch norm works along axis 1, which must be the output channels."""
    shapes = head.attributes["shapes"]
    assert isinstance(shapes, tuple)
    rank = len(shapes[0])
    entry = layer_type(head.op)
    if rank != ((entry and entry.input_rank) or 2):
        return f'"{head.name}" makes {rank} dimensions; its channels are not on axis 1, where the batch norm reads them'
    channels = getattr(layer, "out_channels", getattr(layer, "out_features", None))
    if channels != norm.num_features:
        return f'"{head.name}" has {channels} outputs, the batch norm {norm.num_features}'
    return None


def _fold(model: nn.Module, head: Node, norm_node: Node) -> None:
    """Fold one pair in place; a non-finite result raises an error and leaves both unchanged."""
    layer, norm = model.get_submodule(_path(head)), model.get_submodule(_path(norm_node))
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, torch.Tensor)
    assert bias is None or isinstance(bias, torch.Tensor)
    affine = ChannelAffine.batch_norm(norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    kind = KIND_OF_TORCH_TYPE[head.op].weight_kind
    folded = fold_after(weight, bias, kind, getattr(layer, "groups", 1), affine)
    for name, value in zip(("weight", "bias"), folded, strict=True):
        layer.register_parameter(name, nn.Parameter(value, requires_grad=weight.requires_grad))
    _replace(model, _path(norm_node), nn.Identity())


def _replace(model: nn.Module, path: str, replacement: nn.Module) -> None:
    """Replace the module of that path wherever it is registered."""
    old = model.get_submodule(path)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children would omit a second name of the same module
            if child is old:
                setattr(parent, name, replacement.eval())


def _shared_parameters(model: nn.Module) -> set[int]:
    """The ids of parameters that more than one module holds."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _batch_norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def _path(node: Node) -> str:
    return str(node.attributes["module"])
