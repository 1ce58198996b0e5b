"""Reads calls of torch functions that compute a layer: ``F.linear``, ``addmm``, products, convolutions.

Which output channels of which parameter such a call uses follows from the memory layout of its weight operand: a
parameter itself, its transpose, or a slice of it (the projections of nn.MultiheadAttention).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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


def opened(func: object) -> Callable[..., Any] | None:
    """A copy of torch's attention function whose inner functions a mode can intercept; None for other functions.

    ``F.multi_head_attention_forward`` is written in Python and, while a mode is active, only ever hands itself over to
    that mode. The copy leaves out this check; it is not torch's own function that is changed.
    """
    if func is not functional.multi_head_attention_forward or not isinstance(func, FunctionType):
        return None
    names = {**func.__globals__, "has_torch_function": _never}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(_: object) -> bool:
    return False
