"""The input of an exporter: the ONNX node of each layer, and its quantization factors.

A front door creates them; everything else (weight, bias, groups, a bias added behind a MatMul) is found in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.errors import ExportError, RecordValueError
from amct.model.kinds import KIND_OF_OPERATOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.model.kinds import LayerKind

ACTIVATION_BITS = (4, 8, 16)
WEIGHT_BITS = (4, 6, 7, 8)


@dataclass(frozen=True, kw_only=True)
class LayerBinding:
    """A layer and a node that computes it; exported files name the node after the layer.

    A layer that is computed several times has several bindings; its further nodes are named ``<layer>@1`` and so on.
    """

    layer: str
    kind: LayerKind
    node: str


def further_node(layer: str, call: int) -> str:
    """The name of the node that computes a layer for the second (``call`` 1) or a later time."""
    return f"{layer}@{call}"


def bindings_by_name(
    model: ModelProto, layers: Iterable[str], calls: Mapping[str, int] | None = None
) -> list[LayerBinding]:
    """Bindings of a model whose nodes already have the names of their layers.

    ``calls``: how often each layer is computed, if more than once; nodes that do not exist are left out.

    Raises:
        ExportError: no node has the name, or its operator is not that of a quantizable layer.
    """
    operators = {node.name: node.op_type for node in model.graph.node}
    bindings = []
    for layer in layers:
        if operators.get(layer) not in KIND_OF_OPERATOR:
            found = f"it is a {operators[layer]}" if layer in operators else "there is no node of this name"
            raise ExportError(
                f'layer "{layer}": expected a node of one of the operators {", ".join(sorted(KIND_OF_OPERATOR))}, but '
                f"{found}; save the model that the record belongs to"
            )
        kind = KIND_OF_OPERATOR[operators[layer]]
        further = (further_node(layer, call) for call in range(1, (calls or {}).get(layer, 1)))
        nodes = [layer, *(node for node in further if node in operators)]
        bindings += [LayerBinding(layer=layer, kind=kind, node=node) for node in nodes]
    return bindings


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerFactors:
    """Quantization factors of one layer, as in the record.

    Attributes:
        scale_d: step of the layer's input.
        offset_d: integer that represents zero, in -2^(b-1)..2^(b-1)-1.
        act_bits: 4, 8 or 16.
        scale_w: float32, one or one per output channel. LSTM and GRU: one, one per gate or one per row of W, in ONNX's
            gate order (the record's). Average pooling: one, usually 1.
        wts_bits: 4, 6, 7 or 8.
        scale_h: LSTM, GRU: step of the hidden state; with ``offset_h``.
        scale_r: LSTM, GRU: as ``scale_w``, for the recurrent matrix R.
        balance: DMQ factor per input channel: the input is divided by it, the weight multiplied.
        weight_is_balanced: the weight in the ONNX model already holds w · balance.
        integer_weight: int8, used unchanged instead of rounding the weight (AdaRound); in the layer's own layout,
            ``[Cout, Cin/groups, ...]``, transposed convolution ``[Cin, Cout/groups, ...]``, linear ``[Cout, Cin]``.
    """

    scale_d: float
    offset_d: int
    scale_w: NDArray[np.float32]
    act_bits: int = 8
    wts_bits: int = 8
    scale_h: float | None = None
    offset_h: int | None = None
    scale_r: NDArray[np.float32] | None = None
    balance: NDArray[np.float32] | None = None
    weight_is_balanced: bool = False
    integer_weight: NDArray[np.int8] | None = None

    def __post_init__(self) -> None:
        if self.act_bits not in ACTIVATION_BITS:
            raise RecordValueError(f"act_bits: expected one of {_listed(ACTIVATION_BITS)}, got {self.act_bits}")
        if self.wts_bits not in WEIGHT_BITS:
            raise RecordValueError(f"wts_bits: expected one of {_listed(WEIGHT_BITS)}, got {self.wts_bits}")
        for name in ("scale_d", "scale_h"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, float(_positive(name, value)[0]))
        for name in ("scale_w", "scale_r", "balance"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _positive(name, value))
        for name in ("offset_d", "offset_h"):
            _check_offset(name, getattr(self, name), self.act_bits)


def placeholder_factors(offset_d: int = 0) -> LayerFactors:
    """Placeholder factors that fit every layer, for reading the layers of a model before calibration."""
    one = np.ones(1, dtype=np.float32)
    return LayerFactors(scale_d=1.0, offset_d=offset_d, scale_w=one, scale_h=1.0, offset_h=0, scale_r=one)


@dataclass(frozen=True, kw_only=True)
class TensorFactors:
    """Quantization factors of a tensor between layers; ``zero_point`` in -2^(b-1)..2^(b-1)-1, as ``offset_d``.

    With ``mean`` (per channel), the tensor is the input of a layer whose factors are in the record. These factors then
    apply to linear layers only, and only with ``balance`` (one factor per channel), to the input divided by it.
    ``layer``, while a placement is planned: the layer whose record the factors are from.
    """

    scale: float
    zero_point: int
    bits: int = 8
    balance: tuple[float, ...] | None = None
    mean: tuple[float, ...] | None = None
    layer: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", float(_positive("scale", self.scale)[0]))
        if self.mean is not None and not np.isfinite(self.mean).all():
            raise RecordValueError("mean: expected finite numbers")
        if self.balance is not None:
            object.__setattr__(self, "balance", tuple(_positive("balance", self.balance).tolist()))
        if self.bits not in ACTIVATION_BITS:
            raise RecordValueError(f"bits: expected one of {_listed(ACTIVATION_BITS)}, got {self.bits}")
        _check_offset("zero_point", self.zero_point, self.bits)


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _positive(name: str, value: Any) -> NDArray[np.float32]:  # noqa: ANN401  whatever NumPy can read
    with np.errstate(over="ignore"):  # overflow of float32 becomes infinite and is rejected below
        array = np.asarray(value, dtype=np.float32).reshape(-1)
    wrong = ~(np.isfinite(array) & (array > 0))
    if array.size == 0 or wrong.any():
        got = "none" if array.size == 0 else f"{array[wrong][0]:g} at index {int(np.flatnonzero(wrong)[0])}"
        raise RecordValueError(f"{name}: expected finite numbers above 0, got {got}")
    return array


def _check_offset(name: str, value: int | None, bits: int) -> None:
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if value is not None and not lowest <= value <= highest:
        raise RecordValueError(f"{name}: expected {lowest}..{highest} for {bits} bits, got {value}")
