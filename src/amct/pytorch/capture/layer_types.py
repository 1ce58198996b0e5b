"""What computes a layer: modules of quantizable types.

The forward of a layer may be written in another way than torch's. In a copy of the model a layer that computes its
weight from parameters only (weight standardization) gets the computed value as its own weight, and the torch function
that its forward calls gets this weight instead of a newly computed one. A linear layer that multiplies by its
transposed weight calls ``linear``. So these layers are quantized like any other. What their forward does besides
(padding) stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from amct.model import LayerFacts
from amct.model.kinds import KIND_OF_TORCH_TYPE
from amct.pipeline.weights import FloatWeight
from amct.pytorch.capture.functional_calls import Channels, FunctionalCall, base_of, channels_of, with_operands

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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

_DECONV3D = LayerType(layer_class=nn.ConvTranspose3d, operation="conv_transpose3d", input_rank=5, settings=_DECONV)
_ALL: Mapping[str, LayerType] = MappingProxyType({**LAYER_TYPES, "ConvTranspose3d": _DECONV3D})
"""With a type that is not quantizable, but into which a batch norm can be folded."""


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


def float_weights(module: nn.Module) -> tuple[FloatWeight, ...]:
    """The float weights of a layer of a quantizable type, named by attribute; none for average pooling."""
    kind = KIND_OF_TORCH_TYPE.get(quantizable_type(module) or "")
    if kind is None or not kind.has_weights:
        return ()
    return tuple(
        FloatWeight(
            name=name,
            tensor=getattr(module, name).detach(),
            kind=kind.weight_kind,
            groups=1 if kind.is_recurrent else getattr(module, "groups", 1),
            gates=kind.gates,
            torch_gates=kind if kind.is_recurrent else None,
        )
        for name in (("weight_ih_l0", "weight_hh_l0") if kind.is_recurrent else ("weight",))
    )


def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set other weights, given by attribute, in a module of a copied model."""
    for attribute, weight in weights.items():
        setattr(module, attribute, nn.Parameter(weight, requires_grad=False))


# -- layers with a computed weight -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputedWeight:
    """The values with which a layer calls its torch function; None if the layer has them stored."""

    weight: Tensor | None = None
    bias: Tensor | None = None

    def equals(self, other: ComputedWeight) -> bool:
        """Whether two calls of a layer use the same values."""
        pairs = ((self.weight, other.weight), (self.bias, other.bias))
        return all(
            one is two if one is None or two is None else one.shape == two.shape and bool((one == two).all())
            for one, two in pairs
        )


def computed_weight(
    module: nn.Module, call: FunctionalCall, constant: Callable[[Tensor], bool]
) -> ComputedWeight | None:
    """What ``module`` computed for a call in its forward; None if that is no layer of its kind or not constant."""
    own = getattr(module, "weight", None)
    if quantizable_type(module) != call.type or not isinstance(own, nn.Parameter) or constant(call.input):
        return None
    if base_of(call.weight) is own:
        return ComputedWeight() if _is_product(module, call, own) else None
    alike = call.product is None and own.shape == call.weight.shape and own.dtype == call.weight.dtype
    if not alike or call.columns or not constant(call.weight):
        return None
    if call.bias is None or call.bias is getattr(module, "bias", None):
        return ComputedWeight(weight=call.weight.detach().clone())
    if not constant(call.bias) or call.bias.shape != own.shape[:1] or call.type.startswith("ConvTranspose"):
        return None
    return ComputedWeight(weight=call.weight.detach().clone(), bias=call.bias.detach().clone())


def _is_product(module: nn.Module, call: FunctionalCall, own: Tensor) -> bool:
    """Whether a linear layer without bias computes ``x @ weight.T``."""
    whole = Channels(transposed=False, start=0, stop=own.shape[0])
    return call.columns and call.bias is None and module.bias is None and channels_of(call, own) == whole


def store_weights(model: nn.Module, computed: Mapping[str, ComputedWeight]) -> None:
    """Give layers of a copied model, by path, the values that they compute; the model shares no such layer."""
    for path, values in computed.items():
        module: Any = model.get_submodule(path)
        if values.weight is not None:
            module.weight = nn.Parameter(values.weight, requires_grad=module.weight.requires_grad)
        if values.bias is not None:
            module.bias = nn.Parameter(values.bias, requires_grad=module.weight.requires_grad)


def with_stored_weight(
    module: nn.Module, call: FunctionalCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """The call in the forward of a layer with its own weight and bias; None if the call is not that of the layer."""
    own: Any = module.weight
    if call.type != quantizable_type(module):
        return None
    if call.columns:
        return (functional.linear, (call.input, own), {}) if base_of(call.weight) is own else None
    if call.weight.shape != own.shape:
        return None
    return func, *with_operands(func, args, kwargs, weight=own, bias=module.bias)
