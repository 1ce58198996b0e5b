"""Turns example inputs and batches of calibration data into the arguments of a model's forward."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from amct.errors import ArgumentError, ModelError
from amct.pipeline.batches import Batches

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from amct.pipeline.batches import BatchInputs
    from amct.pytorch.layer_hooks import Arguments


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


# -- batches of calibration data ---------------------------------------------------------------------------------------


def torch_batches(model: nn.Module, data: object, inputs: BatchInputs | None = None) -> Batches:
    """Convert data to call arguments of one model, on the model's device; copies, since a forward may write to them.

    A tensor is one batch. The items of a tuple or list are the forward's arguments; further items that the forward does
    not take (labels) are ignored. A dict holds keyword arguments.
    """
    if isinstance(data, dict):
        raise ArgumentError("calibration_data: a dict is one batch of keyword arguments; put it into a list: [batch]")

    def convert(batch: object) -> Arguments:
        chosen = inputs(batch) if inputs is not None else _without_labels(model, batch)
        example = example_inputs(model, chosen)
        device = next((tensor.device for tensor in model.parameters()), None)
        copied: Arguments = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(device or tensor.device, copy=True), (example.args, example.kwargs)
        )
        return copied

    expected = "a tensor, an iterable of batches or a DataLoader"
    return Batches(data, convert, single=(torch.Tensor,), expected=expected)


def _without_labels(model: nn.Module, batch: object) -> object:
    """A batch without trailing items that the forward does not take or that look like labels."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or isinstance(batch[-1], dict):
        return batch
    signature = inspect.signature(model.forward)
    for count in range(len(batch), 0, -1):
        try:
            bound = signature.bind(*batch[:count])
        except TypeError:
            continue
        if count > 1 and _is_label(batch[0], batch[count - 1]) and _is_optional(signature, list(bound.arguments)[-1]):
            count -= 1
        return tuple(batch[:count])
    return batch  # the error message lists the forward's parameters


def _is_label(first: object, last: object) -> bool:
    """Whether ``last`` holds integers, one per sample of ``first``."""
    if not isinstance(first, torch.Tensor) or not isinstance(last, torch.Tensor) or first.ndim == 0:
        return False
    return not last.is_floating_point() and last.ndim == 1 and last.shape[0] == first.shape[0]


def _is_optional(signature: inspect.Signature, name: str) -> bool:
    return signature.parameters[name].default is not inspect.Parameter.empty
