"""Calibration data in every form users have it: a tensor, a list of batches, a DataLoader, a generator."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from amct.calibration.replay import Replay
from amct.errors import ArgumentError, ArgumentTypeError
from amct.pytorch.capture.example_inputs import example_inputs

if TYPE_CHECKING:
    from torch import nn

    from amct.pytorch.watch.layer_hooks import Arguments

BatchInputs = Callable[[Any], Any]
"""Makes of a batch what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments."""


class Batches:
    """The data as arguments of calls of one model, on the model's device.

    A tensor is one batch. Of a batch that is a tuple or list, the items are the forward's arguments; items at the end
    that the forward does not take (labels) are left out. A dict holds keyword arguments.

    Iterating again starts anew; what can be iterated only once is read once, unless ``keep`` was called before.
    """

    def __init__(self, model: nn.Module, data: object, inputs: BatchInputs | None = None) -> None:
        self._model = model
        self._inputs = inputs
        self._batches = Replay(_batches(data))

    def __len__(self) -> int:
        """How many batches there are.

        Raises:
            TypeError: nobody can know before they are read.
        """
        return len(self._batches)

    @property
    def length(self) -> int | None:
        """How many batches there are, where that is known."""
        return self._batches.length

    def keep(self) -> None:
        """Keep what is read of data that can be read only once, because it is needed several times."""
        self._batches.keep()

    def limited(self, count: int | None) -> Iterator[Arguments]:
        """The first ``count`` batches; all when None."""
        return itertools.islice(self, count)

    def first(self) -> Arguments:
        """The first batch, without losing it.

        Raises:
            CalibrationError: there is none.
        """
        return self._arguments(self._batches.first())

    def __iter__(self) -> Iterator[Arguments]:
        for _, arguments in self.with_originals():
            yield arguments

    def with_originals(self) -> Iterator[tuple[Any, Arguments]]:
        """Each batch as the data gave it, labels and all, and as arguments of a call."""
        for batch in self._batches:
            yield batch, self._arguments(batch)

    def _arguments(self, batch: object) -> Arguments:
        chosen = self._inputs(batch) if self._inputs is not None else _without_labels(self._model, batch)
        inputs = example_inputs(self._model, chosen)
        device = next((tensor.device for tensor in self._model.parameters()), None)
        if device is None:
            return inputs.args, inputs.kwargs
        moved: Arguments = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(device), (inputs.args, inputs.kwargs)
        )
        return moved


def _batches(data: object) -> Iterable[Any]:
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise ArgumentTypeError(
            f"calibration_data: expected a tensor, an iterable of batches or a DataLoader, got {type(data).__name__}"
        )
    if isinstance(data, dict):
        raise ArgumentError("calibration_data: a dict is one batch of keyword arguments; put it into a list: [batch]")
    return data


def _without_labels(model: nn.Module, batch: object) -> object:
    """A batch without items at its end that the forward does not take, or that are labels by the look of them."""
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
    return batch  # the error tells what the forward takes


def _is_label(first: object, last: object) -> bool:
    """Whole numbers, one for each sample."""
    if not isinstance(first, torch.Tensor) or not isinstance(last, torch.Tensor) or first.ndim == 0:
        return False
    return not last.is_floating_point() and last.ndim == 1 and last.shape[0] == first.shape[0]


def _is_optional(signature: inspect.Signature, name: str) -> bool:
    return signature.parameters[name].default is not inspect.Parameter.empty
