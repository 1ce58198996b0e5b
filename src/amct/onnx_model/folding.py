"""Folds batch norms into the layers before them. The outputs change by rounding errors only.

The layer takes over the output name of the batch norm, so that every tensor that exists in both models has the same
values in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.export.binding import LayerBinding, placeholder_factors
from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.layer_lookup import LayerMismatchError, find_layer
from amct.export.onnx.messages import attribute_value
from amct.export.onnx.weights import owned_name, replace_weight
from amct.model import Folded, FusionPattern, Node, fold_batch_norms
from amct.model.kinds import KIND_OF_OPERATOR
from amct.numerics.fold import ChannelAffine, fold_after
from amct.onnx_model.layers import BATCH_NORM, topology

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from amct.export.onnx.layer import Layer

_HEADS = frozenset({"Conv", "ConvTranspose", "Gemm"})  # MatMul has no bias input
_PATTERN = FusionPattern(heads=_HEADS, stages=(frozenset({BATCH_NORM}),))
_PARTS = ("scale", "B", "mean", "var")


def fold(model: ModelProto, *, do_fusion: bool = True, skip: Collection[str] = ()) -> Folded[ModelProto]:
    """Fold every batch norm that is the only reader of a convolution or Gemm; report each other one with the reason.

    Args:
        model: its nodes have unique names; it is not changed.
        do_fusion: False folds nothing.
        skip: layers (or batch norms) that are not folded, AMCT's ``skip_fusion_layers``.
    """
    if not do_fusion:
        norms = [node.name for node in model.graph.node if node.op_type == BATCH_NORM]
        return Folded.unchanged(model, norms, "do_fusion is false")
    graph = OnnxGraph(model)

    def refuse(head: Node, norm: Node) -> str | None:
        return _refusal(graph, graph.node(head.name), graph.node(norm.name))

    def fold_one(head: Node, norm: Node) -> None:
        _fold_one(graph, graph.node(head.name), graph.node(norm.name))

    fusions, skips = fold_batch_norms(topology(model), _PATTERN, fold_one, skip=skip, refuse=refuse)
    return Folded(model=graph.build(), fusions=fusions, skips=skips)


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


def _layer(graph: OnnxGraph, head: NodeProto) -> Layer | str:
    binding = LayerBinding(layer=head.name, kind=KIND_OF_OPERATOR[head.op_type], node=head.name)
    try:
        return find_layer(graph, binding, placeholder_factors())
    except LayerMismatchError as error:
        return error.reason


def _fold_one(graph: OnnxGraph, head: NodeProto, norm: NodeProto) -> None:
    layer = _layer(graph, head)
    assert not isinstance(layer, str)  # checked by _refusal
    assert layer.weight is not None
    scale, shift, mean, variance = (_tensor(graph.constant(name)) for name in norm.input[1:])
    affine = ChannelAffine.batch_norm(mean, variance, float(attribute_value(norm, "epsilon", 1e-5)), scale, shift)
    old_bias = None if layer.bias is None else _tensor(layer.bias)
    weight, bias = fold_after(_tensor(layer.weight), old_bias, layer.kind.weight_kind, layer.groups, affine)
    replace_weight(graph, layer, weight.numpy())
    name = f"{head.name}.bias"
    name = owned_name(graph, head, 2, name) if layer.bias is not None else graph.fresh_name(name)
    graph.set_initializer(name, bias.numpy())
    graph.set_input(head, 2, name)
    graph.take_output(head, norm)


def _tensor(array: NDArray[np.floating] | None) -> torch.Tensor:
    assert array is not None  # checked by _refusal
    return torch.from_numpy(np.array(array))
