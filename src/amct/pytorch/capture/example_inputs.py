"""Converts the example input of a model (a tensor, a tuple, a dict, a tuple ending in a dict) to call arguments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from amct.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleInputs:
    """Positional and keyword arguments of one forward call; keywords in the order of the forward's signature.

    ``names`` has a name for each tensor among the arguments: its parameter's name, with the keys of nested dicts or
    lists appended (``batch_image``).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]

    def bound(self, model: nn.Module) -> dict[str, Any]:
        """The arguments by the names of the forward's parameters."""
        return dict(inspect.signature(model.forward).bind(*self.args, **self.kwargs).arguments)

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, in the order in which an exported model takes them."""
        return _tensors((self.args, self.kwargs))


def example_inputs(model: nn.Module, input_data: object) -> ExampleInputs:
    """Convert ``input_data`` to the arguments of a call of ``model``.

    A tensor is the only argument. A dict holds keyword arguments, unless the forward takes one dict as its argument. A
    dict at the end of a tuple holds keyword arguments (an empty one ends a tuple whose last argument is a dict).

    Raises:
        ModelError: it holds no tensor, or the forward does not accept these arguments.
    """
    args, kwargs = _split(model, input_data)
    if not _tensors((args, kwargs)):
        raise ModelError(
            f"input_data: expected a tensor, or a tuple or dict of tensors, got {_described(input_data)}; "
            "pass one example input of the model (torch.from_numpy turns an array into a tensor)"
        )
    problem = _binding_problem(model, args, kwargs)
    if problem:
        raise ModelError(
            f"input_data does not fit {type(model).__name__}.forward{_signature_text(model)}: {problem}; "
            "pass a tensor, a tuple of positional arguments, or a dict of keyword arguments"
        )
    kwargs = _in_signature_order(model, kwargs)
    return ExampleInputs(args=args, kwargs=kwargs, names=_tensor_names(model, args, kwargs))


def _tensors(arguments: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _tensor_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    signature = inspect.signature(model.forward)
    names: list[str] = []
    for parameter, value in signature.bind(*args, **kwargs).arguments.items():
        catches_keywords = signature.parameters[parameter].kind is inspect.Parameter.VAR_KEYWORD
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                keys = [str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path]
                names.append("_".join(keys if catches_keywords else [parameter, *keys]))
    return tuple(names)


def _split(model: nn.Module, data: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(data, dict):
        as_keywords = all(isinstance(key, str) for key in data) and not _binding_problem(model, (), data)
        return ((), dict(data)) if as_keywords else ((data,), {})
    if isinstance(data, (tuple, list)):
        if data and isinstance(data[-1], dict):
            positional, keywords = tuple(data[:-1]), data[-1]
            if _binding_problem(model, positional, keywords) and not _binding_problem(model, tuple(data), {}):
                return tuple(data), {}
            return positional, dict(keywords)
        return tuple(data), {}
    return (data,), {}


def _binding_problem(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[Any, Any]) -> str | None:
    """Why the forward does not accept these arguments; None if it does."""
    if not all(isinstance(key, str) for key in kwargs):
        return "keyword arguments need names that are strings"
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _in_signature_order(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    order = [name for name in inspect.signature(model.forward).parameters if name in kwargs]
    return {name: kwargs[name] for name in dict.fromkeys([*order, *kwargs])}


def _signature_text(model: nn.Module) -> str:
    return str(inspect.signature(model.forward))


def _described(data: object) -> str:
    if isinstance(data, (tuple, list)):
        return f"a {type(data).__name__} of {', '.join(type(item).__name__ for item in data) or 'nothing'}"
    return type(data).__name__
