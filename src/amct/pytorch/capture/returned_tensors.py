"""Makes the forward of a copied model return its tensors only, as one list.

torch.export knows tensors in tuples, lists and dicts. Data classes are opened here, and numbers and other constants,
which an exported file cannot return, are left out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type, torch.SymInt, torch.SymFloat, torch.SymBool,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class UnknownResultError(Exception):
    """The forward returns an object whose tensors are not known."""


def return_tensors(model: nn.Module) -> None:
    """Replace the forward of a copied model by one that returns a list of tensors.

    It raises ``UnknownResultError`` if a result is of another class.
    """
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> list[torch.Tensor]:  # noqa: ANN401  whatever the user's forward takes
        result = original(*args, **kwargs)
        for leaf in _leaves(result):
            if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
                raise UnknownResultError(_message(leaf, model))
        return list(tensors_in(result))

    model.forward = forward


def tensors_in(result: object) -> Iterator[torch.Tensor]:
    """The tensors of what a forward returns, in the order of the outputs of a file."""
    return (leaf for leaf in _leaves(result) if isinstance(leaf, torch.Tensor))


def with_tensors(result: object, tensors: Iterator[torch.Tensor]) -> object:
    """What a forward returns, with other tensors in the order of ``tensors_in``."""

    def replaced(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return next(tensors)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        made = copy.copy(leaf)
        for field in dataclasses.fields(leaf):  # one after the other, also where the class is frozen
            object.__setattr__(made, field.name, with_tensors(getattr(leaf, field.name), tensors))
        return made

    return pytree.tree_map(replaced, result)


def _leaves(result: object) -> Iterator[object]:
    for leaf in pytree.tree_leaves(result):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name))
        else:
            yield leaf


def _message(result: object, model: nn.Module) -> str:
    found = f"the forward returns an object of class {type(result).__name__}"
    if getattr(getattr(model, "config", None), "use_cache", False):
        return f"{found}; set use_cache=False (model.config.use_cache = False), so that it returns no cache"
    return f"{found}; return tensors, or tuples, lists, dicts or data classes of them"
