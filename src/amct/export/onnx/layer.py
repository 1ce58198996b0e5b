"""A layer with its node, weight and bias as arrays, the integers computed from them, and how new ones are stored."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import TensorProto

from amct.errors import AmctError, ExportError
from amct.export.formats import LayerReport
from amct.export.onnx.messages import attribute_value
from amct.model.kinds import LayerKind
from amct.numerics.affine import quantize_bias
from amct.numerics.arq import arq
from amct.numerics.rounding import bias_correction, integer_weight, paired_scale, round_cancelling_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    from numpy.typing import NDArray
    from onnx import NodeProto

    from amct.export.onnx.graph import OnnxGraph
    from amct.numerics.qparams import LayerQParams, QParams


_IMAGE_RANK = 4


def further_node(layer: str, call: int) -> str:
    """The name of the node that computes a layer for the second (``call`` 1) or a later time."""
    return f"{layer}@{call}"


@dataclass(frozen=True, kw_only=True, eq=False)
class OnnxLayer:
    """One node of a bound layer.

    Weights are in the layer's own layout (linear: ``[Cout, Cin]``), independent of ONNX's.
    """

    layer: str
    """Its name in the record."""
    call: int = 0
    """The number of the node among those of the layer."""
    kind: LayerKind
    node: NodeProto
    given: LayerQParams | None = None
    """How it is quantized; None while only the form of the model is asked for."""
    weight: NDArray[Any] | None = None
    """DMQ factors are already multiplied in. LSTM, GRU: W ``[gates · hidden, input]``."""
    recurrent_weight: NDArray[Any] | None = None
    bias: NDArray[Any] | None = None
    """``[Cout]``. LSTM, GRU: ``[2 · gates · hidden]``, of W, then of R."""
    bias_node: NodeProto | None = None
    """The Add behind a MatMul with the bias."""
    pad: NodeProto | None = None
    """The Pad before an average pooling, which reads integers too."""
    groups: int = 1
    element_type: int = TensorProto.FLOAT
    rescaled: bool = False
    """Whether the output channels are divided by the balance factors of the next layer."""

    @property
    def qparams(self) -> LayerQParams:
        """How it is quantized."""
        assert self.given is not None, "the form of the model is known, no parameters yet"
        return self.given

    @property
    def name(self) -> str:
        """The name of its node, from which the names of everything added for it are made."""
        return further_node(self.layer, self.call) if self.call else self.layer

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
        """The number of output channels (LSTM, GRU: rows of W)."""
        assert self.weight is not None
        if self.kind is LayerKind.CONV_TRANSPOSE:
            return int(self.weight.shape[1]) * self.groups
        return int(self.weight.shape[0])

    @property
    def channels_in(self) -> int:
        """The number of input channels."""
        assert self.weight is not None
        if self.kind is LayerKind.CONV_TRANSPOSE:
            return int(self.weight.shape[0])
        return int(self.weight.shape[1]) * self.groups

    @property
    def bias_place(self) -> tuple[NodeProto, int]:
        """The node that reads the bias, and the index of that input."""
        if self.bias_node is None:
            return self.node, 2
        return self.bias_node, 0 if self.node.output[0] == self.bias_node.input[1] else 1

    @property
    def adds_integers(self) -> bool:
        """Whether the bias is added to the integer accumulator.

        For an Add with the bias first (``bias + x @ w``) it is not: AMCT dequantizes first and adds in float.
        """
        return self.bias is not None and (self.bias_node is None or self.bias_place[1] == 1)

    @property
    def output(self) -> str:
        """The tensor to dequantize: the layer's output, including the bias if it is added to integers."""
        if self.bias_node is None or not self.adds_integers:
            return self.node.output[0]
        return self.bias_node.output[0]

    @property
    def transposed_gemm(self) -> bool:
        """Whether a Gemm stores its weight as ``[Cout, Cin]``."""
        return self.node.op_type == "Gemm" and bool(attribute_value(self.node, "transB", 0))

    def integer_weight(self) -> NDArray[np.int8]:
        """The weight as integers, with the record's scales."""
        assert self.weight is not None
        return self._rounded(self.weight, self.qparams.weight)

    def integer_recurrent_weight(self) -> NDArray[np.int8]:
        """R as integers, with the record's scales."""
        assert self.recurrent_weight is not None
        return self._rounded(self.recurrent_weight, self.qparams.weights[1])

    def requantized_weight(
        self, bits: int, *, bounded_pairs: bool = False
    ) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Quantize the float weight of a convolution or linear layer again, with a scale per output channel.

        Returns the integers of ``bits`` bits and the scales. Rounding errors cancel (``round_cancelling_errors``). With
        ``bounded_pairs`` a kernel can add neighbours along the reduction in 16 bits.
        """
        assert self.weight is not None
        weight = _as_tensor(self.weight)
        try:
            if bounded_pairs:
                scale = paired_scale(weight)
            else:
                scale = arq(weight, kind=self.kind.weight_kind, bits=bits, groups=self.groups).scale
            integers = round_cancelling_errors(weight, scale, bits, bounded_pairs=bounded_pairs)
        except AmctError as error:
            raise ExportError(f'layer "{self.name}": {error}') from error
        return integers.numpy(), scale.numpy()

    def with_corrected_bias(self, integers: NDArray[np.int8], scales: NDArray[np.float32]) -> OnnxLayer:
        """The layer with a bias that makes up for the mean error of these integers, if the mean of its input is known.

        ``scales`` are those of the integers: one, or one per output channel.
        """
        mean = self.qparams.mean
        if mean is None or self.bias is None or mean.numel() != self.channels_in:
            return self
        assert self.weight is not None
        weight = _as_tensor(self.weight)
        loss = bias_correction(weight, shared_tensor(integers), shared_tensor(scales), mean, self.groups)
        if self.qparams.lost is not None:
            loss += self.qparams.lost
        return replace(self, bias=(np.asarray(self.bias, np.float64) + loss.numpy()).astype(np.float32))

    def with_own_bias(self, integers: NDArray[np.int8]) -> OnnxLayer:
        """The layer with the bias that belongs to the record's own integers: corrected, where the layer is to be."""
        return self.with_corrected_bias(integers, self.row_scales()) if self.qparams.corrects_bias else self

    def row_scales(self) -> NDArray[np.float32]:
        """Scales of W: one, or one per output channel (those per gate repeated)."""
        return self._per_row(self.qparams.weight)

    def recurrent_row_scales(self) -> NDArray[np.float32]:
        """Scales of R, as ``row_scales``."""
        return self._per_row(self.qparams.weights[1])

    def dequant_scale(self) -> NDArray[np.float32]:
        """scale_w · scale_d in float32, the accumulator scale; one or one per output channel.

        LSTM, GRU: of all rows of W, then scale_r · scale_h of all rows of R.
        """
        own: NDArray[np.float32] = self.row_scales() * np.float32(self.qparams.input.step)
        if not self.kind.is_recurrent:
            return own
        assert self.qparams.hidden is not None
        recurrent = self.recurrent_row_scales() * np.float32(self.qparams.hidden.step)
        rows = self.channels_out
        return np.concatenate([np.broadcast_to(own, rows), np.broadcast_to(recurrent, rows)]).astype(np.float32)

    def integer_bias(
        self, scale_w: NDArray[np.float32] | None = None, scale_d: float | None = None
    ) -> NDArray[np.int32]:
        """The bias as accumulator integers; ``scale_w`` and ``scale_d`` replace the record's scales.

        Raises:
            ExportError: it does not fit int32.
        """
        assert self.bias is not None
        if not self.kind.is_recurrent:
            scales = self.row_scales() if scale_w is None else scale_w
            return self._integers_of_bias(self.bias, scales, scale_d or self.qparams.input.step)
        half = len(self.bias) // 2
        assert self.qparams.hidden is not None
        own = self._integers_of_bias(self.bias[:half], self.row_scales(), self.qparams.input.step)
        recurrent = self._integers_of_bias(self.bias[half:], self.recurrent_row_scales(), self.qparams.hidden.step)
        return np.concatenate([own, recurrent])

    def _integers_of_bias(self, bias: NDArray[Any], scale_w: NDArray[np.float32], scale_d: float) -> NDArray[np.int32]:
        try:
            integers = quantize_bias(
                torch.tensor(np.asarray(bias, dtype=np.float32)), torch.tensor(scale_w), torch.tensor(scale_d)
            )
        except AmctError as error:
            raise ExportError(f'layer "{self.name}": {error}; leave this layer in float (skip_layers)') from error
        return integers.numpy()

    def _per_row(self, qparams: QParams) -> NDArray[np.float32]:
        scales: NDArray[np.float32] = qparams.per_row(1 if self.weight is None else self.channels_out).scale.numpy()
        return scales

    def _rounded(self, weight: NDArray[Any], qparams: QParams) -> NDArray[np.int8]:
        try:
            cancel_errors = self.qparams.cancels_errors and not self.kind.is_recurrent
            kind, tensor = self.kind.weight_kind, _as_tensor(weight)
            return integer_weight(tensor, qparams, kind, self.groups, cancel_errors=cancel_errors).numpy()
        except AmctError as error:
            raise ExportError(f'layer "{self.name}": {error}') from error


