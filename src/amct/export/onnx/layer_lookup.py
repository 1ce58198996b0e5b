"""Finds the bound layers in a graph.

Only this module knows the ONNX form of each layer kind. A node that does not fit its binding raises an ``ExportError``
that names the layer, the node and the expected form.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from onnx import TensorProto

from amct.errors import ExportError, did_you_mean
from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.layer import OnnxLayer, further_node
from amct.export.onnx.messages import attribute_value
from amct.model import Skip
from amct.model.kinds import KIND_OF_OPERATOR, LayerKind
from amct.numerics.balancing import balance_weight

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from amct.export.onnx.kept_weights import KeptWeights
    from amct.numerics.qparams import LayerQParams


class LayerMismatchError(ExportError):
    """A node does not match the kind of its layer; ``reason`` says why without naming the node."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


AMCT_MARK = "op_data_type"
"""The attribute that AMCT writes into the nodes of the modified model; runtimes do not support it."""


def find_layers(
    model: ModelProto,
    bindings: Sequence[LayerBinding],
    qparams: Mapping[str, LayerQParams] | None = None,
    kept: KeptWeights | None = None,
) -> tuple[OnnxGraph, list[OnnxLayer], list[Skip]]:
    """Open a model for editing and find its layers, in graph order; their nodes get the names of the layers.

    Args:
        model: the model, which is not changed.
        bindings: the node of each layer.
        qparams: by layer; the layers without are not found. None: all are, without parameters.
        kept: that of ``OnnxGraph``.

    Raises:
        ExportError: a node does not match its binding or is bound twice, or parameters belong to no binding.
    """
    _check_names(bindings, qparams or {})
    graph = OnnxGraph(model, kept)
    for node in graph.nodes:
        graph.drop_attribute(node, AMCT_MARK)
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    bound = [binding for binding in bindings if qparams is None or binding.layer in qparams]
    calls: Counter[str] = Counter()
    layers = []
    for binding in bound:
        found = find_layer(graph, binding, None if qparams is None else qparams[binding.layer])
        layers.append(replace(found, call=calls[binding.layer]))
        calls[binding.layer] += 1
    layers.sort(key=lambda layer: position[layer.node.name])
    for layer in layers:
        graph.rename_node(layer.node, layer.name)
        if layer.pad is not None:
            graph.rename_node(layer.pad, f"{layer.name}_pad")
    found_names = {layer.layer for layer in layers}
    without = dict.fromkeys(binding.layer for binding in bindings if binding.layer not in found_names)
    skipped = [Skip(name, "it has no quantization factors") for name in without]
    return graph, layers, skipped


def _check_names(bindings: Sequence[LayerBinding], qparams: Mapping[str, LayerQParams]) -> None:
    names = [binding.layer for binding in bindings]
    nodes = [binding.node for binding in bindings]
    repeated = sorted(name for name, count in Counter(nodes).items() if count > 1)
    if repeated:
        raise ExportError(f"a node can be bound once only; bound more than once: {', '.join(repeated)}")
    unknown = sorted(set(qparams) - set(names))
    if unknown:
        raise ExportError(
            f'there are factors for layer "{unknown[0]}", which is not bound to an ONNX node.'
            f"{did_you_mean(unknown[0], names)} Bind it, or leave its factors out"
        )


