"""Means and covariances of the inputs of layers, measured on data in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct.pytorch.pruning.measuring.agreement import agreement
from amct.pytorch.user_model import copy_model

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from amct.pytorch.layer_hooks import Arguments

LARGEST_INPUTS = 4096
"""Layers with more input channels are not measured: the covariance grows with their square."""
MIXING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose outputs read all inputs, if they have one group; their weights have the inputs on axis 1."""


class InputMoments:
    """Sums over all positions of the inputs of a layer: their number, sum and products."""

    def __init__(self) -> None:
        self._count = torch.zeros((), dtype=torch.float64)
        self._sum, self._products = torch.zeros(()), torch.zeros(())

    def hook(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Add the input of one call, as a forward pre-hook."""
        axis = -1 if isinstance(module, nn.Linear) else 1
        rows = inputs[0].detach().movedim(axis, -1).flatten(0, -2).to(torch.float64)
        self._count = self._count.to(rows.device) + len(rows)
        self._sum = self._sum + rows.sum(dim=0)
        self._products = self._products + rows.T @ rows

    @property
    def seen(self) -> bool:
        """Whether there was any input."""
        return bool(self._count > 0)

    @property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Number, sum and products."""
        return self._count, self._sum, self._products

    @sums.setter
    def sums(self, values: tuple[Tensor, Tensor, Tensor]) -> None:
        self._count, self._sum, self._products = values

    def mean(self) -> Tensor:
        """The mean of each channel."""
        return self._sum / self._count

    def covariance(self) -> Tensor:
        """The covariance of the channels."""
        mean = self.mean()
        return self._products / self._count - torch.outer(mean, mean)


def mixes(module: nn.Module | None) -> bool:
    """Whether a layer is measured: each of its outputs reads all inputs, and these are not too many."""
    return isinstance(module, MIXING) and getattr(module, "groups", 1) == 1 and module.weight.shape[1] <= LARGEST_INPUTS


def measure_inputs(model: nn.Module, names: Collection[str], batches: Iterable[Arguments]) -> dict[str, InputMoments]:
    """Run a model in eval mode on data and measure the inputs of some layers; layers without input are left out.

    Processes of distributed training use the mean of what all have measured, so that they choose the same channels.
    """
    moments = {name: InputMoments() for name in sorted(names)}  # the same order in every process
    watched = copy_model(model, share_tensors=True)
    for name, moment in moments.items():
        watched.get_submodule(name).register_forward_pre_hook(moment.hook)
    with torch.no_grad(), agreement(["inputs", *moments]) as agreed:
        for args, kwargs in agreed.each(batches):
            watched(*args, **kwargs)
        found = {name: moment for name, moment in moments.items() if moment.seen}
        means = iter(agreed.means([each for moment in found.values() for each in moment.sums]))
        for moment in found.values():
            moment.sums = next(means), next(means), next(means)
    return found
