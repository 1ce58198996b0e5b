"""Replaces weights that torch computes in each forward (weight_norm, spectral_norm, pruning masks) by their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from amct.pytorch.model_copy import copy_model

if TYPE_CHECKING:
    from collections.abc import Callable

_HOOKS: tuple[type, ...] = (WeightNorm, SpectralNorm, prune.BasePruningMethod)
"""Older forms of parametrizations: forward pre-hooks that set the weight before each call."""
_HOOK_TENSORS = ("_g", "_v", "_u", "_orig", "_mask")
"""Endings of the tensors from which they compute it."""


def is_parametrized(model: nn.Module) -> bool:
    """Whether torch computes some weight of the model in each forward."""
    return any(parametrize.is_parametrized(module) or _hooks(module) for module in model.modules())


def with_plain_weights(model: nn.Module) -> nn.Module:
    """The model itself, or a copy in eval mode without parametrizations that computes the same.

    The copy shares its other tensors with the model.

    Raises:
        ModelError: the model cannot be copied.
    """
    if not is_parametrized(model):
        return model
    duplicate = copy_model(model, share_tensors=True)
    with torch.no_grad():
        for module in duplicate.modules():
            _remove_parametrizations(module)
            _remove_hooks(module)
    return duplicate


def _remove_parametrizations(module: nn.Module) -> None:
    if not parametrize.is_parametrized(module):
        return
    # torch's remove_parametrizations would also change the user's model: the copy has the same generated class
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    values = {name: getattr(module, name).detach().clone() for name in parametrizations}
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    for name, value in values.items():
        is_parameter = next(parametrizations[name].parameters(recurse=False), None) is not None
        if is_parameter:
            setattr(module, name, nn.Parameter(value))
        else:
            module.register_buffer(name, value)


def _remove_hooks(module: nn.Module) -> None:
    for key, hook in _hooks(module).items():
        name = getattr(hook, "_tensor_name", None) or getattr(hook, "name")  # noqa: B009  the first of pruning masks
        hook(module, ())  # sets the weight
        value = getattr(module, name).detach().clone()
        del module._forward_pre_hooks[key]
        vars(module).pop(name, None)
        for suffix in _HOOK_TENSORS:
            module._parameters.pop(name + suffix, None)
            module._buffers.pop(name + suffix, None)
        setattr(module, name, nn.Parameter(value))


def _hooks(module: nn.Module) -> dict[int, Callable[..., object]]:
    return {key: hook for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _HOOKS)}
