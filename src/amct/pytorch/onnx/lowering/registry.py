"""The table of lowering rules: for each operator of a captured program the function that writes its ONNX nodes.

A rule takes the writer and the operator's arguments by their names in torch's schema (``self`` and ``input`` are called
``x``). An argument that a rule does not take must have its default value, otherwise the program is not lowered. Rules
return the result: a tensor, or a list of tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from amct.pytorch.onnx.lowering.writer import Result, Writer

    Rule = Callable[..., Result]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_WITHOUT_EFFECT = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "implicit", "sparse",
     "scale_grad_by_freq", "requires_grad", "stable", "sorted", "cudnn_enabled", "cudnn_enable", "momentum"}
)  # fmt: skip
"""Arguments that change where, when or in which order something is computed, not which of the allowed results."""


class NotLoweredError(Exception):
    """The program has an operator or an argument without a rule; the message says which."""


class Rules:
    """A table of rules, filled by decorators."""

    def __init__(self) -> None:
        self._rules: dict[str, tuple[Rule, Mapping[str, Any]]] = {}

    def rule(self, *operators: str) -> Callable[[_Function], _Function]:
        """Register a function for operators of ``aten`` by name, or of another library as ``library::name``.

        Raises:
            ValueError: an operator has a rule already.
        """

        def register(function: _Function) -> _Function:
            parameters = inspect.signature(function).parameters
            for operator in operators:
                name = operator if "::" in operator else f"aten::{operator}"
                if name in self._rules:
                    raise ValueError(f'operator "{name}" has two rules')
                self._rules[name] = (function, MappingProxyType(dict(parameters)))
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
        function, parameters = self._rules[operator]
        taken = {}
        for name, value in arguments.items():
            if name in parameters:
                taken[name] = value
            elif name == "operator":
                raise NotLoweredError(f"{operator} has an argument of this name")
            elif name not in _WITHOUT_EFFECT and not _is_default(value, defaults.get(name)):
                raise NotLoweredError(f"{operator} with {name}={value!r}")
        if "operator" in parameters:
            taken["operator"] = operator.partition("::")[2]
        return function(writer, **taken)


def _is_default(value: object, default: object) -> bool:
    return value is None or (type(value) is type(default) and value == default)


RULES = Rules()
rule = RULES.rule
