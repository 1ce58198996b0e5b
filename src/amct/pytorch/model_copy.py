"""Copies the user's model, which is never changed, and converts its tensors to NumPy arrays."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import ml_dtypes
import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from amct.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor, nn

_COMPILED = "_orig_mod"  # torch.compile's attribute for the model; importing its class is slow


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel or torch.compile; any other model itself."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(original := getattr(model, _COMPILED, None), torch.nn.Module):
            model = original
        else:
            return model


def copy_model(model: nn.Module, *, share_tensors: bool = False) -> nn.Module:
    """A copy in eval mode. With ``share_tensors`` it shares parameters and buffers with the model: read-only.

    Raises:
        ModelError: some attribute of the model cannot be copied; the message names it.
    """
    memo = {id(tensor): _copied(tensor, share_tensors) for tensor in _tensors(model)}
    try:
        duplicate: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied{_culprit(model)}: {error}. Compression works on a copy so that "
            "your model stays as it is: keep such objects out of the model, or give their class a __deepcopy__"
        ) from error
    return duplicate.eval()


def _copied(tensor: Tensor, share: bool) -> Tensor:
    if share:
        return tensor
    duplicate = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(duplicate, requires_grad=tensor.requires_grad)
    return duplicate.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor held by a module, including plain attributes (old-style weight_norm)."""
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value):
                yield value


def _culprit(model: nn.Module) -> str:
    """`` (attribute "lock" of module "head")`` for the first attribute that cannot be copied."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, {id(tensor): tensor for tensor in _tensors(model)})
            except Exception:  # noqa: BLE001  same code, asked piece by piece
                return f' (attribute "{attribute}" of module "{name}")' if name else f' (attribute "{attribute}")'
    return ""


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The values of a tensor as an array; a CPU tensor shares its memory."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:  # not a NumPy type
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
