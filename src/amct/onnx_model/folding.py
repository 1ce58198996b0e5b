"""Folds batch norms, and sums and products with constants, into the layers before them.

The outputs change by rounding errors only.

The layer takes over the output name of the batch norm, so that every tensor that exists in both models has the same
values in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.layer import owned_name, replace_weight
from amct.export.onnx.layer_lookup import LayerBinding, LayerMismatchError, find_layer
from amct.export.onnx.messages import attribute_value
from amct.model import Folded, FusionPattern, Node, fold_batch_norms
from amct.model.operators import BATCH_NORM, WITH_BIAS
from amct.numerics.fold import ChannelAffine, fold_after
from amct.onnx_model.layers import topology

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from amct.export.onnx.kept_weights import KeptWeights
    from amct.export.onnx.layer import OnnxLayer

_PATTERN = FusionPattern(heads=WITH_BIAS, stages=(frozenset({BATCH_NORM}),))
_PARTS = ("scale", "B", "mean", "var")


def fold(
    model: ModelProto, *, do_fusion: bool = True, skip: Collection[str] = (), kept: KeptWeights | None = None
) -> Folded[ModelProto]:
    """Fold every batch norm that is the only reader of a convolution or Gemm; report each other one with the reason.

    Add, Sub, Mul and Div with a constant per channel are folded in the same way, before the batch norms.

    Args:
        model: its nodes have unique names; it is not changed.
        do_fusion: False folds nothing.
        skip: layers (or batch norms) that are not folded, AMCT's ``skip_fusion_layers``.
        kept: takes the large weights that change; None: they are in the message.
    """
    if not do_fusion:
        norms = [node.name for node in model.graph.node if node.op_type == BATCH_NORM]
        return Folded.unchanged(model, norms, "do_fusion is false")
    graph = OnnxGraph(model, kept)
    constants = _fold_constants(graph, skip)

    def refuse(head: Node, norm: Node) -> str | None:
        return _refusal(graph, graph.node(head.name), graph.node(norm.name))

    def fold_one(head: Node, norm: Node) -> None:
        _fold_one(graph, graph.node(head.name), graph.node(norm.name))

    if constants:
        model = graph.build()
        graph = OnnxGraph(model, kept)
    fusions, skips = fold_batch_norms(topology(model), _PATTERN, fold_one, skip=skip, refuse=refuse)
    return Folded(model=graph.build(), fusions={**constants, **fusions}, skips=skips)


def _refusal(graph: OnnxGraph, head: NodeProto, norm: NodeProto) -> str | None:
    if attribute_value(norm, "training_mode", 0):
        return "it is in training mode"
    if norm.input[0] != head.output[0]:
        return f'"{head.name}" makes one of its parameters'
    if any(norm.output[1:]):
        return "its statistics are outputs"
    layer = _layer(graph, head)
    if isinstance(layer, str):
        return f'of "{head.name}": {layer}'
    for part, name in zip(_PARTS, norm.input[1:], strict=True):
        value = graph.constant(name)
        if value is None:
            return f'its {part} "{name}" is computed'
        if value.shape != (layer.channels_out,):
            return f'"{head.name}" has {layer.channels_out} outputs, its {part} the shape {list(value.shape)}'
    return None


# -- sums and products with constants ----------------------------------------------------------------------------------


def _fold_constants(graph: OnnxGraph, skip: Collection[str]) -> dict[str, str]:
    """Fold sums and products with constants; returns by layer the last node that was folded into it."""
    folded: dict[str, str] = {}
    for head in [node for node in graph.nodes if node.op_type in WITH_BIAS and node.name not in skip]:
        while (node := graph.only_consumer(head.output[0])) is not None and node.name not in skip:
            layer = _layer(graph, head)
            affine = None if isinstance(layer, str) else _constant_affine(graph, layer, node)
            if affine is None:
                break
            assert not isinstance(layer, str)
            _apply(graph, layer, affine)
            graph.take_output(head, node)
            folded[head.name] = node.name
    return folded


def _constant_affine(graph: OnnxGraph, layer: OnnxLayer, node: NodeProto) -> ChannelAffine | None:
    """What a node does with the output of a layer; None if that is not the same for all values of a channel."""
    if node.op_type not in ("Add", "Sub", "Mul", "Div") or layer.weight is None:
        return None
    place = list(node.input).index(layer.node.output[0])
    constant = graph.constant(node.input[1 - place]) if node.input[0] != node.input[1] else None
    values = None if constant is None else _per_channel(constant, layer)
    if values is None:
        return None
    ones = torch.ones_like(values)
    if node.op_type == "Add":
        return ChannelAffine(ones, values)
    if node.op_type == "Sub":
        return ChannelAffine(ones, -values) if place == 0 else ChannelAffine(-ones, values)
    if node.op_type == "Mul":
        return ChannelAffine(values, 0 * ones)
    return ChannelAffine(1 / values, 0 * ones) if place == 0 and bool((values != 0).all()) else None


def _per_channel(constant: NDArray[Any], layer: OnnxLayer) -> torch.Tensor | None:
    """A constant as float64 ``[Cout]``; None if it differs inside a channel, changes the shape or is not finite."""
    assert layer.weight is not None
    rank = layer.weight.ndim  # also that of the output
    axis = rank - constant.ndim
    shape = [1] * axis + list(constant.shape)
    if axis < 0 or constant.dtype != layer.weight.dtype or not np.isfinite(constant).all():
        return None
    if any(size != 1 for place, size in enumerate(shape) if place != 1) or shape[1] not in (1, layer.channels_out):
        return None
    values = torch.from_numpy(np.array(constant, dtype=np.float64)).reshape(-1)
    return values.expand(layer.channels_out).clone()


def _layer(graph: OnnxGraph, head: NodeProto) -> OnnxLayer | str:
    try:
        return find_layer(graph, LayerBinding.of(head))
    except LayerMismatchError as error:
        return error.reason


def _fold_one(graph: OnnxGraph, head: NodeProto, norm: NodeProto) -> None:
    layer = _layer(graph, head)
    assert not isinstance(layer, str)  # checked by _refusal
    assert layer.weight is not None
    scale, shift, mean, variance = (_tensor(graph.constant(name)) for name in norm.input[1:])
    affine = ChannelAffine.batch_norm(mean, variance, float(attribute_value(norm, "epsilon", 1e-5)), scale, shift)
    _apply(graph, layer, affine)
    graph.take_output(head, norm)


def _apply(graph: OnnxGraph, layer: OnnxLayer, affine: ChannelAffine) -> None:
    """Change the weight and bias of a layer so that it also computes an affine function of its output."""
    assert layer.weight is not None
    head = layer.node
    old_bias = None if layer.bias is None else _tensor(layer.bias)
    weight, bias = fold_after(_tensor(layer.weight), old_bias, layer.kind.weight_kind, layer.groups, affine)
    replace_weight(graph, layer, weight.numpy())
    name = f"{head.name}.bias"
    name = owned_name(graph, head, 2, name) if layer.bias is not None else graph.fresh_name(name)
    graph.set_initializer(name, bias.numpy())
    graph.set_input(head, 2, name)


def _tensor(array: NDArray[np.floating] | None) -> torch.Tensor:
    assert array is not None  # checked by _refusal
    return torch.from_numpy(np.array(array))
