"""Reads calls of torch functions (``F.linear``, products, convolutions) that compute what a layer computes.

Which part of which parameter a call uses follows from the memory layout of its weight operand: a parameter itself, its
transpose, or a slice of it (the projections of nn.MultiheadAttention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from amct.pytorch.capture.products import (
    EXPERTS,
    Product,
    checked,
    einsum_product,
    matmul_product,
    own_rows,
    tensordot_product,
)

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
        product: How the axes of the operands are arranged for the layer; None: the layer takes them as they are.
        ends: The last row of each expert, where each row is of one expert (``own_rows``).
        added: What is added to the product, other than a bias.
    """

    type: str
    input: Tensor
    weight: Tensor
    columns: bool = False
    bias: Tensor | None = None
    settings: Settings = ()
    product: Product | None = None
    ends: Tensor | None = None
    added: Tensor | None = None

    def run(self, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """The result of the call, with a layer in place of the function."""
        if self.product is None:
            return layer(self.input)
        made = self.product.compute(layer, self.input, self.weight)
        made = made if self.ends is None else own_rows(made, self.ends)
        return made if self.added is None else made + self.added


@dataclass(frozen=True, kw_only=True)
class Channels:
    """The output channels of a parameter that a call uses; ``transposed``: they are its columns, not its rows."""

    transposed: bool
    start: int
    stop: int

    def of(self, parameter: Tensor) -> Tensor:
        """Their weight in the layout of the torch.nn type, as a view."""
        return (parameter.t() if self.transposed else parameter)[self.start : self.stop]

    def label(self, parameter: Tensor, *, marked: bool) -> str:
        """The part of a parameter in a layer's name; nothing for all of it.

        ``marked``: other calls use the rows of the parameter as output channels.
        """
        whole = self.start == 0 and self.stop == parameter.shape[1 if self.transposed else 0]
        if not whole:
            return f"[{':,' if self.transposed else ''}{self.start}:{self.stop}]"
        return "[transposed]" if self.transposed and marked else ""


@dataclass(frozen=True, kw_only=True)
class WeightView:
    """Any view of a parameter that a call uses as its weight, by shape, strides and offset."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    columns: bool = False
    product: Product | None = None
    transposed = False

    def of(self, parameter: Tensor) -> Tensor:
        """Its weight in the layout of the torch.nn type."""
        weight = parameter.as_strided(self.shape, self.strides, parameter.storage_offset() + self.offset)
        if self.product is not None:
            return self.product.rows(weight)
        return weight.t() if self.columns else weight

    def label(self, parameter: Tensor, *, marked: bool) -> str:
        """The part of a parameter in a layer's name; nothing for all of it."""
        del marked
        lengths, rest, parts = dict(zip(self.strides, self.shape, strict=True)), self.offset, []
        for stride, size in zip(parameter.stride(), parameter.shape, strict=True):
            start, rest = divmod(rest, stride)
            length = lengths.get(stride)
            whole = start == 0 and length == size
            parts.append(":" if whole else str(start) if length is None else f"{start}:{start + length}")
        label = ",".join(parts).rstrip(":,")
        return f"[{label}]" if label else ""


AnyPart = Channels | WeightView


def functional_calls(
    func: object,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_weight: Callable[[Tensor], bool] = lambda _: True,
) -> Sequence[FunctionalCall]:
    """The layers that a call of a torch function may compute, by which of its operands is the weight."""
    form = _FORMS.get(func) or _FORMS.get(getattr(func, "_qualified_op_name", None)) if callable(func) else None
    if form is None:
        return ()
    read, parameters = form
    if func is torch.einsum and len(args) == 2 and isinstance(args[1], (list, tuple)):
        args = (args[0], *args[1])
    if len(args) > len(parameters):
        return ()
    given = dict(zip(parameters.values(), args, strict=False))
    given.update({parameters.get(name, name): value for name, value in kwargs.items()})
    x, weight = given.get("input"), given.get("weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return ()
    found = [read(given)] if is_weight(weight) else []
    if read in _PRODUCTS and is_weight(x):
        found.append(read({**given, "input": weight, "weight": x, "weight_first": True}))
    return [call for call in found if call is not None]


def with_operands(
    func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], **operands: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that ``functional_calls`` reads, with other ``input``, ``weight`` or ``bias``."""
    names = tuple(_FORMS[func][1].items())
    given = [operands.get(name, value) for (_, name), value in zip(names, args, strict=False)]
    by_name = {own: operands[name] for own, name in names[len(args) :] if name in operands}
    return tuple(given), {**kwargs, **by_name}


def base_of(weight: Tensor) -> Tensor:
    """The tensor of which a tensor is a view; a tensor that is no view itself."""
    return weight if weight._base is None else weight._base


def channels_of(call: FunctionalCall, parameter: Tensor) -> AnyPart | None:
    """The part of ``parameter`` that a call uses as weight; None if that cannot be told."""
    found = _channels_of(call, parameter) if call.product is None else None
    if found is not None or not parameter.is_contiguous():
        return found
    return WeightView(
        shape=tuple(call.weight.shape),
        strides=tuple(call.weight.stride()),
        offset=int(call.weight.storage_offset() - parameter.storage_offset()),
        columns=call.columns,
        product=call.product,
    )


def _channels_of(call: FunctionalCall, parameter: Tensor) -> Channels | None:
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
    """``x @ weight`` and ``weight @ x``, ``addmm(bias, x, weight)`` and ``baddbmm``."""
    if not _is_plain(given):
        return None
    weight_first = "weight_first" in given
    bias, weight = given.get("bias"), given["weight"]
    has_plain_bias = bias is None or bias.shape in {weight.shape[1:], (1, *weight.shape[1:])}
    if weight.ndim == 2 and not weight_first and has_plain_bias:
        return FunctionalCall(
            type="Linear", input=given["input"], weight=given["weight"], bias=given.get("bias"), columns=True
        )
    return _of_axes(given, matmul_product(given["input"], given["weight"], weight_first=weight_first))


def _einsum(given: Arguments) -> FunctionalCall | None:
    if not isinstance(given["equation"], str):
        return None
    x, weight = given["input"], given["weight"]
    return _of_axes(given, einsum_product(given["equation"], x, weight, weight_first="weight_first" in given))


def _tensordot(given: Arguments) -> FunctionalCall | None:
    x, weight, dims = given["input"], given["weight"], given.get("dims", 2)
    if not _is_plain(given):
        return None
    return _of_axes(given, tensordot_product(x, weight, dims, weight_first="weight_first" in given))


def _experts(given: Arguments) -> FunctionalCall | None:
    """``grouped_mm``: each row of the activation times the weight of one expert."""
    x, weight, ends = given["input"], given["weight"], given.get("ends")
    is_other = given.get("bias") is not None or given.get("out_dtype") not in (None, x.dtype)
    if x.ndim != 2 or weight.ndim != 3 or ends is None or is_other:
        return None
    return _of_axes(given, checked(EXPERTS, x, weight))


_PRODUCTS = (_product, _einsum, _tensordot)
"""Either operand of these may be the weight."""


def _is_plain(given: Arguments) -> bool:
    return given.get("beta", 1) == 1 and given.get("alpha", 1) == 1 and given.get("out") is None


def _of_axes(given: Arguments, product: Product | None) -> FunctionalCall | None:
    if product is None:
        return None
    weight = given["weight"]
    sizes = dict(zip(product.weight, weight.shape, strict=True))
    groups = math.prod(sizes[axis] for axis in product.groups)
    return FunctionalCall(
        type="Conv1d" if product.groups else "Linear",
        input=given["input"],
        weight=weight,
        settings=(("groups", groups),) if product.groups else (),
        product=product,
        ends=given.get("ends"),
        added=given.get("bias"),
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
_EINSUM = {"equation": "equation", "operand": "input", "other": "weight"}
_TENSORDOT = {"a": "input", "b": "weight", "dims": "dims"}
_BADDBMM = {"input": "bias", "batch1": "input", "batch2": "weight"}
_GROUPED = {"self": "input", "mat2": "weight", "offs": "ends", "bias": "bias", "out_dtype": "out_dtype"}
_FALLBACK = {"input": "input", "weight": "weight", "offs": "ends"}
_ADDMM = {"input": "bias", "mat1": "input", "mat2": "weight"}
_CONV_CALL = {name: name for name in (*_LINEAR, "stride", "padding", "dilation", "groups")}
_DECONV_CALL = {name: name for name in (*_LINEAR, "stride", "padding", "output_padding", "groups", "dilation")}
_FORMS: Mapping[Any, _Form] = MappingProxyType(
    {
        functional.linear: (_linear, _LINEAR),
        torch.addmm: (_product, _ADDMM),
        Tensor.addmm: (_product, _ADDMM),
        torch.mm: (_product, _MM),
        Tensor.mm: (_product, _MM),
        torch.matmul: (_product, _MATMUL),
        Tensor.matmul: (_product, _MATMUL),
        torch.bmm: (_product, _MM),
        Tensor.bmm: (_product, _MM),
        torch.baddbmm: (_product, _BADDBMM),
        Tensor.baddbmm: (_product, _BADDBMM),
        torch.einsum: (_einsum, _EINSUM),
        torch.tensordot: (_tensordot, _TENSORDOT),
        getattr(torch, "_grouped_mm", None): (_experts, _GROUPED),
        "transformers::grouped_mm_fallback": (_experts, _FALLBACK),
        functional.conv1d: (_convolution("Conv1d"), _CONV_CALL),
        functional.conv2d: (_convolution("Conv2d"), _CONV_CALL),
        functional.conv3d: (_convolution("Conv3d"), _CONV_CALL),
        functional.conv_transpose1d: (_convolution("ConvTranspose1d"), _DECONV_CALL),
        functional.conv_transpose2d: (_convolution("ConvTranspose2d"), _DECONV_CALL),
    }
)
"""How the calls of a function are read; its positional parameters, in order, with the names used here."""
