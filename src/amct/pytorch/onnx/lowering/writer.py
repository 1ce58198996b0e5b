"""What a lowering rule needs: the table where it is registered, and the writer of nodes and constants.

A rule is a function that takes the writer and the arguments of an operator of torch by their names in its schema
(``self`` and ``input`` are called ``x``), and returns the result: a tensor, or a list of tensors. A program with an
argument that a rule does not take, and that has not its default value, is not lowered.

Tensors have temporary names until the graph is complete: then those that are results of the program's operations get
the names of these, the others are numbered.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from onnx import TensorProto
from torch import Tensor

from amct.export.onnx.messages import GraphWriter, new_node
from amct.pytorch.user_model import as_array

if TYPE_CHECKING:
    from collections.abc import Iterator


_Function = TypeVar("_Function", bound=Callable[..., Any])

_WITHOUT_EFFECT = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "implicit", "sparse",
     "scale_grad_by_freq", "requires_grad", "stable", "sorted", "cudnn_enabled", "cudnn_enable", "momentum"}
)  # fmt: skip
"""Arguments that change where, when or in which order something is computed, not which of the allowed results."""


class NotLoweredError(Exception):
    """The program has an operator or an argument without a rule; the message says which."""


@dataclass(frozen=True)
class _Rule:
    function: Callable[..., Any]
    parameters: Collection[str]
    implied: Sequence[str]
    first: bool
    renamed: Mapping[str, str]


class Rules:
    """A table of rules, filled by decorators."""

    def __init__(self) -> None:
        self._rules: dict[str, _Rule] = {}

    def rule(
        self, *operators: str, implied: Sequence[str] = (), first: bool = False, **renamed: str
    ) -> Callable[[_Function], _Function]:
        """Register a function for operators of ``aten`` by name, or of another library as ``library::name``.

        Args:
            operators: The operators.
            implied: Arguments that the function does not take: shape and type of the result say what they mean.
            first: Of several results the function returns only the first; the others have no rule.
            renamed: By argument: the parameter of the function, if it has another name.

        Raises:
            ValueError: an operator has a rule already.
        """

        def register(function: _Function) -> _Function:
            parameters = inspect.signature(function).parameters.keys()
            for operator in operators:
                name = operator if "::" in operator else f"aten::{operator}"
                if name in self._rules:
                    raise ValueError(f'operator "{name}" has two rules')
                self._rules[name] = _Rule(function, parameters, implied, first, renamed)
            return function

        return register

    def __contains__(self, operator: str) -> bool:
        return operator in self._rules

    def apply(self, writer: Writer, operator: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> Result:
        """Call the rule of an operator.

        Raises:
            NotLoweredError: there is none, or it does not take one of the arguments.
        """
        if operator not in self._rules:
            raise NotLoweredError(f"{operator} has no rule")
        rule = self._rules[operator]
        taken = {}
        for name, value in arguments.items():
            own = rule.renamed.get(name, name)
            if own in rule.parameters:
                taken[own] = value
            elif name == "operator":
                raise NotLoweredError(f"{operator} has an argument of this name")
            elif name not in (*_WITHOUT_EFFECT, *rule.implied) and not _is_default(value, defaults.get(name)):
                raise NotLoweredError(f"{operator} with {name}={value!r}")
        if "operator" in rule.parameters:
            taken["operator"] = operator.partition("::")[2]
        if rule.first:
            writer.result = writer.result[0]
            return [rule.function(writer, **taken)]
        result: Result = rule.function(writer, **taken)
        return result


def _is_default(value: object, default: object) -> bool:
    return value is None or (type(value) is type(default) and value == default)


RULES = Rules()
rule = RULES.rule


SCOPES = "pkg.torch.onnx.name_scopes"
"""The metadata of a node: the modules whose calls contain it, outermost first, and the operation it is made of."""
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


class Writer(GraphWriter):
    """The graph so far, with the operations that most rules need."""

    def __init__(self, opset: int) -> None:
        super().__init__(opset)
        self.declared: dict[str, Value] = {}
        self.sizes = Sizes(self)
        self.result: Any = None
        """What torch says about the result of the operation that is being lowered: a tensor without values, or more."""
        self._scopes: tuple[str, ...] = ()
        self.count = 0
        """How many tensors nodes have made: their temporary names are % and their number."""

    # -- places ----------------------------------------------------------------------------------------------------

    def enter(self, scopes: tuple[str, ...], result: object) -> None:
        """The nodes that follow belong to these modules and operation of the program, which has this result."""
        self._scopes, self.result = scopes, result

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A context for nodes that belong to no operation, because several may read them."""
        before, self._scopes = self._scopes, ()
        try:
            yield
        finally:
            self._scopes = before

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
        given = ["" if value is None else self.name_of(value) for value in inputs]
        while given and not given[-1]:
            given.pop()
        made = []
        for dtype, shape in outputs:
            self.count += 1
            value = Value(f"%{self.count}", dtype, tuple(self.shape if shape is None else shape))
            made.append(value)
            self.declared[value.name] = value
        node = new_node(operator, given, [value.name for value in made], attributes)
        node.metadata_props.add(key=SCOPES, value=repr(list(self._scopes)))
        self.nodes.append(node)
        return made

    def name_of(self, value: Value) -> str:
        """The temporary name of a tensor; a constant is stored now."""
        if value.name:
            return value.name
        assert value.constant is not None
        array = as_array(value.constant)
        # The values are copied: an operation in place may change the tensor for later readers.
        return self.store(f"%c{len(self.initializers)}", array, (str(array.dtype), array.shape, array.tobytes()))

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


