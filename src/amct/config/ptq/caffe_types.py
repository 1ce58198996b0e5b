"""The Caffe layer types that can be quantized, as a table.

Types with weights: data and weights are quantized. All others: data only. Types marked ``_OFF`` and
``_FOLDED`` get ``quant_enable: false`` in a generated config and are switched on by hand.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from amct.config.layers import Capability

if TYPE_CHECKING:
    from collections.abc import Mapping

ACTIVATION_BITS = range(8, 17)
WEIGHT_BITS = {"arq_quantize": 8, "snq_quantize": 4}


_CONVOLUTION = Capability(snq=True, fusible=True)
_RECURRENT = Capability(channel_wise=False)
_WITH_WEIGHTS = {
    "Convolution": _CONVOLUTION,
    "DepthwiseConv": _CONVOLUTION,
    "InnerProduct": Capability(channel_wise=False, snq=True, fusible=True),
    "Deconvolution": _CONVOLUTION,
    "LSTM": _RECURRENT,
    "RNN": _RECURRENT,
    "GRU": _RECURRENT,
}
_ON = Capability(weights=False, channel_wise=False)
_OFF = Capability(weights=False, channel_wise=False, on_by_default=False)
_FOLDED = Capability(weights=False, channel_wise=False, on_by_default=False, fusible=True)
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
CAFFE_TYPES: Mapping[str, Capability] = MappingProxyType(_TYPES)

RETRAIN_TYPES: Mapping[str, Capability] = MappingProxyType(
    {
        name: CAFFE_TYPES[name]
        for name in (
            "Convolution", "DepthwiseConv", "InnerProduct", "Deconvolution",
            "PassThrough", "Pooling", "PSROIPooling", "ROIPooling", "SPP", "Upsample", "Eltwise", "Slice", "Concat",
            "Softmax", "ROIAlign", "AbsVal", "BNLL", "CReLU", "ELU", "Exp", "Interp", "Log", "LRN", "Mvm", "Nms",
            "Normalize", "Power", "PReLU", "Reduction", "ReLU", "Sigmoid", "Sort", "Threshold", "Scale", "BatchNorm",
            "Bias", "Reshape", "ShuffleChannel", "Crop", "Axpy", "Flatten", "Permute", "Tile", "Split", "ArgMax",
            "Clip", "Hswish", "MVN", "Reorg", "TanH", "MatMul", "RReLU", "ReLU6",
        )
    }
)  # fmt: skip
"""The types that the guide lists for quantization-aware training, with the defaults of post-training quantization."""


def add_data_type(name: str, *, on_by_default: bool) -> None:
    """Make the data of a new layer type, that of an extension, quantizable."""
    assert name not in CAFFE_TYPES
    _TYPES[name] = _ON if on_by_default else _OFF


def remove_data_type(name: str) -> None:
    """Remove a layer type of an extension, if it is quantizable."""
    _TYPES.pop(name, None)
