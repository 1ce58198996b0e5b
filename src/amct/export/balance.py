"""DMQ in exported files: the layer's input is multiplied by 1/factor, channel by channel, in front of its quantizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from amct.export.binding import LayerKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amct.export.graph import OnnxGraph
    from amct.export.layer import Layer


def insert_balance(graph: OnnxGraph, layer: Layer, tensor: str, dtype: type[np.floating] = np.float32) -> str:
    """Insert ``<layer>.mul`` behind ``tensor`` when the layer has DMQ factors; returns the tensor to quantize."""
    if layer.factors.balance is None:
        return tensor
    inverse = (1.0 / layer.factors.balance).astype(dtype).reshape(_shape(layer))
    constant = graph.add_constant(f"{layer.name}.tensor_balance_factor", inverse)
    return graph.add_node("Mul", f"{layer.name}.mul", [tensor, constant])


def _shape(layer: Layer) -> list[int]:
    """Where the channels of the layer's input are: axis 1, or the last axis of linear and recurrent layers."""
    assert layer.weight is not None
    if layer.kind is LayerKind.LINEAR:
        return [1, -1]
    if layer.kind.is_recurrent:
        return [1, 1, -1]
    return [1, -1, *[1] * (layer.weight.ndim - 2)]


def along_channels(layer: Layer, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values per output channel, shaped to multiply the layer's result: ``[1, -1, 1, 1]`` or ``[1, -1]``."""
    if layer.weight is None or layer.kind is LayerKind.LINEAR:
        return values.reshape(1, -1)
    return values.reshape(1, -1, *[1] * (layer.weight.ndim - 2))
