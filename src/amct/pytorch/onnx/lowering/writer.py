"""Writes the nodes and constants of a lowered program, and gives them their names.

Tensors have temporary names until the graph is complete: then those that are results of the program's operations get
the names of these, the others are numbered.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from onnx import NodeProto, TensorProto
from torch import Tensor

from amct.export.onnx.messages import make_attribute
from amct.pytorch.model_copy import as_array
from amct.pytorch.onnx.lowering.registry import NotLoweredError
from amct.pytorch.onnx.lowering.sizes import Size, Sizes, expression, is_static

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

ONNX_TYPES = {
    torch.float32: TensorProto.FLOAT, torch.float64: TensorProto.DOUBLE, torch.float16: TensorProto.FLOAT16,
    torch.int64: TensorProto.INT64, torch.int32: TensorProto.INT32, torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8, torch.uint8: TensorProto.UINT8, torch.bool: TensorProto.BOOL,
}  # fmt: skip
"""The element types of tensors that are lowered."""


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph that is written.

    Attributes:
        name: Its temporary name; empty for a constant that is not stored yet.
        dtype: Its element type.
        shape: Its shape; sizes may be dynamic.
        constant: Its values, if they are known and few enough to compute with.
        parameter: The values of a parameter or buffer of any size.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Size, ...]
    constant: Tensor | None = None
    parameter: Tensor | None = None

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def axis(self, axis: int) -> int:
        """An axis counted from the front."""
        return axis % self.rank if self.rank else 0

    def axes(self, axes: int | Sequence[int] | None) -> list[int]:
        """Axes counted from the front; all of them if none are given."""
        if axes is None or axes == []:
            return list(range(self.rank))
        return sorted(self.axis(axis) for axis in ([axes] if isinstance(axes, int) else axes))

    def size(self, axis: int) -> Size:
        """The size along an axis."""
        return self.shape[axis]


Result = Value | list[Value]
Number = int | float | bool


@dataclass(eq=False)
class WrittenNode:
    """A node with the scopes of the operation that it belongs to; its tensors have temporary names."""

    proto: NodeProto
    scopes: tuple[str, ...]
    operation: str


class Writer:
    """The graph so far, with the operations that most rules need."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[WrittenNode] = []
        self.declared: dict[str, Value] = {}
        self.stored: dict[str, NDArray[Any]] = {}
        self.sizes = Sizes(self)
        self.result: Any = None
        """What torch says about the result of the operation that is being lowered: a tensor without values, or more."""
        self._scopes: tuple[str, ...] = ()
        self._operation = ""
        self._constants: dict[tuple[Any, ...], str] = {}
        self.count = 0
        """How many tensors nodes have made: their temporary names are % and their number."""

    # -- places ----------------------------------------------------------------------------------------------------

    def enter(self, operation: str, scopes: tuple[str, ...], result: object) -> None:
        """The nodes that follow belong to an operation of the program, which has this result."""
        self._operation, self._scopes, self.result = operation, scopes, result

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A context for nodes that belong to no operation, because several may read them."""
        before = self._operation, self._scopes
        self._operation, self._scopes = "", ()
        try:
            yield
        finally:
            self._operation, self._scopes = before

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape of the result."""
        return tuple(self.result.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the result."""
        return self.result.dtype  # type: ignore[no-any-return]

    # -- nodes and constants ---------------------------------------------------------------------------------------

    def add(
        self,
        operator: str,
        *inputs: Value | None,
        dtype: torch.dtype | None = None,
        shape: Sequence[Size] | None = None,
        **attributes: object,
    ) -> Value:
        """Add a node with one output, by default of the type and shape of the operation's result."""
        (value,) = self.add_many(operator, *inputs, outputs=[(dtype or self.dtype, shape)], **attributes)
        return value

    def add_many(
        self,
        operator: str,
        *inputs: Value | None,
        outputs: Sequence[tuple[torch.dtype, Sequence[Size] | None]],
        **attributes: object,
    ) -> list[Value]:
        """Add a node with several outputs, given by type and shape; without a shape, that of the result."""
        proto = NodeProto(op_type=operator)
        proto.input.extend("" if value is None else self.name_of(value) for value in inputs)
        while proto.input and not proto.input[-1]:
            del proto.input[-1]
        proto.attribute.extend(make_attribute(name, value) for name, value in attributes.items() if value is not None)
        made = []
        for dtype, shape in outputs:
            self.count += 1
            value = Value(f"%{self.count}", dtype, tuple(self.shape if shape is None else shape))
            made.append(value)
            self.declared[value.name] = value
            proto.output.append(value.name)
        self.nodes.append(WrittenNode(proto, self._scopes, self._operation))
        return made

    def name_of(self, value: Value) -> str:
        """The temporary name of a tensor; a constant is stored now."""
        if value.name:
            return value.name
        assert value.constant is not None
        array = as_array(value.constant)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            name = f"%c{len(self._constants)}"
            self._constants[key] = name
            self.stored[name] = array.copy()  # an operation in place may change the tensor for later readers
        return self._constants[key]

    def constant(self, value: Tensor | Number | Sequence[Number], dtype: torch.dtype | None = None) -> Value:
        """A constant; a number has the type of the result unless one is given."""
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=dtype or self.dtype)
        elif dtype is not None:
            value = value.to(dtype)
        return Value("", value.dtype, tuple(value.shape), value)

    def ints(self, values: Sequence[int]) -> Value:
        """A constant int64 vector: axes, sizes, positions."""
        return self.constant(torch.tensor(list(values), dtype=torch.int64))

    # -- operations that most rules need ---------------------------------------------------------------------------

    def mul(self, one: Value, other: Value) -> Value:
        """The product of two tensors of one type."""
        return self.binary("Mul", one, other)

    def binary(self, operator: str, one: Value, other: Value, dtype: torch.dtype | None = None) -> Value:
        """An operator with broadcasting on two tensors of one type."""
        return self.add(operator, one, other, dtype=dtype or one.dtype, shape=broadcast(one.shape, other.shape))

    def unary(self, operator: str, x: Value, **attributes: object) -> Value:
        """An operator that keeps type and shape."""
        return self.add(operator, x, dtype=x.dtype, shape=x.shape, **attributes)

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        """The tensor in another type."""
        if x.dtype is dtype:
            return x
        if x.constant is not None:
            return self.constant(x.constant, dtype)
        if dtype not in ONNX_TYPES:
            raise NotLoweredError(f"the type {dtype}")
        return self.add("Cast", x, dtype=dtype, shape=x.shape, to=ONNX_TYPES[dtype])

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        """The tensor with its axes in another order."""
        if list(order) == list(range(x.rank)):
            return x
        if x.constant is not None:
            return self.constant(x.constant.permute(*order))
        shape = [x.shape[axis] for axis in order]
        return self.add("Transpose", x, perm=list(order), dtype=x.dtype, shape=shape)

    def reshape(self, x: Value, shape: Sequence[Size]) -> Value:
        """The tensor in another shape, which has no -1.

        Dynamic sizes are copied from the same axis (0) or left over (-1) where that says it all.
        """
        if same_shape(x.shape, shape):
            return x
        if x.constant is not None:
            return self.constant(x.constant.reshape([int(size) for size in shape]))
        if any(size == 0 for size in shape if is_static(size)):
            raise NotLoweredError("a reshape of an empty tensor")
        sizes: list[Size] = list(shape)
        for axis, size in enumerate(sizes[: x.rank]):
            if not is_static(size) and expression(size) == expression(x.shape[axis]):
                sizes[axis] = 0
        dynamic = [axis for axis, size in enumerate(sizes) if not is_static(size)]
        if len(dynamic) == 1:
            sizes[dynamic[0]] = -1
        return self.add("Reshape", x, self.sizes.shape(sizes), dtype=x.dtype, shape=shape)

    def unsqueeze(self, x: Value, axes: Sequence[int]) -> Value:
        """The tensor with new axes of size 1 at these places of the result."""
        if not axes:
            return x
        sizes = iter(x.shape)
        shape = [1 if axis in axes else next(sizes) for axis in range(x.rank + len(axes))]
        if x.constant is not None:
            return self.constant(x.constant.reshape([int(size) for size in shape]))
        return self.add("Unsqueeze", x, self.ints(sorted(axes)), dtype=x.dtype, shape=shape)

    def squeeze(self, x: Value, axes: Sequence[int]) -> Value:
        """The tensor without these axes, which have size 1."""
        if not axes:
            return x
        shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
        if x.constant is not None:
            return self.constant(x.constant.reshape([int(size) for size in shape]))
        return self.add("Squeeze", x, self.ints(sorted(axes)), dtype=x.dtype, shape=shape)

    def slice(self, x: Value, axis: int, start: Size, end: Size, step: int = 1, size: Size | None = None) -> Value:
        """Positions ``start`` to ``end`` of an axis; ``size`` is how many these are, by default end - start."""
        length = end - start if size is None else size
        shape = [*x.shape[:axis], length, *x.shape[axis + 1 :]]
        limits = [self.sizes.shape([limit]) for limit in (start, end)]
        return self.add("Slice", x, *limits, self.ints([axis]), self.ints([step]), dtype=x.dtype, shape=shape)

    def reduce(self, operator: str, x: Value, axes: Sequence[int], *, keep: bool = True) -> Value:
        """A reduction over axes."""
        kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
        shape = kept if keep else [size for axis, size in enumerate(x.shape) if axis not in axes]
        return self.add(operator, x, self.ints(axes), keepdims=int(keep), dtype=x.dtype, shape=shape)


def broadcast(one: Sequence[Size], other: Sequence[Size]) -> tuple[Size, ...]:
    """The shape of an operation with broadcasting."""
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    padded = [1] * (len(longer) - len(shorter)) + list(shorter)
    return tuple(b if is_static(a) and a == 1 else a for a, b in zip(longer, padded, strict=True))


def same_shape(one: Sequence[Size], other: Sequence[Size]) -> bool:
    """Whether two shapes are equal, also where their sizes are dynamic."""
    return len(one) == len(other) and all(expression(a) == expression(b) for a, b in zip(one, other, strict=True))