def _as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A float32 tensor, which shares the memory of a float32 array: it is only read."""
    return shared_tensor(np.asarray(array, dtype=np.float32))


def shared_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor in the memory of an array, which may be read-only: the tensor must not be changed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def layer_report(layer: OnnxLayer, inserted: Iterable[str], output: str | None = None) -> LayerReport:
    """The report of a layer; ``output`` is its output tensor in the float model, if it was renamed since."""
    return LayerReport(
        layer=layer.layer,
        node=layer.name,
        type=layer.kind.torch_type(layer.weight.ndim if layer.weight is not None else _IMAGE_RANK) or layer.kind.value,
        kind=layer.kind,
        operator=layer.node.op_type,
        output=layer.output if output is None else output,
        activation_bits=layer.qparams.input.bits,
        weight_bits=layer.qparams.weight.bits if layer.kind.has_weights else None,
        inserted=tuple(inserted),
    )


def straighten_gemm(graph: OnnxGraph, layer: OnnxLayer) -> None:
    """Make a Gemm read its weight as ``[Cin, Cout]``; ``replace_weight`` then stores it in this layout."""
    if layer.node.op_type == "Gemm":
        graph.set_attribute(layer.node, "transB", 0)


def stored_weight(layer: OnnxLayer, weight: NDArray[Any]) -> NDArray[Any]:
    """Convert a weight from the layer's own layout to that of its operator: ``[Cin, Cout]`` for MatMul and Gemm."""
    if layer.kind is LayerKind.LINEAR and not layer.transposed_gemm:
        return np.ascontiguousarray(weight.T)
    return weight


