"""What a Caffe layer can be asked for: the rules a ``.cfg`` override and a JSON block are held to alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.config.ptq.caffe_types import CAFFE_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from amct.config.layers import LayerInfo

ACTIVATION_BITS = range(8, 17)
WEIGHT_BITS = {"arq_quantize": 8, "snq_quantize": 4}


def illegal_activation_bits(activation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A bit width no activation can have: the key and what is wrong."""
    if (bits := activation.get("num_bits", 8)) not in ACTIVATION_BITS:
        yield "num_bits", f"activations can have 8 to 16 bits, got {bits}"


def illegal_weight_bits(weight: Mapping[str, Any], algorithm: str) -> Iterator[tuple[str, str]]:
    """A bit width the weight algorithm does not have: the key and what is wrong."""
    only = WEIGHT_BITS[algorithm]
    if (bits := weight.get("num_bits", only)) != only:
        yield "num_bits", f"{algorithm} gives weights {only} bits, got {bits}"


def unsupported_weight(
    who: str, layer: LayerInfo, weight: Mapping[str, Any], algorithm: str
) -> Iterator[tuple[str, str]]:
    """What was asked for exactly this layer or type and cannot be done: the key (or "") and what is wrong."""
    capability = CAFFE_TYPES[layer.type]
    if weight.get("channel_wise") is True and is_per_tensor(layer):
        what = "AVE pooling" if layer.average_pooling else layer.type
        yield "channel_wise", f"{who}: channel_wise must be false, {what} has no channels of its own"
    if algorithm == "snq_quantize" and capability.weights and not capability.snq:
        allowed = ", ".join(name for name, item in CAFFE_TYPES.items() if item.snq)
        yield "", f"{who}: snq_quantize is only for {allowed}. Use arq_quantize."


def is_per_tensor(layer: LayerInfo) -> bool:
    """Whether a layer can only be quantized with one scale for all channels."""
    capability = CAFFE_TYPES[layer.type]
    return layer.average_pooling or (capability.weights and not capability.channel_wise)