def find_layer(graph: OnnxGraph, binding: LayerBinding, qparams: LayerQParams | None = None) -> OnnxLayer:
    """Find the weight, bias and settings of a bound layer and check that they match its binding.

    Raises:
        ExportError: node, weight, bias or number of parameters do not match the layer kind.
    """
    place = _Place(graph, binding, graph.node(binding.node), qparams)
    if place.node.op_type not in binding.kind.operators:
        place.refuse(f"expected {' or '.join(binding.kind.operators)}")
    if binding.kind is LayerKind.AVERAGE_POOL:
        return _find_pool(place)
    if binding.kind.is_recurrent:
        return _find_recurrent(place)
    return _find_linear(place) if binding.kind is LayerKind.LINEAR else _find_convolution(place)


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a layer is looked for: its node, and the parameters that it should fit."""

    graph: OnnxGraph
    binding: LayerBinding
    node: NodeProto
    qparams: LayerQParams | None

    def refuse(self, reason: str) -> NoReturn:
        where = (
            f'layer "{self.binding.layer}" ({self.binding.kind.value}, node "{self.node.name}" of {self.node.op_type})'
        )
        raise LayerMismatchError(f"{where}: {reason}", reason)

    def constant(self, index: int, what: str) -> NDArray[Any] | None:
        """An operand; None if the node does not have it."""
        if len(self.node.input) <= index or not self.node.input[index]:
            return None
        if not self.graph.is_constant(self.node.input[index]):
            self.refuse(f'its {what} "{self.node.input[index]}" is computed; expected a constant')
        return self.graph.constant(self.node.input[index])

    def weight(self, index: int = 1) -> NDArray[Any]:
        value = self.constant(index, "weight")
        if value is None:
            self.refuse("it has no weight input")
        if value.dtype.kind != "f":
            self.refuse(f"expected a floating-point weight, got {value.dtype}; start from the float model")
        return value

    def check_counts(self, channels_in: int, counts: tuple[int, ...]) -> None:
        """Check that there are as many scales, and balance factors, as the weight can have."""
        qparams = self.qparams
        if qparams is None:
            return
        for name, each in zip(("scale_w", "scale_r"), qparams.weights or (qparams.weight,), strict=False):
            if each.scale.numel() not in counts:
                legal = " or ".join(map(str, dict.fromkeys(counts)))
                self.refuse(f"expected {legal} {name}, got {each.scale.numel()}")
        if qparams.balance is not None and qparams.balance.numel() != channels_in:
            self.refuse(f"expected {channels_in} tensor_balance_factor, got {qparams.balance.numel()}")

    def found(self, element_type: int, **parts: Any) -> OnnxLayer:  # noqa: ANN401  fields of OnnxLayer
        """The layer."""
        kind, layer = self.binding.kind, self.binding.layer
        return OnnxLayer(layer=layer, kind=kind, node=self.node, given=self.qparams, element_type=element_type, **parts)

    def balanced(self, weight: NDArray[Any], groups: int = 1) -> NDArray[Any]:
        """The weight multiplied by its DMQ factors along the input channels."""
        if self.qparams is None or self.qparams.balance is None:
            return weight
        wide = torch.from_numpy(np.array(weight, dtype=np.promote_types(weight.dtype, np.float32)))
        return balance_weight(wide, self.qparams.balance, self.binding.kind.weight_kind, groups).numpy()


def _find_pool(place: _Place) -> OnnxLayer:
    graph, node, qparams = place.graph, place.node, place.qparams
    if qparams is not None and qparams.balance is not None:
        place.refuse("average pooling has no weight to balance: remove tensor_balance_factor")
    if qparams is not None and qparams.weight.scale.numel() != 1:
        place.refuse(f"expected 1 scale_w, got {qparams.weight.scale.numel()}")
    return place.found(graph.element_type(node.input[0]), pad=_zero_pad(graph, node.input[0]))


def _zero_pad(graph: OnnxGraph, tensor: str) -> NodeProto | None:
    """The zero Pad that computes a tensor, if the tensor has only one reader."""
    pad = graph.producer(tensor)
    if pad is None or pad.op_type != "Pad" or graph.only_consumer(tensor) is None:
        return None
    return pad if is_zero_pad(graph, pad) else None


def is_zero_pad(graph: OnnxGraph, pad: NodeProto) -> bool:
    """Whether a Pad node fills with zeros."""
    if attribute_value(pad, "mode", "constant") != "constant":
        return False
    if len(pad.input) < 3 or not pad.input[2]:
        return True
    value = graph.constant(pad.input[2])
    return value is not None and not np.any(value)


def _find_convolution(place: _Place) -> OnnxLayer:
    weight = place.weight()
    if weight.ndim < 3:
        place.refuse(f"expected a weight of at least 3 dimensions, got shape {list(weight.shape)}")
    groups = int(attribute_value(place.node, "group", 1))
    bias = place.constant(2, "bias")
    channels = weight.shape[0], weight.shape[1] * groups
    channels_in, channels_out = channels if place.binding.kind is LayerKind.CONV_TRANSPOSE else channels[::-1]
    place.check_counts(channels_in, (1, channels_out))
    return place.found(_float_type(weight), weight=place.balanced(weight, groups), bias=bias, groups=groups)


def _find_linear(place: _Place) -> OnnxLayer:
    node, stored = place.node, place.weight()
    if stored.ndim != 2:
        place.refuse(f"expected a weight of 2 dimensions, got shape {list(stored.shape)}")
    bias: NDArray[Any] | None
    if node.op_type == "Gemm":
        settings = {name: attribute_value(node, name, default) for name, default in _GEMM_DEFAULTS.items()}
        if settings != _GEMM_DEFAULTS:
            place.refuse(f"expected transA=0, alpha=1, beta=1, got {settings}")
        weight = stored if attribute_value(node, "transB", 0) else stored.T
        bias, bias_node = _gemm_bias(place, weight.shape[0]), None
    else:
        weight = stored.T
        bias, bias_node = _added_bias(place.graph, node, weight.shape[0])
    place.check_counts(weight.shape[1], (1, weight.shape[0]))
    return place.found(_float_type(stored), weight=place.balanced(weight), bias=bias, bias_node=bias_node)


_GEMM_DEFAULTS = {"transA": 0, "alpha": 1.0, "beta": 1.0}


def _gemm_bias(place: _Place, channels: int) -> NDArray[Any] | None:
    bias = place.constant(2, "bias")
    if bias is None:
        return None
    if bias.size not in (1, channels) or (bias.ndim > 0 and bias.shape[-1] != bias.size):
        place.refuse(f"expected a bias of {channels} values, got shape {list(bias.shape)}")
    return np.broadcast_to(bias.reshape(-1), channels)


def _added_bias(graph: OnnxGraph, node: NodeProto, channels: int) -> tuple[NDArray[Any] | None, NodeProto | None]:
    """The constant that an Add behind a MatMul adds, one value per output channel, and the Add node."""
    add = graph.only_consumer(node.output[0])
    if add is None or add.op_type != "Add":
        return None, None
    other = add.input[1] if add.input[0] == node.output[0] else add.input[0]
    bias = graph.constant(other) if graph.is_constant(other) else None
    if bias is None or bias.shape != (channels,):
        return None, None
    return bias, add


def _find_recurrent(place: _Place) -> OnnxLayer:
    node, qparams = place.node, place.qparams
    weight, recurrent = place.weight(1), place.weight(2)
    if weight.ndim != 3 or weight.shape[0] != 1 or attribute_value(node, "direction", "forward") != "forward":
        place.refuse(f"expected one forward direction, got a weight of shape {list(weight.shape)}")
    if qparams is not None and (qparams.hidden is None or len(qparams.weights) != 2):
        place.refuse("expected scale_h, offset_h and scale_r among its factors; calibrate the layer again")
    place.check_counts(weight.shape[2], (1, place.binding.kind.gates, weight.shape[1]))
    bias = place.constant(3, "bias")
    return place.found(
        _float_type(weight),
        weight=place.balanced(weight[0]),
        recurrent_weight=recurrent[0],
        bias=None if bias is None else bias.reshape(-1),
    )


def recurrent_problem(node: NodeProto) -> str | None:
    """The setting of an LSTM or GRU that has no quantized form; None if there is none."""
    kind = KIND_OF_OPERATOR[node.op_type]
    activations = [name.decode() for name in attribute_value(node, "activations", [])]
    problems = {
        "layout is 1 (batch first); only 0 can be quantized": attribute_value(node, "layout", 0) != 0,
        "it has peephole weights": kind is LayerKind.LSTM and len(node.input) > 7 and bool(node.input[7]),
        f"its activations are {activations}": activations not in ([], list(kind.onnx_activations)),
        "linear_before_reset is 0; only 1 can be quantized": kind is LayerKind.GRU
        and not attribute_value(node, "linear_before_reset", 0),
    }
    return next((problem for problem, present in problems.items() if present), None)


def _float_type(weight: NDArray[Any]) -> int:
    if weight.dtype == np.float16:
        return TensorProto.FLOAT16
    return TensorProto.DOUBLE if weight.dtype == np.float64 else TensorProto.FLOAT


# -- bindings: which node computes which layer -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerBinding:
    """A layer and a node that computes it; exported files name the node after the layer.

    A layer that is computed several times has several bindings; its further nodes are named ``<layer>@1`` and so on.
    """

    layer: str
    kind: LayerKind
    node: str

    @classmethod
    def of(cls, node: NodeProto) -> LayerBinding:
        """The binding of a node whose layer has its name."""
        return cls(layer=node.name, kind=KIND_OF_OPERATOR[node.op_type], node=node.name)


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
