"""Sizes that are known only when the model runs, computed in the graph from the shapes of its inputs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from amct.pytorch.onnx.lowering.registry import NotLoweredError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.onnx.lowering.writer import Value, Writer

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
