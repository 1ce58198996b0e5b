"""The layers of a model as configs see them, and what each type of PyTorch and Caffe can do.

Each front door (PyTorch, Caffe, ONNX) describes its model as a list of ``LayerInfo`` in model order; this package needs
nothing else of the model. A type that is not in a table is never quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from amct.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

_MOST_REASONS = 50


@dataclass(frozen=True, kw_only=True)
class LayerInfo:
    """One layer of a model, quantizable or not.

    Attributes:
        name: The name used in config and record files, such as ``layer1.0.conv1``.
        type: The type name of the framework, such as ``Conv2d`` or ``Convolution``.
        inputs: The number of quantized inputs (bottoms of a Caffe layer).
        has_bias: Whether the layer has a bias; 16-bit activations of a ``Linear`` need one.
        can_pack_int4: Whether two 4-bit weights share a byte along the input channels (one group, an even number).
        average_pooling: Whether a Caffe ``Pooling`` layer is AVE and not global.
        refusal: Why this layer cannot be quantized although its type can (a module called twice); None if it can.
        depthwise: Whether a ``Conv2d`` has one group per input channel: filter pruning never starts from it.
        one_input_channel: Whether it is depthwise only in that it has a single input channel.
        prune_refusal: Why this layer cannot be pruned although its type can; None if it can.
    """

    name: str
    type: str
    inputs: int = 1
    has_bias: bool = True
    can_pack_int4: bool = True
    average_pooling: bool = False
    refusal: str | None = None
    depthwise: bool = False
    one_input_channel: bool = False
    prune_refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class Capability:
    """The capabilities of a layer type.

    Attributes:
        weights: Weights are quantized (the JSON of PyTorch has a formal block for average pooling, which has none).
        channel_wise: Weights can have a scale per output channel, which is the default.
        on_by_default: A generated config quantizes the layer.
        fusible: BatchNorm can be folded into the layer; in Caffe also: the layer can be folded into others.
        asymmetric: Activations can have an offset.
        int16: Activations can have 16 bits (PyTorch).
        int16_needs_bias: Only layers with a bias can have 16-bit activations.
        ada: AdaRound can tune the weights (PyTorch).
        odd_bits: Weights can have 6 or 7 bits (PyTorch).
        dmq: DMQ can balance the layer (PyTorch).
        dmq_by_type: DMQ can be requested by an override of the type.
        snq: Weights can be quantized non-uniformly (Caffe).
    """

    weights: bool = True
    channel_wise: bool = True
    on_by_default: bool = True
    fusible: bool = False
    asymmetric: bool = True
    int16: bool = True
    int16_needs_bias: bool = False
    ada: bool = False
    odd_bits: bool = False
    dmq: bool = True
    dmq_by_type: bool = True
    snq: bool = False


class LayerList:
    """The layers of a model in model order, with lookup by name."""

    def __init__(self, layers: Iterable[LayerInfo]) -> None:
        self._layers = tuple(layers)
        self._by_name = {layer.name: layer for layer in self._layers}
        if len(self._by_name) < len(self._layers):
            repeated = sorted({layer.name for layer in self._layers if self._by_name[layer.name] is not layer})
            raise ModelError(f"layer names must be unique; given more than once: {', '.join(repeated)}")

    def find(self, name: str) -> LayerInfo | None:
        """The layer of that name, or None."""
        return self._by_name.get(name)

    def quantizable(self, types: Collection[str]) -> tuple[LayerInfo, ...]:
        """The layers that a config can configure, in model order: of one of the types, and not refused."""
        return tuple(layer for layer in self._layers if layer.type in types and layer.refusal is None)

    def why_none_quantizable(self, types: Collection[str]) -> str:
        """The message for a model without quantizable layers: each layer with its reason, known reasons first."""
        layers = sorted(self._layers, key=lambda layer: layer.refusal is None)
        reasons = [f"{layer.name} ({layer.type}): {layer.refusal or 'this type cannot'}" for layer in layers]
        rest = len(reasons) - _MOST_REASONS
        more = [f"and {rest} more"] if rest > 0 else []
        found = "\n  ".join(["", *reasons[:_MOST_REASONS], *more]) if reasons else " It has no layers."
        return f"the model has no layer that can be quantized. Types that can: {', '.join(types)}.{found}"

    @property
    def names(self) -> tuple[str, ...]:
        """All layer names in model order."""
        return tuple(self._by_name)

    def __iter__(self) -> Iterator[LayerInfo]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


ARQ_BITS = (4, 6, 7, 8)  # of weights, over all types; 6 and 7 need the ability ``odd_bits``
ADA_BITS = range(2, 9)
ACTIVATION_BITS = (4, 8, 16)
MIGRATION_RANGE = (0.2, 0.8)

PTQ_TYPES: Mapping[str, Capability] = MappingProxyType(
    {
        "Conv1d": Capability(fusible=True),
        "Conv2d": Capability(ada=True, odd_bits=True, fusible=True),
        "Conv3d": Capability(asymmetric=False, int16=False, fusible=True),
        "Linear": Capability(channel_wise=False, int16_needs_bias=True, ada=True, fusible=True),
        "ConvTranspose1d": Capability(fusible=True),
        "ConvTranspose2d": Capability(ada=True, fusible=True),
        "AvgPool2d": Capability(channel_wise=False, int16=False, dmq=False, dmq_by_type=False, weights=False),
        "LSTM": Capability(dmq_by_type=False),
        "GRU": Capability(dmq_by_type=False),
    }
)

KV_CACHE_TYPES = ("Linear",)
QAT_TYPES: Mapping[str, Capability] = MappingProxyType(
    {name: capability for name, capability in PTQ_TYPES.items() if capability.weights}
)
DISTILL_TYPES: Mapping[str, Capability] = MappingProxyType({name: QAT_TYPES[name] for name in ("Conv2d", "Linear")})
FILTER_PRUNE_TYPES = ("Conv2d", "Linear")  # other types are pruned only together with the layer before them
SELECTIVE_PRUNE_TYPES = ("Conv2d", "Linear", "ConvTranspose2d")


def can_int16(layer: LayerInfo) -> bool:
    """Whether a layer can have 16-bit activations."""
    capability = PTQ_TYPES[layer.type]
    return capability.int16 and (layer.has_bias or not capability.int16_needs_bias)


CAFFE_ACTIVATION_BITS = range(8, 17)
CAFFE_WEIGHT_BITS = {"arq_quantize": 8, "snq_quantize": 4}


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
_DATA_ONLY = (
    "PassThrough", "Pooling", "PSROIPooling", "ROIPooling", "SPP", "Upsample", "Eltwise", "Slice", "Concat",
    "Softmax", "ROIAlign", "AbsVal", "BNLL", "CReLU", "ELU", "Exp", "Interp", "Log", "LRN", "Mvm", "Nms",
    "Normalize", "Power", "PReLU", "Reduction", "ReLU", "Sigmoid", "Sort", "Threshold", "Scale", "BatchNorm",
    "Bias", "Reshape", "Reverse", "ShuffleChannel", "Crop", "Axpy", "Flatten", "Permute", "Tile", "Split", "ArgMax",
    "Clip", "Hswish", "MVN", "Reorg", "TanH", "MatMul", "RReLU", "ReLU6", "Swish", "GroupNorm", "ArgMin", "Sqrt",
    "ReduceSum", "ReduceMean", "ReduceProd", "LayerNormalization", "Gemm", "Ceil", "Pad", "Equal", "Greater",
    "ReduceMax", "ReduceMin", "Sign", "Cos", "Sin", "TopK", "Unpooling", "Erf",
)  # fmt: skip
_OFF_BY_DEFAULT = (
    "AbsVal", "PReLU", "ReLU", "Clip", "RReLU", "ReLU6", "Swish", "Pad", "Equal", "Greater", "ReduceMax",
    "ReduceMin", "Sign", "Cos", "Sin", "TopK", "Unpooling", "Erf",
)  # fmt: skip
_FOLDED_TYPES = ("Scale", "BatchNorm", "Bias")
"""They and the types that are off get ``quant_enable: false`` in a generated config and are switched on by hand."""

_TYPES = (
    _WITH_WEIGHTS
    | dict.fromkeys(_DATA_ONLY, _ON)
    | dict.fromkeys(_OFF_BY_DEFAULT, _OFF)
    | dict.fromkeys(_FOLDED_TYPES, _FOLDED)
)
CAFFE_TYPES: Mapping[str, Capability] = MappingProxyType(_TYPES)

CAFFE_RETRAIN_TYPES: Mapping[str, Capability] = MappingProxyType(
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
