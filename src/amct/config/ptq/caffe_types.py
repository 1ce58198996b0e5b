"""The Caffe layer types that can be quantized, as a table, and the rules for what a config can ask of them.

Types with weights: data and weights are quantized. All others: data only. Types marked ``_OFF`` and
``_FOLDED`` get ``quant_enable: false`` in a generated config and are switched on by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from amct.config.layers import LayerInfo


@dataclass(frozen=True, kw_only=True)
class CaffeCapability:
    """What a Caffe layer type can do.

    Attributes:
        weights: The weights are quantized too.
        on_by_default: A generated config quantizes the layer.
        channel_wise: Weights can have a scale per output channel (and do so by default).
        snq: Weights can be quantized non-uniformly.
        fusible: The layer takes part in fusion: others are folded into it, or it into them.
    """

    weights: bool = False
    on_by_default: bool = True
    channel_wise: bool = False
    snq: bool = False
    fusible: bool = False


_WITH_WEIGHTS = {
    "Convolution": CaffeCapability(weights=True, channel_wise=True, snq=True, fusible=True),
    "DepthwiseConv": CaffeCapability(weights=True, channel_wise=True, snq=True, fusible=True),
    "InnerProduct": CaffeCapability(weights=True, snq=True, fusible=True),
    "Deconvolution": CaffeCapability(weights=True, channel_wise=True, snq=True, fusible=True),
    "LSTM": CaffeCapability(weights=True),
    "RNN": CaffeCapability(weights=True),
    "GRU": CaffeCapability(weights=True),
}
_ON = CaffeCapability()
_OFF = CaffeCapability(on_by_default=False)
_FOLDED = CaffeCapability(on_by_default=False, fusible=True)
_DATA_ONLY = {
    "PassThrough": _ON,
    "Pooling": _ON,
    "PSROIPooling": _ON,
    "ROIPooling": _ON,
    "SPP": _ON,
    "Upsample": _ON,
    "Eltwise": _ON,
    "Slice": _ON,
    "Concat": _ON,
    "Softmax": _ON,
    "ROIAlign": _ON,
    "AbsVal": _OFF,
    "BNLL": _ON,
    "CReLU": _ON,
    "ELU": _ON,
    "Exp": _ON,
    "Interp": _ON,
    "Log": _ON,
    "LRN": _ON,
    "Mvm": _ON,
    "Nms": _ON,
    "Normalize": _ON,
    "Power": _ON,
    "PReLU": _OFF,
    "Reduction": _ON,
    "ReLU": _OFF,
    "Sigmoid": _ON,
    "Sort": _ON,
    "Threshold": _ON,
    "Scale": _FOLDED,
    "BatchNorm": _FOLDED,
    "Bias": _FOLDED,
    "Reshape": _ON,
    "Reverse": _ON,
    "ShuffleChannel": _ON,
    "Crop": _ON,
    "Axpy": _ON,
    "Flatten": _ON,
    "Permute": _ON,
    "Tile": _ON,
    "Split": _ON,
    "ArgMax": _ON,
    "Clip": _OFF,
    "Hswish": _ON,
    "MVN": _ON,
    "Reorg": _ON,
    "TanH": _ON,
    "MatMul": _ON,
    "RReLU": _OFF,
    "ReLU6": _OFF,
    "Swish": _OFF,
    "GroupNorm": _ON,
    "ArgMin": _ON,
    "Sqrt": _ON,
    "ReduceSum": _ON,
    "ReduceMean": _ON,
    "ReduceProd": _ON,
    "LayerNormalization": _ON,
    "Gemm": _ON,
    "Ceil": _ON,
    "Pad": _OFF,
    "Equal": _OFF,
    "Greater": _OFF,
    "ReduceMax": _OFF,
    "ReduceMin": _OFF,
    "Sign": _OFF,
    "Cos": _OFF,
    "Sin": _OFF,
    "TopK": _OFF,
    "Unpooling": _OFF,
    "Erf": _OFF,
}

_TYPES = _WITH_WEIGHTS | _DATA_ONLY
CAFFE_TYPES: Mapping[str, CaffeCapability] = MappingProxyType(_TYPES)

RETRAIN_TYPES: Mapping[str, CaffeCapability] = MappingProxyType(
    {name: CAFFE_TYPES[name] for name in ("Convolution", "DepthwiseConv", "InnerProduct", "Deconvolution")}
)

FUSIBLE_TYPES = tuple(name for name, capability in CAFFE_TYPES.items() if capability.fusible)


def add_data_type(name: str, *, on_by_default: bool) -> None:
    """Make the data of a new layer type, that of an extension, quantizable."""
    assert name not in CAFFE_TYPES
    _TYPES[name] = CaffeCapability(on_by_default=on_by_default)


def remove_data_type(name: str) -> None:
    """Remove a layer type of an extension, if it is quantizable."""
    _TYPES.pop(name, None)


# -- rules for blocks of a .cfg, of a JSON config and of a QuantConfig -------------------------------------------------

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
