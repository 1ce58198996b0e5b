"""The table of lowering rules: for each operator of a captured program the function that writes its ONNX nodes.

A rule takes the writer and the operator's arguments by their names in torch's schema (``self`` and ``input`` are called
``x``). An argument that a rule does not take must have its default value, otherwise the program is not lowered. Rules
return the result: a tensor, or a list of tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from amct.pytorch.onnx.lowering.writer import Result, Writer


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