Size = int | torch.SymInt

_OPERATORS = {
    "Add": "Add", "Mul": "Mul", "FloorDiv": "Div", "CleanDiv": "Div", "IntTrueDiv": "Div", "Mod": "Mod",
    "PythonMod": "Mod", "Max": "Max", "Min": "Min",
}  # fmt: skip
"""Classes of sympy and torch for expressions of sizes, which are not negative, so that Div rounds down."""


def expression(size: Size) -> Any:  # noqa: ANN401  a sympy expression
    """The expression of a dynamic size; equal sizes have equal expressions."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_static(size: object) -> bool:
    """Whether a size is a number."""
    return isinstance(size, int) and not isinstance(size, bool)


def static(sizes: Sequence[object], what: str) -> list[int]:
    """Sizes that must be numbers.

    Raises:
        NotLoweredError: one is dynamic.
    """
    if not all(map(is_static, sizes)):
        raise NotLoweredError(f"{what} depends on a dynamic size")
    return [int(size) for size in sizes]  # type: ignore[call-overload]


class Sizes:
    """Writes dynamic sizes as int64 tensors with one element, each once."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._sources: dict[Any, tuple[Value, int]] = {}
        self._written: dict[Any, Value] = {}

    def add_input(self, value: Value) -> None:
        """Note the dynamic axes of an input of the graph."""
        for axis, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                self._sources.setdefault(expression(size), (value, axis))

    def tensor(self, size: Size) -> Value:
        """A size as a tensor of shape [1].

        Raises:
            NotLoweredError: it depends on values of tensors, or on an operation without a rule.
        """
        return self._of(expression(size))

    def shape(self, sizes: Sequence[Size]) -> Value:
        """A shape as a tensor; -1 stands for what is left over in a reshape."""
        if all(map(is_static, sizes)):
            return self._writer.ints(static(sizes, "a shape"))
        parts: list[Value] = []
        known: list[int] = []
        for size in sizes:
            if is_static(size):
                known.append(int(size))
                continue
            if known:
                parts.append(self._writer.ints(known))
                known = []
            parts.append(self.tensor(size))
        if known:
            parts.append(self._writer.ints(known))
        if len(parts) == 1:
            return parts[0]
        return self._writer.add("Concat", *parts, axis=0, dtype=torch.int64, shape=(len(sizes),))

    def _of(self, wanted: Any) -> Value:  # noqa: ANN401  a sympy expression or a number
        if isinstance(wanted, int) or wanted.is_Integer:
            return self._writer.ints([int(wanted)])
        if wanted not in self._written:
            with self._writer.shared():
                self._written[wanted] = self._compute(wanted)
        return self._written[wanted]

    def _compute(self, wanted: Any) -> Value:  # noqa: ANN401  a sympy expression
        writer = self._writer
        if wanted in self._sources:
            value, axis = self._sources[wanted]
            return writer.add("Shape", value, start=axis, end=axis + 1, dtype=torch.int64, shape=(1,))
        kind = type(wanted).__name__
        if kind in ("Pow", "PowByNatural") and wanted.args[1].is_Integer and wanted.args[1] > 0:
            return functools.reduce(writer.mul, [self._of(wanted.args[0])] * int(wanted.args[1]))
        if kind not in _OPERATORS:
            raise NotLoweredError(f"a size that is computed as {wanted}")
        parts = [self._of(part) for part in wanted.args]
        return functools.reduce(
            lambda one, other: writer.add(_OPERATORS[kind], one, other, dtype=torch.int64, shape=(1,)), parts
        )
