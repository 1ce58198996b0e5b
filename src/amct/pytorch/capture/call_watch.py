"""Finds by forward hooks which layers a model calls and with which shapes, for models that cannot be captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from amct.errors import ModelError
from amct.pytorch.capture.layer_types import quantizable_type
from amct.pytorch.model_copy import copy_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from amct.pytorch.capture.example_inputs import ExampleInputs


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer: shapes of the tensors it was given, and anything that makes it unlike the plain layer."""

    input_shapes: tuple[tuple[int | None, ...], ...] = ()
    packed: bool = False
    problem: str | None = None


def watch_calls(model: nn.Module, inputs: ExampleInputs) -> dict[str, list[Call]]:
    """Run a copy of the model once in eval mode and note the calls of its quantizable layers, in execution order.

    Raises:
        ModelError: the model fails on the example input.
    """
    duplicate = copy_model(model)
    calls: dict[str, list[Call]] = {}
    for name, module in duplicate.named_modules():
        if quantizable_type(module):
            module.register_forward_pre_hook(_noting(calls, name), with_kwargs=True)
    try:
        with torch.random.fork_rng(), torch.no_grad():
            duplicate(*inputs.args, **inputs.kwargs)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} fails on the example input: {error}. Check input_data: shapes "
            f"{[list(tensor.shape) for tensor in inputs.tensors()]}"
        ) from error
    return calls


def _noting(calls: dict[str, list[Call]], name: str) -> Callable[..., None]:
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        shapes = tuple(tuple(value.shape) for value in given if isinstance(value, torch.Tensor))
        packed = any(isinstance(value, PackedSequence) for value in given)
        calls.setdefault(name, []).append(Call(input_shapes=shapes, packed=packed))

    return note
