"""Placement ``fast``: which tensors between layers are also quantized, so that onnxruntime uses integer kernels.

onnxruntime computes a convolution in integers only if its input, weight, bias *and output* are quantized, an Add or a
Concat only if all inputs and the output are. So a tensor gets parameters, in this order, from

1. the layers that read it (the record), also through operators that move values or multiply them by a constant;
2. the parameters observed for it during calibration;
3. the tensor whose values it holds (Slice, Gather, pooling, …).

An activation (Relu, Clip) is absorbed: the quantizer comes after it, and the limits of its integers replace it.
Elementwise operators are quantized only if their inputs are already integer and their output reaches a layer or a
product of matrices; otherwise integers would only add a rounding. The rest stays float, with a reason;
``tensor_values.py`` has the tensors that stay float because their rounding error would be too large.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from amct.export.onnx.layer_lookup import is_zero_pad
from amct.export.onnx.messages import attribute_value
from amct.export.qdq.tensor_values import (
    HIGHEST,
    LOWEST,
    PROBABILITY_STEP,
    activation_limits,
    constant_factor,
    raised_to,
    without_effect_below,
)
from amct.model import Skip
from amct.model.kinds import LayerKind
from amct.model.operators import ACTIVATIONS, AVERAGING, INTEGER_ELEMENTWISE, VALUE_KEEPING, VALUE_PICKING, ZERO_TO_ONE
from amct.numerics.qparams import QParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from onnx import NodeProto

    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import OnnxLayer


def has_integer_kernel(layer: OnnxLayer) -> bool:
    """Whether onnxruntime can compute a layer in integers; otherwise quantizers only make it slower."""
    return layer.kind is not LayerKind.CONV_TRANSPOSE and not layer.kind.is_recurrent


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterSource:
    """Where the parameters of a tensor come from.

    Attributes:
        layer: The layer whose input has them, by its record.
        tensor: The tensor for which they are observed.
        factor: By which those of the layer are multiplied.
        qparams: The parameters; None before calibration.
    """

    layer: str | None = None
    tensor: str | None = None
    factor: float = 1.0
    qparams: QParams | None = None

    @property
    def known(self) -> QParams:
        """The parameters, after calibration."""
        assert self.qparams is not None
        return self.qparams

    def divided(self, factor: float) -> ParameterSource:
        """The parameters of values so many times smaller."""
        known = self.qparams
        if known is not None:
            known = known.moved(known.step / factor, known.zero_point)
        return replace(self, factor=self.factor / factor, qparams=known)

    def is_like(self, other: ParameterSource | None) -> bool:
        """Whether both are the same parameters; before calibration all layers are expected to agree."""
        if other is None or self.qparams is not None or other.qparams is not None:
            return other is not None and self.qparams == other.qparams
        return (self.tensor, self.factor) == (other.tensor, other.factor)


@dataclass(frozen=True, kw_only=True)
class InputToQuantize:
    """How a layer reads its input quantized.

    Attributes:
        source: Where the parameters come from.
        bits: Of the integers.
        is_balanced: Whether the input is divided by balance factors first.
    """

    source: ParameterSource
    bits: int
    is_balanced: bool

    @property
    def is_plain(self) -> bool:
        """Whether the parameters are those of the tensor itself, of 8 bits."""
        return self.bits == 8 and not self.is_balanced


@dataclass(frozen=True)
class FastPlacement:
    """The tensors that placement ``fast`` quantizes."""

    integer_tensors: dict[str, ParameterSource] = field(default_factory=dict)
    """Tensors that exist only as integers: every reader reads them dequantized."""
    quantized_for_readers: dict[str, ParameterSource] = field(default_factory=dict)
    """Tensors computed in float; those in ``readers`` read them quantized."""
    readers: dict[str, list[NodeProto]] = field(default_factory=dict)
    constants: list[tuple[NodeProto, int]] = field(default_factory=list)
    """Constant operands to quantize: node and input index."""
    pads: dict[str, NodeProto] = field(default_factory=dict)
    """Zero Pads that can work on integers, by output tensor."""
    covered_layers: set[str] = field(default_factory=set)
    """Layers whose input this placement quantizes; the others get their own quantizer."""
    skipped: list[Skip] = field(default_factory=list)

    def source(self, tensor: str) -> ParameterSource | None:
        """Where the parameters of a quantized tensor come from; None if it is not quantized."""
        return self.integer_tensors.get(tensor) or self.quantized_for_readers.get(tensor)

    def uncover(self, tensor: str, layer: OnnxLayer) -> None:
        """Give a layer its own quantizer instead of the shared one of a float ``tensor``."""
        self.covered_layers.discard(layer.name)
        self.readers[tensor] = [node for node in self.readers[tensor] if node is not layer.reader]
        if not self.readers[tensor]:
            del self.readers[tensor], self.quantized_for_readers[tensor]


class FastPlanner:
    """Decides placement ``fast`` for one graph, node by node in graph order.

    Args:
        graph: The graph.
        inputs: How each layer reads its input.
        layers: The layers.
        observed: Returns the source of a tensor that is observed.
        left_float: Tensors that are read quantized by layers only, with the reasons.
    """

    def __init__(
        self,
        graph: OnnxGraph,
        layers: Sequence[OnnxLayer],
        inputs: Mapping[str, InputToQuantize],
        observed: Callable[[str], ParameterSource | None],
        left_float: Mapping[str, str],
    ) -> None:
        self.graph = graph
        self._observed = observed
        self._inputs = inputs
        self._layer_of = {id(layer.node): layer for layer in layers if has_integer_kernel(layer)}
        self._bias_nodes = {id(layer.bias_node) for layer in layers if layer.bias_node is not None}
        self._required: dict[str, ParameterSource] = {}
        self._excluded: set[str] = set()
        self._float = left_float
        self._sources: dict[str, ParameterSource | None] = {}
        self._before_integers = self._tensors_before_integers()
        self.placed = FastPlacement()
        for layer in layers:
            tensor, own = layer.reader.input[0], inputs[layer.name]
            if own.bits != 8:
                self._exclude(tensor)
            elif own.is_plain:
                self._required.setdefault(tensor, own.source)

    def _exclude(self, tensor: str) -> None:
        """Exclude a tensor that a layer without 8-bit activations reads, and the tensors its values come from."""
        self._excluded.add(tensor)
        producer = self.graph.producer(tensor)
        if producer is not None and (self._picks(producer) or producer.op_type in ACTIVATIONS):
            self._exclude(producer.input[0])

    def run(self) -> FastPlacement:
        """Compute the placement."""
        for node in self.graph.nodes:
            layer = self._layer_of.get(id(node))
            if layer is not None:
                self._place_layer(layer)
            elif id(node) in self._bias_nodes:
                continue
            elif node.op_type in INTEGER_ELEMENTWISE:
                self._place_elementwise(node)
            elif node.op_type == "MatMul":
                self._place_product(node)
            elif node.op_type in VALUE_PICKING:
                self._place_value_move(node)
        self._choose_pads()
        return self.placed

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _place_layer(self, layer: OnnxLayer) -> None:
        tensor = layer.reader.input[0]
        own = self._inputs[layer.name]
        if own.is_plain and self._required[tensor].is_like(own.source) and tensor not in self._excluded:
            self._quantize_for(tensor, layer.reader)
            self.placed.covered_layers.add(layer.name)
        if own.bits != 8:
            return
        if layer.kind is LayerKind.CONV:
            self._require_output(layer.node, f'onnxruntime computes convolution "{layer.name}" in float')
        elif layer.kind is LayerKind.AVERAGE_POOL and layer.name in self.placed.covered_layers:
            if layer.pad is not None:
                self._quantize_moved(layer.pad)
                self._quantize_for(layer.node.input[0], layer.node)
            self._require_output(layer.node, f'onnxruntime computes pooling "{layer.name}" in float')

    def _place_elementwise(self, node: NodeProto) -> None:
        data = [name for name in node.input if name and not self.graph.is_constant(name)]
        if not any(self._is_integer(name) for name in data) or node.output[0] not in self._before_integers:
            return
        needed = [*data, self._behind_activation(node)]
        missing = [name for name in needed if name in self._float or self._source(name) is None]
        if missing:
            for name in missing:
                self._skip(name, f"{node.op_type} stays float")
            return
        for name in data:
            self._quantize_for(name, node)
        self.placed.constants.extend(
            (node, index) for index, name in enumerate(node.input) if name and self.graph.is_constant(name)
        )
        self._require_output(node, "")

    def _place_product(self, node: NodeProto) -> None:
        """Place a product of two computed matrices, as in attention; its output may stay float."""
        if any(self.graph.is_constant(name) for name in node.input):
            return
        if all(name not in self._float and self._source(name) is not None for name in node.input):
            for name in node.input:
                self._quantize_for(name, node)

    def _place_value_move(self, node: NodeProto) -> None:
        """Keep moved values integer if a layer or a product behind them reads integers."""
        if not self._is_integer(node.input[0]) or not self._picks(node):
            return
        source = self._source(node.input[0])
        if source is None or not source.is_like(self._source(node.output[0])):
            return
        moved = _moved(node)
        if not self._before_integers.isdisjoint(moved) and not any(name in self._float for name in moved):
            self._quantize_moved(node)

    # -- quantized tensors ----------------------------------------------------------------------------------------

    def _quantize_for(self, tensor: str, reader: NodeProto) -> None:
        """Quantize a tensor for one reader."""
        if tensor in self.placed.integer_tensors:
            return
        source = self._source(tensor)
        assert source is not None  # checked by the caller
        self.placed.quantized_for_readers[tensor] = source
        readers = self.placed.readers.setdefault(tensor, [])
        if not any(other is reader for other in readers):
            readers.append(reader)

    def _quantize_moved(self, node: NodeProto) -> None:
        source = self._source(node.input[0])
        assert source is not None
        for name in _moved(node):
            self._keep_integer(name, source)

    def _require_output(self, node: NodeProto, consequence: str) -> None:
        output = self._behind_activation(node)
        source = self._source(output)
        if source is None or output in self._float:
            self._skip(output, consequence)
        else:
            self._keep_integer(output, source)

    def _skip(self, tensor: str, consequence: str) -> None:
        if any(skip.layer == tensor for skip in self.placed.skipped):
            return
        reason = self._float.get(tensor, "no factors were observed for this tensor")
        if tensor in self._excluded:
            reason = "it feeds a layer of another bit width"
        self.placed.skipped.append(Skip(tensor, f"{reason}; {consequence}"))

    def _keep_integer(self, tensor: str, source: ParameterSource) -> None:
        self._sources[tensor] = source
        self.placed.integer_tensors[tensor] = source
        self.placed.quantized_for_readers.pop(tensor, None)
        self.placed.readers.pop(tensor, None)

    def _is_integer(self, tensor: str) -> bool:
        return tensor in self.placed.integer_tensors

    def _behind_activation(self, node: NodeProto) -> str:
        """The tensor to quantize for a node: its output, or that of an activation that is its only reader."""
        output = node.output[0]
        user = self.graph.only_consumer(output)
        if user is None or user.op_type not in ACTIVATIONS:
            return output
        source = self._source(user.output[0])
        if user.output[0] in self._float:
            return user.output[0]
        if source is None and self._source(output) is not None:
            return output
        if source is None or self._absorbs(user, source.qparams):
            return user.output[0]
        return output

    def _absorbs(self, activation: NodeProto, qparams: QParams | None) -> bool:
        """Whether the limits of a quantizer have the same effect as an activation; before calibration: may have."""
        low, high = activation_limits(self.graph, activation)
        if qparams is None:  # parameters are fitted to a lower limit of zero; those of two limits seldom suit both
            return low == 0 or (low < 0 and high == np.inf)
        slack = float(np.finfo(np.float32).eps)
        bottom = (LOWEST - qparams.zero_point) * qparams.step
        top = (HIGHEST - qparams.zero_point) * qparams.step
        return bottom >= low - slack and top <= high + slack * max(1.0, abs(high))

    # -- sources of parameters -----------------------------------------------------------------------------------------

    def _source(self, tensor: str) -> ParameterSource | None:
        if tensor in self._excluded or not tensor:
            return None
        if tensor not in self._sources:
            self._sources[tensor] = None  # ends cycles: a tensor that depends on itself has none
            found = self._found(tensor)
            if found is not None and found.qparams is not None:
                found = replace(found, qparams=self._fitted(tensor, found.qparams))
            self._sources[tensor] = found
        return self._sources[tensor]

    def _found(self, tensor: str) -> ParameterSource | None:
        found = self._of_readers(tensor)
        if found is not None:
            return found
        producer = self.graph.producer(tensor)
        inherited = self._source(producer.input[0]) if producer is not None and self._picks(producer) else None
        if inherited is not None:
            return inherited
        found = self._observed(tensor)
        if found is not None:
            return found
        if producer is not None and producer.op_type in ZERO_TO_ONE:
            return ParameterSource(qparams=QParams.of(PROBABILITY_STEP, LOWEST))
        return self._source(producer.input[0]) if producer is not None and producer.op_type in AVERAGING else None

    def _of_readers(self, tensor: str) -> ParameterSource | None:
        """The parameters of the layers that read a tensor, also through operators that move or scale values."""
        if tensor in self._required:
            return self._required[tensor]
        for user in self.graph.consumers(tensor):
            factor = 1.0 if user.op_type in VALUE_KEEPING and self._picks(user) else constant_factor(self.graph, user)
            found = self._of_readers(user.output[0]) if factor is not None and user.input[0] == tensor else None
            if found is not None:
                return found.divided(factor or 1.0)
        return None

    def _picks(self, node: NodeProto) -> bool:
        if node.op_type == "Pad":
            return is_zero_pad(self.graph, node)
        if node.op_type == "Resize":
            return attribute_value(node, "mode", "nearest") in ("nearest", "linear")
        return node.op_type in VALUE_PICKING

    def _fitted(self, tensor: str, qparams: QParams) -> QParams:
        """Adjust parameters to the limits of the activation that computes the tensor, so that it is absorbed.

        Without such an activation: to the values that the readers tell apart.
        """
        producer = self.graph.producer(tensor)
        while producer is not None and (self._picks(producer) or producer.op_type in AVERAGING):
            producer = self.graph.producer(producer.input[0])
        if producer is None or producer.op_type not in ACTIVATIONS | ZERO_TO_ONE:
            floor = without_effect_below(self.graph, tensor)
            return qparams if floor is None else raised_to(qparams, floor)
        is_activation = producer.op_type in ACTIVATIONS
        low, high = activation_limits(self.graph, producer) if is_activation else (0.0, 1.0)
        if low != 0:
            return qparams
        # No value is below zero: all integers cover the range from zero to the upper limit, which is kept (or
        # replaced by that of a ReLU6).
        scale = min((HIGHEST - qparams.zero_point) * qparams.step, high) / 255
        return qparams.moved(scale, LOWEST)

    def _tensors_before_integers(self) -> set[str]:
        """The tensors whose values reach a layer or a product of matrices, through nodes that can work on integers."""
        found: set[str] = set()
        for node in reversed(self.graph.nodes):
            passes = node.op_type in VALUE_PICKING or node.op_type in INTEGER_ELEMENTWISE or node.op_type in ACTIVATIONS
            reaches = id(node) in self._layer_of or node.op_type == "MatMul"
            if reaches or (passes and not found.isdisjoint(_moved(node))):
                found.update(node.input)
        return found

    def _choose_pads(self) -> None:
        placed = self.placed
        for node in self.graph.nodes:
            if node.op_type != "Pad" or node.output[0] not in placed.integer_tensors:
                continue
            if placed.integer_tensors[node.output[0]].is_like(placed.source(node.input[0])):
                placed.pads[node.output[0]] = node


def _moved(node: NodeProto) -> list[str]:
    """The outputs that hold values of the input; the second output of MaxPool holds indices."""
    return [name for name in node.output if name] if node.op_type == "Split" else [node.output[0]]
