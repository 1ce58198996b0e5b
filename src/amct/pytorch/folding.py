"""Folds batch norms into the layers before them, on a copy of the model. The outputs are unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from amct.model import Folded, FusionPattern, Node, fold_batch_norms
from amct.model.kinds import KIND_OF_TORCH_TYPE
from amct.numerics.fold import ChannelAffine, fold_after
from amct.pytorch.capture.functional_layers import layer_module
from amct.pytorch.capture.layer_types import BATCH_NORMS, layer_type
from amct.pytorch.capture.program_graph import call_name
from amct.pytorch.user_model import copy_model

if TYPE_CHECKING:
    from collections.abc import Collection

    from amct.model import Graph
    from amct.pytorch.capture.trace import Traced

_HEADS = frozenset(name for name, kind in KIND_OF_TORCH_TYPE.items() if kind.folds_batch_norm)
PATTERN = FusionPattern(heads=_HEADS, stages=(frozenset(BATCH_NORMS),))
Fused = Folded[nn.Module]
"""A folded copy of the model in eval mode; layers and batch norms are named by their module path."""


def fuse(traced: Traced, *, do_fusion: bool = True, skip: Collection[str] = ()) -> Fused:
    """Copy the model and fold every batch norm that is the only reader of a convolution's or linear layer's output.

    A layer that is called several times takes a batch norm that reads the output of each of its calls.
    A folded batch norm becomes nn.Identity; a subclass that does more after normalizing (an activation) keeps the rest.
    A layer without bias gets one. Batch norms that are not folded are reported with the reason. The model may be in
    train mode; the copy is in eval mode.

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
    places = _places(model)
    graph = traced.graph

    def refuse(head: Node, norm: Node) -> str | None:
        pairs = _pairs_of_calls(traced, graph, head, norm)
        problems = (_refusal(model, *pair, shared) for pair in pairs)
        return _call_problem(head, norm) if not pairs else next((problem for problem in problems if problem), None)

    def fold(head: Node, norm: Node) -> None:
        if head.name == _path(head):  # once, not for each call
            _fold(model, head, norm, places)

    fusions, skips = fold_batch_norms(graph, PATTERN, fold, skip=skip, refuse=refuse)
    once = {layer: norm for layer, norm in fusions.items() if layer == _path(graph[layer])}
    return Fused(model=model, fusions=once, skips=skips)


def _pairs_of_calls(traced: Traced, graph: Graph, head: Node, norm: Node) -> list[tuple[Node, Node]]:
    """Every call of a layer with the call of the batch norm that reads it; empty if some call has no such partner."""
    if head.attributes["calls"] == norm.attributes["calls"] == 1:
        return [(head, norm)]
    facts = traced.layers.get(_path(head))
    if facts is None or facts.calls != norm.attributes["calls"]:
        return []
    pairs = []
    for call in range(facts.calls):
        layer = graph[call_name(_path(head), call)]
        reader = graph.sole_consumer(layer)
        if reader is None or reader.name != call_name(_path(norm), call):
            return []
        pairs.append((layer, reader))
    return pairs


def _call_problem(head: Node, norm: Node) -> str:
    node = head if head.attributes["calls"] != 1 else norm
    return f'"{_path(node)}" is called {node.attributes["calls"]} times'


def _refusal(model: nn.Module, head: Node, norm_node: Node, shared: Collection[int]) -> str | None:
    layer, norm = layer_module(model, _path(head)), model.get_submodule(_path(norm_node))
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    return (
        _norm_problem(norm, norm_node)
        or _layer_problem(layer, head, shared)
        or _shape_problem(layer, norm, head)
        or _reader_problem(head)
        or _reader_problem(norm_node)
    )


def _reader_problem(node: Node) -> str | None:
    """Why other readers of a module's parameters prevent folding: they need the values that folding changes."""
    place = node.attributes["read_elsewhere"]
    return None if place is None else f'parameters of "{_path(node)}" are also read elsewhere ({place})'


def _norm_problem(norm: nn.modules.batchnorm._BatchNorm, node: Node) -> str | None:
    if norm.running_mean is None or norm.running_var is None:
        return "it keeps no running statistics (track_running_stats=False)"
    if not norm.affine:
        return "it has no weight and bias (affine=False)"
    if node.attributes["exact"] or node.attributes["normalizes_first"]:
        return None
    return f"{node.attributes['class']} changes its input before it normalizes, or reads it elsewhere"


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


def _fold(model: nn.Module, head: Node, norm_node: Node, places: _Places) -> None:
    """Fold one pair in place; a non-finite result raises an error and leaves both unchanged."""
    norm, layer = model.get_submodule(_path(norm_node)), cast("Any", layer_module(model, _path(head)))
    kind, requires_grad = KIND_OF_TORCH_TYPE[head.op].weight_kind, layer.weight.requires_grad
    folded = fold_after(layer.weight, layer.bias, kind, getattr(layer, "groups", 1), norm_affine(norm))
    for name, value in zip(("weight", "bias"), folded, strict=True):
        layer.register_parameter(name, nn.Parameter(value, requires_grad=requires_grad))
    if norm_node.attributes["exact"]:
        identity = nn.Identity().eval()
        for parent, name in places[id(norm)]:
            setattr(parent, name, identity)
    else:
        _neutralize(norm)


def norm_affine(norm: Any) -> ChannelAffine:  # noqa: ANN401  torch's types allow a batch norm without statistics
    """What a batch norm does to each channel in eval mode."""
    return ChannelAffine.batch_norm(norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)


def _neutralize(norm: Any) -> None:  # noqa: ANN401  as above
    """Let a batch norm that does more (an activation) pass its input on unchanged: (x - 0) / sqrt(1 + 0) · 1 + 0."""
    norm.eps = 0.0
    with torch.no_grad():
        for tensor, value in ((norm.running_mean, 0), (norm.running_var, 1), (norm.weight, 1), (norm.bias, 0)):
            tensor.fill_(value)


_Places = dict[int, list[tuple[nn.Module, str]]]


def _places(model: nn.Module) -> _Places:
    """By the id of each module: its parents, and the names under which they have it."""
    found: _Places = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children would omit a second name of the same module
            found.setdefault(id(child), []).append((parent, name))
    return found


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
