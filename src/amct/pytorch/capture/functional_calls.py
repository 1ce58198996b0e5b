"""Reads calls of torch functions that compute a layer: ``F.linear``, ``addmm``, products, convolutions.

Which output channels of which parameter such a call uses follows from the memory layout of its weight operand: a
parameter itself, its transpose, or a slice of it (the projections of nn.MultiheadAttention).

Layers whose forward is written in another way than torch's: with a computed weight, or as a product.

In a copy of the model a layer that computes its weight from parameters only (weight standardization) gets the computed
value as its own weight, and the torch function that its forward calls gets this weight instead of a newly computed one.
A linear layer that multiplies by its transposed weight calls ``linear``. So these layers are quantized like any other.
What their forward does besides (padding) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from amct.pytorch.capture.layer_types import quantizable_type

Settings = tuple[tuple[str, Any], ...]
Arguments = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionalCall:
    """One call that computes a layer.

    Attributes:
        type: The torch.nn type that computes the same.
        input: The activation.
        weight: The weight operand.
        columns: Whether the output channels are the columns of the weight operand, as in ``x @ weight``.
        bias: The bias operand.
        settings: Arguments of the torch.nn type: stride, padding and so on.
    """

    type: str
    input: Tensor
    weight: Tensor
    columns: bool = False
    bias: Tensor | None = None
    settings: Settings = ()


@dataclass(frozen=True, kw_only=True)
class Channels:
    """The output channels of a parameter that a call uses; ``transposed``: they are its columns, not its rows."""

    transposed: bool
    start: int
    stop: int

    def of(self, parameter: Tensor) -> Tensor:
        """Their weight in the layout of the torch.nn type, as a view."""
        return (parameter.t() if self.transposed else parameter)[self.start : self.stop]


def functional_call(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FunctionalCall | None:
    """The layer that a call of a torch function computes; None if it computes none."""
    form = _FORMS.get(func) if callable(func) else None
    if form is None:
        return None
    read, parameters = form
    given = dict(zip(parameters.values(), args, strict=False))
    given.update({parameters.get(name, name): value for name, value in kwargs.items()})
    tensors = (given.get("input"), given.get("weight"))
    return read(given) if all(isinstance(tensor, Tensor) for tensor in tensors) else None


def with_operands(
    func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], **operands: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that ``functional_call`` reads, with other values for ``weight`` and ``bias``."""
    names = tuple(_FORMS[func][1].items())
    given = [operands.get(name, value) for (_, name), value in zip(names, args, strict=False)]
    by_name = {own: operands[name] for own, name in names[len(args) :] if name in operands}
    return tuple(given), {**kwargs, **by_name}


def base_of(weight: Tensor) -> Tensor:
    """The tensor of which a tensor is a view; a tensor that is no view itself."""
    return weight if weight._base is None else weight._base


def channels_of(call: FunctionalCall, parameter: Tensor) -> Channels | None:
    """The output channels of ``parameter`` that a call uses; None if its weight is another part of it."""
    weight = call.weight
    offset = int(weight.storage_offset() - parameter.storage_offset())
    if weight.shape == parameter.shape and weight.stride() == parameter.stride() and offset == 0:
        outputs = weight.shape[1 if call.columns else 0]
        return Channels(transposed=call.columns, start=0, stop=outputs)
    if weight.ndim != 2 or parameter.ndim != 2 or not parameter.is_contiguous():
        return None
    rows, columns = parameter.shape
    outputs, inputs = weight.shape[::-1] if call.columns else weight.shape
    if weight.stride() not in ((columns, 1), (1, columns)):
        return None
    transposed = (weight.stride() == (columns, 1)) == call.columns
    if transposed:
        found = Channels(transposed=True, start=offset, stop=offset + outputs)
        return found if inputs == rows and found.stop <= columns else None
    start, column = divmod(offset, columns)
    return Channels(transposed=False, start=start, stop=start + outputs) if inputs == columns and not column else None


def _linear(given: Arguments) -> FunctionalCall:
    return FunctionalCall(type="Linear", input=given["input"], weight=given["weight"], bias=given.get("bias"))


def _product(given: Arguments) -> FunctionalCall | None:
    """``x @ weight``, and ``addmm(bias, x, weight)``."""
    plain = given.get("beta", 1) == 1 and given.get("alpha", 1) == 1 and given.get("out") is None
    if not plain or given["weight"].ndim != 2:
        return None
    return FunctionalCall(
        type="Linear", input=given["input"], weight=given["weight"], bias=given.get("bias"), columns=True
    )


def _convolution(type_name: str) -> Callable[[Arguments], FunctionalCall]:
    rank = int(type_name[-2])
    names = ("stride", "padding", "dilation", "groups", "output_padding")

    def read(given: Arguments) -> FunctionalCall:
        settings = tuple((name, _spread(name, given[name], rank)) for name in names if name in given)
        return FunctionalCall(
            type=type_name, input=given["input"], weight=given["weight"], bias=given.get("bias"), settings=settings
        )

    return read


def _spread(name: str, value: Any, rank: int) -> Any:  # noqa: ANN401  a number, numbers or a word
    """One number per spatial dimension, as the attributes of a torch.nn module have them."""
    if name == "groups" or isinstance(value, str):
        return value
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * rank if len(numbers) == 1 else numbers


_Form = tuple[Callable[[Arguments], FunctionalCall | None], Mapping[str, str]]
_LINEAR = {name: name for name in ("input", "weight", "bias")}
_MM = {"input": "input", "mat2": "weight"}
_MATMUL = {"input": "input", "other": "weight"}
_ADDMM = {"input": "bias", "mat1": "input", "mat2": "weight"}
_CONV = {name: name for name in (*_LINEAR, "stride", "padding", "dilation", "groups")}
_DECONV = {name: name for name in (*_LINEAR, "stride", "padding", "output_padding", "groups", "dilation")}
_FORMS: Mapping[Any, _Form] = MappingProxyType(
    {
        functional.linear: (_linear, _LINEAR),
        torch.addmm: (_product, _ADDMM),
        Tensor.addmm: (_product, _ADDMM),
        torch.mm: (_product, _MM),
        Tensor.mm: (_product, _MM),
        torch.matmul: (_product, _MATMUL),
        Tensor.matmul: (_product, _MATMUL),
        functional.conv1d: (_convolution("Conv1d"), _CONV),
        functional.conv2d: (_convolution("Conv2d"), _CONV),
        functional.conv3d: (_convolution("Conv3d"), _CONV),
        functional.conv_transpose1d: (_convolution("ConvTranspose1d"), _DECONV),
        functional.conv_transpose2d: (_convolution("ConvTranspose2d"), _DECONV),
    }
)
"""How the calls of a function are read; its positional parameters, in order, with the names used here."""


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
    alike = own.shape == call.weight.shape and own.dtype == call.weight.dtype
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