def replace_weight(
    graph: OnnxGraph, layer: OnnxLayer, weight: NDArray[Any], index: int = 1, dtype: npt.DTypeLike | None = None
) -> str:
    """Store a weight (layer's own layout) as an initializer of the layer's node; returns its name.

    ``dtype`` is its type in the file, if it is another one.
    """
    name = owned_name(graph, layer.node, index, f"{layer.name}.{_SUFFIX[index]}")
    graph.set_initializer(name, stored_weight(layer, weight), dtype)
    graph.set_input(layer.node, index, name)
    return name


def replace_bias(graph: OnnxGraph, layer: OnnxLayer, bias: NDArray[Any]) -> str:
    """Store a bias ``[Cout]`` as an initializer of the layer's node, or of the Add behind it; returns its name."""
    node, index = layer.bias_place
    name = owned_name(graph, node, index, f"{layer.name}.bias")
    graph.set_initializer(name, bias)
    graph.set_input(node, index, name)
    return name


_SUFFIX = {1: "weight", 2: "recurrent_weight", 3: "bias"}


def share_weights(graph: OnnxGraph, layers: Sequence[OnnxLayer]) -> None:
    """Make the nodes of a layer that is computed several times read the same stored weights again.

    Each node was given its own; equal ones are stored once.
    """
    repeated = {layer.layer for layer in layers if layer.call}
    stored: dict[tuple[object, ...], str] = {}
    for layer in layers:
        if layer.layer not in repeated:
            continue
        operands = (*layer.node.input[1:], *(layer.bias_node.input if layer.bias_node is not None else ()))
        makers = (graph.producer(name) for name in operands)
        for node in (layer.node, layer.bias_node, *makers):
            for index, name in enumerate(node.input if node is not None else ()):
                if node is not None and graph.is_initializer(name):
                    array = graph.constant(name)
                    assert array is not None
                    key = (layer.layer, str(array.dtype), array.shape, sha256(array.tobytes()).digest())
                    graph.set_input(node, index, stored.setdefault(key, name))


def owned_name(graph: OnnxGraph, node: NodeProto, index: int, fallback: str) -> str:
    """The name of an initializer that only this node reads, or a new name if it is shared or computed."""
    current = node.input[index]
    if graph.is_initializer(current) and graph.only_consumer(current) is node:
        return current
    return graph.fresh_name(fallback)
