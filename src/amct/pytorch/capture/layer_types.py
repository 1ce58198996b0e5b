"""The quantizable layer types of torch.nn: AMCT names, properties, what prevents quantization, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import nn

from amct.model import LayerFacts
from amct.model.kinds import KIND_OF_TORCH_TYPE
from amct.pipeline.weights import WeightPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LayerType:
    """One quantizable type: its class, the operation that computes it, and the settings to record."""

    layer_class: type[nn.Module]
    operation: str  # name of the aten (or amct) operation in a traced program
    input_rank: int | None = None  # with the batch dimension; None for any rank
    parameters: tuple[int, ...] = (1, 2)  # positions of weight and bias among the arguments of the operation
    settings: tuple[str, ...] = ()


_CONV = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
_DECONV = (*_CONV, "output_padding")
_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_RNN = ("input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bidirectional", "proj_size")

LAYER_TYPES: Mapping[str, LayerType] = MappingProxyType(
    {
        "Conv1d": LayerType(layer_class=nn.Conv1d, operation="conv1d", input_rank=3, settings=_CONV),
        "Conv2d": LayerType(layer_class=nn.Conv2d, operation="conv2d", input_rank=4, settings=_CONV),
        "Conv3d": LayerType(layer_class=nn.Conv3d, operation="conv3d", input_rank=5, settings=_CONV),
        "Linear": LayerType(layer_class=nn.Linear, operation="linear"),
        "ConvTranspose1d": LayerType(
            layer_class=nn.ConvTranspose1d, operation="conv_transpose1d", input_rank=3, settings=_DECONV
        ),
        "ConvTranspose2d": LayerType(
            layer_class=nn.ConvTranspose2d, operation="conv_transpose2d", input_rank=4, settings=_DECONV
        ),
        "AvgPool2d": LayerType(
            layer_class=nn.AvgPool2d, operation="avg_pool2d", input_rank=4, parameters=(), settings=_POOL
        ),
        "LSTM": LayerType(layer_class=nn.LSTM, operation="lstm", input_rank=3, parameters=(3, 4, 5, 6), settings=_RNN),
        "GRU": LayerType(layer_class=nn.GRU, operation="gru", input_rank=3, parameters=(2, 3, 4, 5), settings=_RNN),
    }
)

BATCH_NORMS: Mapping[str, type[nn.Module]] = MappingProxyType(
    {
        "BatchNorm1d": nn.BatchNorm1d,
        "BatchNorm2d": nn.BatchNorm2d,
        "BatchNorm3d": nn.BatchNorm3d,
        "SyncBatchNorm": nn.SyncBatchNorm,
    }
)

EXTRA_HEADS: Mapping[str, LayerType] = MappingProxyType(
    {
        "ConvTranspose3d": LayerType(
            layer_class=nn.ConvTranspose3d, operation="conv_transpose3d", input_rank=5, settings=_DECONV
        ),
    }
)
"""Not quantizable, but a batch norm can be folded into them."""

_ALL: Mapping[str, LayerType] = MappingProxyType({**LAYER_TYPES, **EXTRA_HEADS})


def quantizable_type(module: nn.Module) -> str | None:
    """AMCT's name of the module's type, or of its base type for subclasses; None if it is not quantizable."""
    return next((name for name, kind in LAYER_TYPES.items() if isinstance(module, kind.layer_class)), None)


def type_name(module: nn.Module) -> str:
    """The type name in reports and configs: the quantizable or batch norm type, else the module's class."""
    for name, kind in _ALL.items():
        if isinstance(module, kind.layer_class):
            return name
    for name, norm in BATCH_NORMS.items():
        if isinstance(module, norm):
            return name
    return type(module).__name__


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer in the topology: of a quantizable type, a head of folding, or a batch norm."""
    return layer_type(type_name(module)) is not None or isinstance(module, nn.modules.batchnorm._BatchNorm)


def layer_type(name: str) -> LayerType | None:
    """The entry of a type name, including types that only take part in folding."""
    return _ALL.get(name)


def own_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight of a layer (the input weight of a recurrent layer); None for a layer without weights."""
    weight = getattr(module, "weight_ih_l0" if isinstance(module, nn.RNNBase) else "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


def layer_facts(
    name: str, module: nn.Module, input_shapes: tuple[tuple[int | None, ...], ...], calls: int = 1
) -> LayerFacts:
    """The properties of a layer of a quantizable type."""
    kind = type_name(module)
    weight = own_weight(module)
    inputs, outputs = _channels(module)
    settings = {key: getattr(module, key) for key in _ALL[kind].settings}
    return LayerFacts(
        name=name,
        type=kind,
        class_name=type(module).__name__,
        in_channels=inputs,
        out_channels=outputs,
        groups=getattr(module, "groups", 1),
        bias=bool(module.bias) if isinstance(module, nn.RNNBase) else getattr(module, "bias", None) is not None,
        weight_shape=None if weight is None else tuple(weight.shape),
        dtype=str(torch.float32 if weight is None else weight.dtype).removeprefix("torch."),
        input_shapes=input_shapes,
        attributes=settings,
        calls=calls,
    )


def _channels(module: nn.Module) -> tuple[int | None, int | None]:
    for inputs, outputs in (
        ("in_channels", "out_channels"),
        ("in_features", "out_features"),
        ("input_size", "hidden_size"),
    ):
        if hasattr(module, inputs):
            return int(getattr(module, inputs)), int(getattr(module, outputs))
    return None, None


def setting_problem(module: nn.Module) -> str | None:
    """The setting that prevents quantization of a layer of a quantizable type, as a reason; None if there is none."""
    padding_mode = getattr(module, "padding_mode", "zeros")
    if padding_mode != "zeros":
        return f'padding_mode is "{padding_mode}"; only "zeros" can be quantized'
    if isinstance(module, nn.Conv3d) and module.dilation[0] != 1:
        return f"dilation is {module.dilation}; the first must be 1 in a quantized Conv3d"
    if isinstance(module, nn.AvgPool2d) and module.divisor_override is not None:
        return f"divisor_override is {module.divisor_override}; ONNX's AveragePool has no such setting"
    if isinstance(module, nn.RNNBase):
        return _rnn_setting_problem(module)
    return None


def _rnn_setting_problem(module: nn.RNNBase) -> str | None:
    if module.num_layers != 1:
        return f"it has {module.num_layers} layers; only recurrent modules with num_layers=1 can be quantized"
    if module.bidirectional:
        return "it is bidirectional; only one direction can be quantized"
    if module.dropout != 0:
        return f"dropout is {module.dropout:g}; only 0 can be quantized"
    if module.proj_size != 0:
        return f"proj_size is {module.proj_size}; only 0 can be quantized"
    return None


# -- weights -----------------------------------------------------------------------------------------------------------


def weight_parts(module: nn.Module) -> tuple[WeightPart, ...]:
    """The float weights of a layer of a quantizable type, named by attribute; none for average pooling."""
    kind = KIND_OF_TORCH_TYPE.get(quantizable_type(module) or "")
    if kind is None or not kind.has_weights:
        return ()
    return tuple(
        WeightPart(
            name=name,
            tensor=getattr(module, name).detach(),
            kind=kind.weight_kind,
            groups=1 if kind.is_recurrent else getattr(module, "groups", 1),
            gates=kind.gates,
            torch_gates=kind if kind.is_recurrent else None,
            balanced=name != "weight_hh_l0",
        )
        for name in (("weight_ih_l0", "weight_hh_l0") if kind.is_recurrent else ("weight",))
    )


def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set other weights, given by attribute, in a module of a copied model."""
    for attribute, weight in weights.items():
        setattr(module, attribute, nn.Parameter(weight, requires_grad=False))
