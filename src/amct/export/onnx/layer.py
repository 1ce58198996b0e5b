"""A layer with its node, weight and bias as arrays, and their integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import TensorProto

from amct.errors import AmctError, ExportError
from amct.export.binding import LayerFactors, LayerKind
from amct.export.onnx.messages import attribute_value
from amct.export.result import LayerReport
from amct.numerics.affine import quantize_bias
from amct.numerics.arq import WeightFactors, WeightKind, arq, factors_per_row, quantize_weight
from amct.numerics.error_cancelling import round_cancelling_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from onnx import NodeProto
    from torch import Tensor

_WEIGHT_KIND = {
    LayerKind.CONV: WeightKind.CONV,
    LayerKind.CONV_TRANSPOSE: WeightKind.CONV_TRANSPOSE,
    LayerKind.LINEAR: WeightKind.LINEAR,
    LayerKind.LSTM: WeightKind.RNN,
    LayerKind.GRU: WeightKind.RNN,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One bound layer. Weights are in the layer's own layout (linear: ``[Cout, Cin]``), whatever ONNX stores."""

    name: str
    kind: LayerKind
    node: NodeProto
    factors: LayerFactors
    weight: NDArray[Any] | None = None
    """DMQ factors are already multiplied in. LSTM, GRU: W ``[gates · hidden, input]``."""
    recurrent_weight: NDArray[Any] | None = None
    bias: NDArray[Any] | None = None
    """``[Cout]``. LSTM, GRU: ``[2 · gates · hidden]``, of W, then of R."""
    bias_node: NodeProto | None = None
    """The Add behind a MatMul that adds the bias."""
    pad: NodeProto | None = None
    """The Pad in front of an average pooling, which reads integers too."""
    groups: int = 1
    element_type: int = TensorProto.FLOAT

    @property
    def reader(self) -> NodeProto:
        """The node whose first input is quantized."""
        return self.pad or self.node

    @property
    def is_wide_float(self) -> bool:
        """Whether the layer computes in float32, as the formulas of the exported files do."""
        return self.element_type == TensorProto.FLOAT

    @property
    def channels_out(self) -> int:
        """How many output channels (LSTM, GRU: rows of W) there are."""
        assert self.weight is not None
        if self.kind is LayerKind.CONV_TRANSPOSE:
            return int(self.weight.shape[1]) * self.groups
        return int(self.weight.shape[0])

    @property
    def channels_in(self) -> int:
        """How many input channels there are."""
        assert self.weight is not None
        if self.kind is LayerKind.CONV_TRANSPOSE:
            return int(self.weight.shape[0])
        return int(self.weight.shape[1]) * self.groups

    @property
    def bias_place(self) -> tuple[NodeProto, int]:
        """The node and input that read the bias."""
        if self.bias_node is None:
            return self.node, 2
        return self.bias_node, 0 if self.node.output[0] == self.bias_node.input[1] else 1

    @property
    def adds_integers(self) -> bool:
        """Whether the bias is added to the integer accumulator.

        An Add that has the bias in front (``bias + x @ w``) is not: there AMCT dequantizes first and adds in float.
        """
        return self.bias is not None and (self.bias_node is None or self.bias_place[1] == 1)

    @property
    def output(self) -> str:
        """The tensor that is dequantized: the layer's result, with the bias where integers are added."""
        if self.bias_node is None or not self.adds_integers:
            return self.node.output[0]
        return self.bias_node.output[0]

    @property
    def transposed_gemm(self) -> bool:
        """Whether a Gemm stores its weight as ``[Cout, Cin]``."""
        return self.node.op_type == "Gemm" and bool(attribute_value(self.node, "transB", 0))

    def integer_weight(self) -> NDArray[np.int8]:
        """The weight in integers of the record's scales."""
        assert self.weight is not None
        if self.factors.integer_weight is not None:
            return np.asarray(self.factors.integer_weight, dtype=np.int8)
        return self._rounded(self.weight, self.factors.scale_w, self.factors.wts_bits)

    def integer_recurrent_weight(self) -> NDArray[np.int8]:
        """R in integers of the record's scales."""
        assert self.recurrent_weight is not None
        assert self.factors.scale_r is not None
        return self._rounded(self.recurrent_weight, self.factors.scale_r, self.factors.wts_bits)

    def requantized_weight(self, bits: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """The float weight rounded anew to ``bits`` bits with a scale per output channel, and those scales.

        Of convolutions and linear layers the errors cancel each other, see ``round_cancelling_errors``.
        """
        assert self.weight is not None
        return self._requantized(self.weight, bits)

    def rounding_shift(
        self, integers: NDArray[np.int8], scales: NDArray[np.float32], mean: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """By how much the mean of each output is too small with integer weights; ``mean`` is that of each input."""
        assert self.weight is not None
        error = self.weight - integers * scales.astype(np.float64).reshape(-1, *[1] * (self.weight.ndim - 1))
        by_channel = error.reshape(*error.shape[:2], -1).sum(2)
        inputs = np.repeat(mean.reshape(self.groups, -1), self.channels_out // self.groups, axis=0)
        return np.asarray((by_channel * inputs).sum(1))

    def requantized_recurrent_weight(self, bits: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """As ``requantized_weight``, for R."""
        assert self.recurrent_weight is not None
        return self._requantized(self.recurrent_weight, bits)

    def row_scales(self) -> NDArray[np.float32]:
        """Scales of W: one, or one per output channel (those per gate repeated)."""
        return self._per_row(self.factors.scale_w)

    def recurrent_row_scales(self) -> NDArray[np.float32]:
        """Scales of R, as ``row_scales``."""
        assert self.factors.scale_r is not None
        return self._per_row(self.factors.scale_r)

    def dequant_scale(self) -> NDArray[np.float32]:
        """scale_w · scale_d in float32: what one step of the accumulator is worth; one or one per output channel.

        LSTM, GRU: of all rows of W, then scale_r · scale_h of all rows of R.
        """
        own: NDArray[np.float32] = self.row_scales() * np.float32(self.factors.scale_d)
        if not self.kind.is_recurrent:
            return own
        recurrent = self.recurrent_row_scales() * np.float32(self.factors.scale_h)
        rows = self.channels_out
        return np.concatenate([np.broadcast_to(own, rows), np.broadcast_to(recurrent, rows)]).astype(np.float32)

    def integer_bias(
        self, scale_w: NDArray[np.float32] | None = None, scale_d: float | None = None
    ) -> NDArray[np.int32]:
        """The bias in steps of the accumulator; ``scale_w`` and ``scale_d`` replace the record's scales.

        Raises:
            ExportError: it does not fit int32.
        """
        assert self.bias is not None
        if not self.kind.is_recurrent:
            scales = self.row_scales() if scale_w is None else scale_w
            return self._integers_of_bias(self.bias, scales, scale_d or self.factors.scale_d)
        half = len(self.bias) // 2
        assert self.factors.scale_h is not None
        own = self._integers_of_bias(self.bias[:half], self.row_scales(), self.factors.scale_d)
        recurrent = self._integers_of_bias(self.bias[half:], self.recurrent_row_scales(), self.factors.scale_h)
        return np.concatenate([own, recurrent])

    def _integers_of_bias(self, bias: NDArray[Any], scale_w: NDArray[np.float32], scale_d: float) -> NDArray[np.int32]:
        try:
            integers = quantize_bias(
                torch.tensor(np.asarray(bias, dtype=np.float32)), torch.tensor(scale_w), torch.tensor(scale_d)
            )
        except AmctError as error:
            raise ExportError(f'layer "{self.name}": {error}; leave this layer in float (skip_layers)') from error
        return integers.numpy()

    def _per_row(self, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        tensor = torch.tensor(scales)
        per_row = factors_per_row(WeightFactors(tensor, torch.zeros_like(tensor, dtype=torch.int32)), self._rows())
        return per_row.scale.numpy()

    def _rows(self) -> int:
        return 1 if self.weight is None else self.channels_out

    def _rounded(self, weight: NDArray[Any], scales: NDArray[np.float32], bits: int) -> NDArray[np.int8]:
        tensor = torch.tensor(scales)
        factors = WeightFactors(tensor, torch.zeros_like(tensor, dtype=torch.int32))
        as_float = torch.tensor(np.asarray(weight, dtype=np.float32))
        try:
            return quantize_weight(as_float, factors, _WEIGHT_KIND[self.kind], bits, self.groups).numpy()
        except AmctError as error:
            raise ExportError(f'layer "{self.name}": {error}') from error

    def _requantized(self, weight: NDArray[Any], bits: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        as_float = torch.tensor(np.asarray(weight, dtype=np.float32))
        kind = _WEIGHT_KIND[self.kind]
        try:
            factors = arq(as_float, kind=kind, bits=bits, groups=self.groups)
            integers = self._rounded_anew(as_float, factors, bits)
        except AmctError as error:
            raise ExportError(f'layer "{self.name}": {error}') from error
        return integers.numpy(), factors.scale.numpy()

    def _rounded_anew(self, weight: Tensor, factors: WeightFactors, bits: int) -> Tensor:
        if self.kind in (LayerKind.CONV, LayerKind.LINEAR):
            return round_cancelling_errors(weight, factors.scale, bits)
        return quantize_weight(weight, factors, _WEIGHT_KIND[self.kind], bits, self.groups)


def layer_report(layer: Layer, inserted: Iterable[str]) -> LayerReport:
    """What was done to a layer, for the report of an export."""
    return LayerReport(
        layer=layer.name,
        kind=layer.kind.value,
        operator=layer.node.op_type,
        activation_bits=layer.factors.act_bits,
        weight_bits=layer.factors.wts_bits,
        inserted=tuple(inserted),
    )
