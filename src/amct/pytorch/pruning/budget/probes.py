"""Measures what is lost with some channels, without training: the cut and fitted model runs on a few samples.

With a loss it is how much this grows, without one the share of the output's power that changes. Which channels of a
cell go first is known before: those that the layers behind it can be fitted to do without.

Batch norms normalize by the batch itself in all measurements, as they will be measured anew at the end. The whole model
is measured in the same way, so that nothing is lost with nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amct.errors import ArgumentTypeError, EvaluatorError, ModelArgumentError, SearchError
from amct.interrupts import raise_if_interrupted
from amct.pytorch.pruning.compensation import agreement, compensate
from amct.pytorch.pruning.cutting import chain_records, cut_channels
from amct.pytorch.pruning.removal import Removal
from amct.pytorch.user_model import copy_model
from amct.search.goal import checked_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from amct.pipeline.batches import Batches
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.pruning.budget.allocation import Counts
    from amct.pytorch.pruning.channels import ChannelMap
    from amct.pytorch.pruning.compensation import InputMoments
    from amct.pytorch.pruning.selection import ChannelCell
    from amct.search.journal import Journal

Loss = Callable[[Any, Any], Tensor]
"""``loss(output, batch)``: one number to be minimized, the mean over a batch; the batch is that of the data."""

SAMPLES = 256
"""So many samples are measured, at least one batch."""
FEWEST_IN_BATCH = 8
"""Batch norms normalize by a batch of so many samples or more, by their own statistics in smaller ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A batch: as the data gave it, and as arguments of the model."""

    original: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def count(self) -> int:
        """How many samples it has."""
        tensors = self.tensors
        return len(tensors[0]) if tensors and tensors[0].ndim else 1


def first_samples(batches: Batches) -> list[Sample]:
    """The first batches of some data.

    Raises:
        ModelArgumentError: There are none.
    """
    found: list[Sample] = []
    for original, (args, kwargs) in batches.with_originals():
        found.append(Sample(original=original, args=args, kwargs=kwargs))
        if sum(each.count for each in found) >= SAMPLES:
            break
    if not found:
        raise ModelArgumentError("batches: there are none; the search needs data to measure what is lost")
    return found


class Measure:
    """What a model loses against the whole one.

    Args:
        traced: The whole model.
        samples: The batches that are measured.
        loss: The user's loss; None: the change of the output.
        own_statistics: Whether batch norms normalize by the batch.

    Raises:
        EvaluatorError: The loss of the whole model is no finite number.
    """

    def __init__(
        self, traced: Traced, samples: Sequence[Sample], loss: Loss | None, *, own_statistics: bool = True
    ) -> None:
        if loss is not None and not callable(loss):
            raise ArgumentTypeError(f"loss: expected a function of (output, batch), got {type(loss).__name__}")
        self._traced, self._samples, self._loss = traced, samples, loss
        self._normalizes = own_statistics and min(sample.count for sample in samples) >= FEWEST_IN_BATCH
        whole = copy_model(traced.model, share_tensors=True)
        self._outputs = [] if loss is not None else [_tensors(output) for output in self._run(whole)]
        self._whole = self._mean(self._run(whole)) if loss is not None else 0.0

    def lost(self, model: nn.Module) -> float:
        """By how much the loss grows, or the share of the output's power that changes; NaN of a cut model is infinite.

        Raises:
            EvaluatorError: The loss is no number.
        """
        outputs = self._run(model)
        return self._mean(outputs) - self._whole if self._loss is not None else self._change(outputs)

    def _run(self, model: nn.Module) -> list[Any]:
        with _own_statistics(model, batches=self._normalizes), torch.no_grad():
            return [_output(model, sample) for sample in self._samples]

    def _mean(self, outputs: Sequence[Any]) -> float:
        total = 0.0
        for sample, output in zip(self._samples, outputs, strict=True):
            total += sample.count * checked_value(_called(self._loss, output, sample), "loss")
        return total / sum(sample.count for sample in self._samples)

    def _change(self, outputs: Sequence[Any]) -> float:
        shares = []
        for place in range(len(self._outputs[0])):
            noise = power = 0.0
            for before, after in zip(self._outputs, map(_tensors, outputs), strict=True):
                noise += float((after[place] - before[place]).double().square().sum())
                power += float((before[place] - before[place].mean(0, keepdim=True)).double().square().sum())
            shares.append(noise / power if power > 0 else 0.0)
        return sum(shares) / len(shares)

    def check_depends_on(self, names: Sequence[str]) -> None:
        """Check that the loss has a gradient in the weight of each of some layers.

        Raises:
            EvaluatorError: The loss has no gradient.
            SearchError: The loss does not depend on one of the layers.
        """
        if self._loss is None:
            return
        model, sample = copy_model(self._traced.model), self._samples[0]
        weights = {name: weight for name in names if isinstance(weight := model.get_submodule(name).weight, Tensor)}
        for weight in weights.values():
            weight.requires_grad_()
        with _own_statistics(model, batches=self._normalizes), torch.enable_grad():
            value = _called(self._loss, model(*sample.args, **sample.kwargs), sample)
            if not isinstance(value, Tensor) or not value.requires_grad:
                raise EvaluatorError(
                    "loss returned a number without a gradient: compute it from the output with operations of torch"
                )
            gradients = torch.autograd.grad(value.sum(), list(weights.values()), allow_unused=True)
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is None or not gradient.any():
                raise SearchError(
                    f'loss: it does not depend on layer "{name}" (its gradient is zero), so the search cannot know '
                    "what the layer is good for; add what it computes to the loss, or leave loss out"
                )


def _output(model: nn.Module, sample: Sample) -> Any:  # noqa: ANN401  the model's own
    try:
        return model(*sample.args, **sample.kwargs)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelArgumentError(
            f"batches: {type(model).__name__} fails on one of them: {error}. Give inputs such as the first"
        ) from error


def _called(loss: Loss | None, output: object, sample: Sample) -> object:
    assert loss is not None
    try:
        return loss(output, sample.original)
    except Exception as error:
        raise EvaluatorError(f"loss raised {type(error).__name__}: {error}") from error


def _tensors(output: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@contextmanager
def _own_statistics(model: nn.Module, *, batches: bool) -> Iterator[None]:
    """Eval mode, in which batch norms normalize by the batch and keep their statistics."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = {module: module.training for module in model.modules()}
    momenta = [norm.momentum for norm in norms]
    counters = [norm.num_batches_tracked for norm in norms]
    model.eval()
    for norm in norms if batches else ():
        norm.train()
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, momentum, counter in zip(norms, momenta, counters, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counter
        for module, training in before.items():
            module.training = training


class Probes:
    """Cut models by the numbers of sets that their cells lose, and what each of them loses.

    Args:
        traced: The whole model.
        channel_map: Its channels.
        cells: The cells, in the order in which their sets go.
        moments: What was measured of the inputs of layers.
        measure: What is lost.
        journal: What was measured before.
    """

    def __init__(
        self,
        traced: Traced,
        channel_map: ChannelMap,
        cells: Sequence[ChannelCell],
        moments: Mapping[str, InputMoments],
        measure: Measure,
        journal: Journal,
    ) -> None:
        self._traced, self._map, self._moments, self._measure = traced, channel_map, moments, measure
        self.cells, self._journal = cells, journal
        self.measured = 0

    def removal(self, counts: Counts) -> Removal:
        """The sets that go."""
        pairs = zip(self.cells, counts, strict=True)
        return Removal(self._map, frozenset(root for cell, count in pairs for root in cell.roots[:count]))

    def model(self, counts: Counts) -> nn.Module:
        """The cut model, its layers fitted."""
        chains = chain_records(self.removal(counts), self.cells)
        model = copy_model(self._traced.model)
        compensate(model, chains, self._moments)
        cut_channels(model, chains)
        return model

    def lost(self, counts: Counts) -> float:
        """What is lost with some sets; the same is measured once, of all processes together."""
        if not any(counts):
            return 0.0
        name = " ".join(map(str, counts))
        known = self._journal.losses(name)
        if not len(known):
            raise_if_interrupted()
            with agreement(["probe", name]) as agreed:
                value = self._measure.lost(self.model(counts))
                value = float(agreed.means([torch.tensor(value, dtype=torch.float64)])[0])
            self._journal.add(name, [value])
            self.measured += 1
            return value
        return float(known[0])
