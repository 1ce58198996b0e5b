"""Converts calibration data (a tensor, a list of batches, a DataLoader, a generator) to model arguments."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from amct.errors import ArgumentError
from amct.pipeline.batches import Batches
from amct.pytorch.capture.example_inputs import example_inputs

if TYPE_CHECKING:
    from torch import nn

    from amct.pipeline.batches import BatchInputs
    from amct.pytorch.watch.layer_hooks import Arguments


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
