"""Rewrites of the float graph before it is quantized: the same values, computed faster or with less loss.

* **Means over the positions of a picture**, as squeeze-and-excitation blocks and classifiers compute them, are written
  as ReduceMean, which onnxruntime computes in float only; a GlobalAveragePool computes the same in integers.
* **Zeros that a Pad adds before a convolution**, as TensorFlow and models converted from it write them: a convolution
  adds them itself, on each side as many as wanted, without a copy of its input. A quantizer has an integer for zero, so
  it does not matter whether the zeros are added before it or behind it.
* **Sums before a LayerNorm** (BERT and its kin): onnxruntime fuses Add and LayerNormalization to a
  SkipLayerNormalization, which on CPUs adds value by value: four to seven times as long as both operators apart. A Sum
  of two tensors computes the same as their Add and is not fused.
* **Balance factors**: a layer's input is divided by them, channel by channel, before it is quantized: by a Mul or,
  where a layer is the only source of the input, in the weights of that layer. Dividing its weight scales and bias gives
  the same integers without a node. The factors come from the record (DMQ) or, for placement ``fast`` only, from the
  calibration of the inputs of linear layers.

The first three are for placement ``fast``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from onnx import TensorProto

from amct.export.onnx.layer_lookup import is_zero_pad
from amct.export.onnx.messages import attribute_value
from amct.export.qdq.tensor_values import is_computed_sum, normalizations
from amct.model.kinds import LayerKind
from amct.model.operators import LAYER_NORM_READERS, WITH_BIAS
from amct.numerics.arq import channels_first, from_channels_first
from amct.numerics.qparams import LayerQParams, QParams

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import NodeProto

    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import OnnxLayer
    from amct.export.qdq.placement import FastPlacement, InputToQuantize
    from amct.numerics.qparams import Observed

_PICTURE = 4  # [sample, channel, row, column]
_RANK = 3  # [sample, position, channel]; others are not fused


def means_to_pooling(graph: OnnxGraph) -> None:
    """Turn each ReduceMean over rows and columns that keeps its axes into a GlobalAveragePool, in place."""
    for node in graph.nodes:
        if node.op_type == "ReduceMean" and _is_mean_of_positions(graph, node):
            node.op_type = "GlobalAveragePool"
            graph.set_inputs(node, node.input[:1])
            for name in ("axes", "keepdims", "noop_with_empty_axes"):
                graph.drop_attribute(node, name)


def _is_mean_of_positions(graph: OnnxGraph, node: NodeProto) -> bool:
    axes = attribute_value(node, "axes", None)  # an input since opset 18
    if len(node.input) > 1 and node.input[1]:
        constant = graph.constant(node.input[1])
        axes = None if constant is None else constant.reshape(-1).tolist()
    if axes is None or graph.rank(node.input[0]) != _PICTURE or attribute_value(node, "keepdims", 1) != 1:
        return False
    return sorted(axis % _PICTURE for axis in axes) == [2, 3]


def merge_pads(graph: OnnxGraph, layers: Sequence[OnnxLayer], inputs: Mapping[str, InputToQuantize]) -> None:
    """Merge each zero Pad into the convolution that alone reads it, in place.

    A Pad stays if its input is read by other layers with other factors: it would have to be quantized once more.
    """
    for pad in [node for node in graph.nodes if node.op_type == "Pad"]:
        reader = graph.only_consumer(pad.output[0])
        readers = [inputs[layer.name] for layer in layers if layer.reader.input[0] in (pad.input[0], pad.output[0])]
        if reader is None or not _is_convolution_of(reader, pad) or not _agree(readers):
            continue
        amounts = _amounts(graph, pad, reader)
        if amounts is None:
            continue
        graph.set_input(reader, 0, pad.input[0])
        graph.set_attribute(reader, "pads", amounts)
        graph.drop_attribute(reader, "auto_pad")
        graph.remove_node(pad)


def _is_convolution_of(reader: NodeProto, pad: NodeProto) -> bool:
    own = attribute_value(reader, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return reader.op_type == "Conv" and own and list(reader.input).index(pad.output[0]) == 0


def _agree(readers: Sequence[InputToQuantize]) -> bool:
    """Whether all layers that read the input or the output of a Pad have the same parameters."""
    if len(readers) < 2:
        return True
    bits, source = readers[0].bits, readers[0].source
    return all(not each.is_balanced and each.bits == bits and each.source.is_like(source) for each in readers)


def _amounts(graph: OnnxGraph, pad: NodeProto, convolution: NodeProto) -> list[int] | None:
    """The zeros before and behind each place that a convolution and the Pad before it add; None if it cannot."""
    given = graph.constant(pad.input[1])
    weight = graph.rank(convolution.input[1])
    if given is None or weight is None or not is_zero_pad(graph, pad):
        return None
    axes = list(range(weight))
    if len(pad.input) > 3 and pad.input[3]:
        named = graph.constant(pad.input[3])
        if named is None:
            return None
        axes = [int(axis) % weight for axis in named]
    added = given.reshape(2, -1).tolist()
    before, behind = (dict(zip(axes, side, strict=True)) for side in added)
    if any(amount < 0 or (axis < 2 and amount) for side in (before, behind) for axis, amount in side.items()):
        return None
    own = attribute_value(convolution, "pads", [0] * (2 * (weight - 2)))
    wanted = [side.get(axis, 0) for side in (before, behind) for axis in range(2, weight)]
    return [one + other for one, other in zip(own, wanted, strict=True)]


def keep_sums_apart(graph: OnnxGraph) -> None:
    """Turn each Add of computed tensors whose only reader is a LayerNorm into a Sum, in place."""
    for _, tensor in list(normalizations(graph)):
        node = graph.producer(tensor)
        if node is None or node.op_type != "Add" or not is_computed_sum(graph, node):
            continue
        fused = graph.rank(tensor) in (_RANK, None) and graph.element_type(tensor) == TensorProto.FLOAT
        readers = {reader.op_type for reader in graph.consumers(tensor)}
        if fused and readers <= LAYER_NORM_READERS and not graph.is_output(tensor) and not graph.is_captured(tensor):
            node.op_type = "Sum"


# -- balance -----------------------------------------------------------------------------------------------------------


def insert_balance(graph: OnnxGraph, layer: OnnxLayer, tensor: str, dtype: type[np.floating] = np.float32) -> str:
    """Insert ``<layer>.mul`` behind ``tensor`` if the layer has DMQ factors; returns the tensor to quantize."""
    if layer.qparams.balance is None:
        return tensor
    inverse = (1.0 / layer.qparams.balance.numpy()).astype(dtype).reshape(_shape(layer, graph.rank(tensor)))
    constant = graph.add_constant(f"{layer.name}.tensor_balance_factor", inverse)
    return graph.add_node("Mul", f"{layer.name}.mul", [tensor, constant])


def folded_balance(graph: OnnxGraph, layers: Sequence[OnnxLayer], balanced: Collection[str]) -> dict[str, str]:
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


def fold_balance(graph: OnnxGraph, layers: Sequence[OnnxLayer]) -> list[OnnxLayer]:
    """Fold balance factors into the layers that compute the balanced tensors."""
    current = {layer.name: layer for layer in layers}
    balanced = [layer.name for layer in layers if layer.qparams.balance is not None]
    for name, source in folded_balance(graph, layers, balanced).items():
        balance = current[name].qparams.balance
        assert balance is not None
        current[source] = _divided(current[source], balance.numpy())
        current[name] = replace(current[name], given=replace(current[name].qparams, balance=None))
    return list(current.values())


def balance_inputs(
    layers: Sequence[OnnxLayer], placed: FastPlacement, tensors: Mapping[str, Observed]
) -> list[OnnxLayer]:
    """Balance the linear layers whose input has factors from calibration; each then gets its own quantizer.

    Only inputs computed in float are balanced: an input that is already integer has lost the precision to be gained.
    """
    balanced = []
    for layer in layers:
        tensor = layer.reader.input[0]
        found = tensors.get(tensor)
        if found is None or tensor not in placed.quantized_for_readers or not _can_be_balanced(layer, found):
            balanced.append(layer)
            continue
        placed.uncover(tensor, layer)
        assert layer.weight is not None
        assert found.balance is not None
        weight = layer.weight * found.balance.numpy()
        one_scale = np.abs(weight).max(keepdims=True).reshape(1) / np.float32(127)  # record scales do not fit here
        qparams = LayerQParams(
            inputs={0: found},
            weights=(QParams.symmetric(torch.from_numpy(one_scale)),),
            balance=found.balance,
            mean=None if layer.qparams.mean is None else layer.qparams.mean / found.balance,
            lost=layer.qparams.lost,
        )
        balanced.append(replace(layer, weight=weight, given=qparams))
    return balanced


def _can_be_balanced(layer: OnnxLayer, found: Observed) -> bool:
    eight_bits = layer.qparams.input.bits == layer.qparams.weight.bits == found.bits == 8
    if layer.qparams.balance is not None or not eight_bits or layer.kind is not LayerKind.LINEAR:
        return False
    return found.balance is not None and found.balance.numel() == layer.channels_in


def _sole_source(graph: OnnxGraph, layer: OnnxLayer, layers: dict[int, OnnxLayer]) -> OnnxLayer | None:
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


def _divided(layer: OnnxLayer, divisor: NDArray[np.float32]) -> OnnxLayer:
    """A layer with divided output channels: the same integers with smaller scales."""
    assert layer.weight is not None
    kind = layer.kind.weight_kind
    rows = channels_first(torch.tensor(layer.weight), kind, layer.groups) / torch.from_numpy(divisor)[:, None]
    weight = from_channels_first(rows, layer.weight.shape, kind, layer.groups).numpy()
    scales = np.broadcast_to(layer.row_scales(), divisor.shape) / divisor
    bias = None if layer.bias is None else layer.bias / divisor
    lost = None if layer.qparams.lost is None else layer.qparams.lost / torch.from_numpy(divisor)
    weights = (replace(layer.qparams.weight, scale=torch.from_numpy(scales)),)
    qparams = replace(layer.qparams, weights=weights, lost=lost)
    return replace(layer, weight=weight, bias=bias, given=qparams, rescaled=True)


def _shape(layer: OnnxLayer, axes: int | None) -> list[int]:
    """The shape of factors along the input channels: axis 1, or the last axis of linear and recurrent layers.

    An input of a linear layer may have this axis only (``axes``); factors of two would give it another.
    """
    assert layer.weight is not None
    if layer.kind is LayerKind.LINEAR:
        return [-1] if axes == 1 else [1, -1]
    if layer.kind.is_recurrent:
        return [1, 1, -1]
    return [1, -1, *[1] * (layer.weight.ndim - 2)]


def along_channels(layer: OnnxLayer, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reshape values per output channel to multiply the layer's output: ``[1, -1, 1, 1]`` or ``[1, -1]``."""
    if layer.weight is None or layer.kind is LayerKind.LINEAR:
        return values.reshape(1, -1)
    return values.reshape(1, -1, *[1] * (layer.weight.ndim - 2))
