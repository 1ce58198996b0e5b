"""The table of layer kinds: how each kind is called in torch, Caffe and ONNX, and how its weights are stored.

Every front door and exporter that needs a layer's kind, weight layout or gate order reads it here. A new kind is one
member of ``LayerKind`` and one entry of ``_KINDS``. What configs allow for a type is not here but in ``amct.config``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from amct.numerics.settings import WeightKind

if TYPE_CHECKING:
    from collections.abc import Mapping


ANY_RANK = 0


class LayerKind(str, Enum):
    """What a layer computes."""

    CONV = "conv"
    CONV_TRANSPOSE = "conv_transpose"
    LINEAR = "linear"
    """A Gemm, or a MatMul with a constant second input, with or without an Add of a constant bias behind it."""
    AVERAGE_POOL = "average_pool"
    LSTM = "lstm"
    GRU = "gru"
    RNN = "rnn"
    """Caffe's plain recurrent layer; PyTorch and ONNX models keep theirs in float."""

    @property
    def operators(self) -> tuple[str, ...]:
        """The ONNX operators that this kind of layer is exported as."""
        return _KINDS[self].operators

    @property
    def caffe_types(self) -> tuple[str, ...]:
        """The Caffe layer types of this kind."""
        return _KINDS[self].caffe_types

    @property
    def torch_types(self) -> Mapping[int, str]:
        """The quantizable torch types by the rank of their input with the batch axis; ``ANY_RANK`` for all ranks."""
        return _KINDS[self].torch_types

    def torch_type(self, rank: int) -> str | None:
        """The torch type for an input of this rank; None where no type of that rank is quantizable."""
        return self.torch_types.get(ANY_RANK) or self.torch_types.get(rank)

    @property
    def has_weights(self) -> bool:
        """Whether the layer has weights."""
        return _KINDS[self].weight is not None

    @property
    def weight_kind(self) -> WeightKind:
        """The layout of the weight; only of kinds that have one."""
        found = _KINDS[self].weight
        assert found is not None, f"{self.value} has no weight"
        return found

    @property
    def channel_axis(self) -> int:
        """The axis of the layer's input that holds its channels (features)."""
        return self.weight_kind.channel_axis if self.has_weights else 1

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer has a hidden state."""
        return _KINDS[self].weight is WeightKind.RNN

    @property
    def onnx_gates(self) -> tuple[int, ...]:
        """The gates in ONNX's order, each as its position in torch's order; empty without gates.

        LSTM: torch i, f, g, o; ONNX i, o, f, c. GRU: torch r, z, n; ONNX z, r, h.
        """
        return _KINDS[self].onnx_gates

    @property
    def gates(self) -> int:
        """The number of gates; 0 without."""
        return len(self.onnx_gates)

    @property
    def onnx_activations(self) -> tuple[str, ...]:
        """The ONNX activation functions of a recurrent layer that can be quantized."""
        return _KINDS[self].onnx_activations

    @property
    def folds_batch_norm(self) -> bool:
        """Whether a batch norm behind the layer can be folded into its weight and bias."""
        return _KINDS[self].folds_batch_norm


@dataclass(frozen=True, kw_only=True)
class _Kind:
    operators: tuple[str, ...] = ()
    caffe_types: tuple[str, ...] = ()
    torch_types: Mapping[int, str] = field(default_factory=dict)
    float_torch_types: tuple[str, ...] = ()
    """Torch types that take a batch norm but are never quantized."""
    weight: WeightKind | None = None
    onnx_gates: tuple[int, ...] = ()
    onnx_activations: tuple[str, ...] = ()
    folds_batch_norm: bool = False


_KINDS: Mapping[LayerKind, _Kind] = MappingProxyType(
    {
        LayerKind.CONV: _Kind(
            operators=("Conv",),
            caffe_types=("Convolution", "DepthwiseConv"),
            torch_types={3: "Conv1d", 4: "Conv2d", 5: "Conv3d"},
            weight=WeightKind.CONV,
            folds_batch_norm=True,
        ),
        LayerKind.CONV_TRANSPOSE: _Kind(
            operators=("ConvTranspose",),
            caffe_types=("Deconvolution",),
            torch_types={3: "ConvTranspose1d", 4: "ConvTranspose2d"},
            float_torch_types=("ConvTranspose3d",),
            weight=WeightKind.CONV_TRANSPOSE,
            folds_batch_norm=True,
        ),
        LayerKind.LINEAR: _Kind(
            operators=("Gemm", "MatMul"),
            caffe_types=("InnerProduct",),
            torch_types={ANY_RANK: "Linear"},
            weight=WeightKind.LINEAR,
            folds_batch_norm=True,
        ),
        LayerKind.AVERAGE_POOL: _Kind(
            operators=("AveragePool",), caffe_types=("Pooling",), torch_types={4: "AvgPool2d"}
        ),
        LayerKind.LSTM: _Kind(
            operators=("LSTM",),
            caffe_types=("LSTM",),
            torch_types={ANY_RANK: "LSTM"},
            weight=WeightKind.RNN,
            onnx_gates=(0, 3, 1, 2),
            onnx_activations=("Sigmoid", "Tanh", "Tanh"),
        ),
        LayerKind.GRU: _Kind(
            operators=("GRU",),
            caffe_types=("GRU",),
            torch_types={ANY_RANK: "GRU"},
            weight=WeightKind.RNN,
            onnx_gates=(1, 0, 2),
            onnx_activations=("Sigmoid", "Tanh"),
        ),
        LayerKind.RNN: _Kind(caffe_types=("RNN",), weight=WeightKind.RNN),
    }
)

KIND_OF_OPERATOR: Mapping[str, LayerKind] = MappingProxyType(
    {operator: kind for kind, facts in _KINDS.items() for operator in facts.operators}
)
"""The kind of each ONNX operator that can be quantized."""
KIND_OF_CAFFE_TYPE: Mapping[str, LayerKind] = MappingProxyType(
    {name: kind for kind, facts in _KINDS.items() for name in facts.caffe_types}
)
"""The kind of Caffe layer types; a Pooling is this kind only if it averages."""
KIND_OF_TORCH_TYPE: Mapping[str, LayerKind] = MappingProxyType(
    {name: kind for kind, facts in _KINDS.items() for name in (*facts.torch_types.values(), *facts.float_torch_types)}
)
"""The kind of torch types, also of those that are only folded into."""


@dataclass(frozen=True, order=True)
class Skip:
    """A layer (in exported files also a tensor) that was left as it is, and the reason in a sentence to act on."""

    layer: str
    reason: str

    def __str__(self) -> str:
        return f'"{self.layer}": {self.reason}'


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What a layer is, independent of the framework it comes from.

    ``in_channels`` counts all channels (or features) that enter the layer, not those of one group; both channel counts
    are None for pooling. ``weight_shape`` is the framework's own layout, None for a layer without weights.
    ``input_shapes`` are those of the example input; a dimension that may vary is None.
    ``attributes`` holds the rest of the layer's settings (kernel_size, stride, batch_first, ...).
    """

    name: str
    type: str  # as AMCT's configs write it: Conv2d, Linear, AvgPool2d, ...; a subclass has its base's name
    in_channels: int | None = None
    out_channels: int | None = None
    groups: int = 1
    bias: bool = False
    weight_shape: tuple[int, ...] | None = None
    dtype: str = "float32"
    input_shapes: tuple[tuple[int | None, ...], ...] = ()
    attributes: Mapping[str, object] = field(default_factory=dict)
    calls: int = 1  # in one forward

    @property
    def can_pack(self) -> bool:
        """Whether two 4-bit weights can share a byte along the input channels."""
        return self.groups == 1 and self.in_channels is not None and self.in_channels % 2 == 0
