"""Balance factors in exported files: a layer's input is divided by them, channel by channel, before it is quantized.

Either by a Mul before the quantizer or, where a layer is the only source of the input, in the weights of that layer:
dividing its weight scales and bias gives the same integers without a node. The factors come from the record (DMQ)
or, for placement ``fast`` only, from the calibration of the inputs of linear layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.model.kinds import LayerKind
from amct.model.operators import WITH_BIAS
from amct.numerics.arq import channels_first, from_channels_first
from amct.numerics.qparams import LayerQParams, QParams

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import Layer
    from amct.export.qdq.placement import FastPlacement
    from amct.numerics.qparams import Observed


def insert_balance(graph: OnnxGraph, layer: Layer, tensor: str, dtype: type[np.floating] = np.float32) -> str:
    """Insert ``<layer>.mul`` behind ``tensor`` if the layer has DMQ factors; returns the tensor to quantize."""
    if layer.qparams.balance is None:
        return tensor
    inverse = (1.0 / layer.qparams.balance.numpy()).astype(dtype).reshape(_shape(layer, graph.rank(tensor)))
    constant = graph.add_constant(f"{layer.name}.tensor_balance_factor", inverse)
    return graph.add_node("Mul", f"{layer.name}.mul", [tensor, constant])


def folded_balance(graph: OnnxGraph, layers: Sequence[Layer], balanced: Collection[str]) -> dict[str, str]:
    """Each of the balanced layers whose input a layer computes that can take its factors, and that layer.

    At most a Relu may be between them.
    """
    by_node = {id(layer.node): layer for layer in layers}
    sources = {layer: _sole_source(graph, layer, by_node) for layer in layers if layer.name in balanced}
    return {
        layer.name: source.name
        for layer, source in sources.items()
        if source is not None and source.channels_out == layer.channels_in
    }


def fold_balance(graph: OnnxGraph, layers: Sequence[Layer]) -> list[Layer]:
    """Fold balance factors into the layers that compute the balanced tensors."""
    current = {layer.name: layer for layer in layers}
    balanced = [layer.name for layer in layers if layer.qparams.balance is not None]
    for name, source in folded_balance(graph, layers, balanced).items():
        balance = current[name].qparams.balance
        assert balance is not None
        current[source] = _divided(current[source], balance.numpy())
        current[name] = replace(current[name], given=replace(current[name].qparams, balance=None))
    return list(current.values())


def balance_inputs(layers: Sequence[Layer], placed: FastPlacement, tensors: Mapping[str, Observed]) -> list[Layer]:
    """Balance the linear layers whose input has factors from calibration; each then gets its own quantizer.

    Only inputs computed in float are balanced: an input that is already integer has lost the precision to be gained.
    """
    balanced = []
    for layer in layers:
        tensor = layer.reader.input[0]
        found = tensors.get(tensor)
        if found is None or tensor not in placed.float_tensors or not _can_be_balanced(layer, found):
            balanced.append(layer)
            continue
        placed.uncover(tensor, layer)
        assert layer.weight is not None
        assert found.balance is not None
        weight = layer.weight * found.balance.numpy()
        one_scale = np.abs(weight).max(keepdims=True).reshape(1) / np.float32(127)  # record scales do not fit here
        qparams = LayerQParams(
            inputs={0: found}, weights=(QParams.symmetric(torch.from_numpy(one_scale)),), balance=found.balance
        )
        balanced.append(replace(layer, weight=weight, given=qparams))
    return balanced


def _can_be_balanced(layer: Layer, found: Observed) -> bool:
    eight_bits = layer.qparams.input.bits == layer.qparams.weight.bits == found.bits == 8
    if layer.qparams.balance is not None or not eight_bits or layer.kind is not LayerKind.LINEAR:
        return False
    return found.balance is not None and found.balance.numel() == layer.channels_in


def _sole_source(graph: OnnxGraph, layer: Layer, layers: dict[int, Layer]) -> Layer | None:
    """The layer whose output, possibly through a Relu, is read only by ``layer``; else None."""
    tensor = layer.node.input[0]
    if graph.only_consumer(tensor) is None:
        return None
    producer = graph.producer(tensor)
    if producer is not None and producer.op_type == "Relu" and graph.only_consumer(producer.input[0]) is not None:
        producer = graph.producer(producer.input[0])
    source = layers.get(id(producer))
    same_channels = source is not None and (source.kind in _SPATIAL) == (layer.kind in _SPATIAL)
    return source if same_channels and source is not None and source.node.op_type in WITH_BIAS else None


_SPATIAL = (LayerKind.CONV, LayerKind.CONV_TRANSPOSE)


def _divided(layer: Layer, divisor: NDArray[np.float32]) -> Layer:
    """A layer with divided output channels: the same integers with smaller scales."""
    assert layer.weight is not None
    kind = layer.kind.weight_kind
    rows = channels_first(torch.tensor(layer.weight), kind, layer.groups) / torch.from_numpy(divisor)[:, None]
    weight = from_channels_first(rows, layer.weight.shape, kind, layer.groups).numpy()
    scales = np.broadcast_to(layer.row_scales(), divisor.shape) / divisor
    bias = None if layer.bias is None else layer.bias / divisor
    qparams = replace(layer.qparams, weights=(replace(layer.qparams.weight, scale=torch.from_numpy(scales)),))
    return replace(layer, weight=weight, bias=bias, given=qparams, rescaled=True)


def _shape(layer: Layer, axes: int | None) -> list[int]:
    """The shape of factors along the input channels: axis 1, or the last axis of linear and recurrent layers.

    An input of a linear layer may have this axis only (``axes``); factors of two would give it another.
    """
    assert layer.weight is not None
    if layer.kind is LayerKind.LINEAR:
        return [-1] if axes == 1 else [1, -1]
    if layer.kind.is_recurrent:
        return [1, 1, -1]
    return [1, -1, *[1] * (layer.weight.ndim - 2)]


def along_channels(layer: Layer, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reshape values per output channel to multiply the layer's output: ``[1, -1, 1, 1]`` or ``[1, -1]``."""
    if layer.weight is None or layer.kind is LayerKind.LINEAR:
        return values.reshape(1, -1)
    return values.reshape(1, -1, *[1] * (layer.weight.ndim - 2))
