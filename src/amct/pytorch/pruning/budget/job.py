"""One job of pruning to a budget: what the user gave, checked; the search for one budget, and its result."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from amct.calibration.ranks import fingerprint
from amct.errors import ArgumentError, ArgumentTypeError, SearchError, did_you_mean
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.inputs import IoOptions, torch_batches
from amct.pytorch.pruning.amct_chains import find_chains
from amct.pytorch.pruning.budget.config import config_text, ratios_of
from amct.pytorch.pruning.budget.goal import LATENCY, Budget
from amct.pytorch.pruning.budget.latency import LatencySearch
from amct.pytorch.pruning.budget.probes import Measure, Probes, first_samples
from amct.pytorch.pruning.budget.result import BudgetedModel, Rung
from amct.pytorch.pruning.budget.search import BudgetSearch
from amct.pytorch.pruning.compensation import refresh_batch_norms
from amct.pytorch.pruning.door import check_align, check_model, everywhere, pruned_model
from amct.pytorch.pruning.full_reach import Wanted, cut_chosen
from amct.pytorch.pruning.removal import Removal, cost_of
from amct.pytorch.pruning.selection import choose
from amct.pytorch.pruning.timing import Stopwatch
from amct.search.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.pruning.budget.allocation import Counts
    from amct.pytorch.pruning.budget.probes import Loss, Sample
    from amct.pytorch.pruning.full_reach import Reached

RUNGS = 5
"""How many steps the ladder has, at most; the whole model is not one."""
HALF = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class PruneOptions:
    """What the user asks for; see ``prune_to``.

    Raises:
        ArgumentError, ArgumentTypeError: A value is out of range or has the wrong type.
    """

    budget: Budget
    align: int = 8
    loss: Loss | None = None
    keep: Iterable[str] = ()
    resume: str | os.PathLike[str] | None = None
    io: IoOptions = field(default_factory=IoOptions)

    def __post_init__(self) -> None:
        check_align(self.align)
        if self.resume is not None and not isinstance(self.resume, (str, os.PathLike)):
            raise ArgumentTypeError(f"resume: expected the path of a file, got {type(self.resume).__name__}")


class PruneJob:
    """A model with its data and what is wanted of it.

    Attributes:
        traced: The whole model.
        data: All batches.
        samples: Those that are measured.
        options: What is wanted.
        journal: What was measured.
    """

    def __init__(self, model: nn.Module, batches: object, example: object, options: PruneOptions) -> None:
        check_model(model)
        self._model, self.options = model, options
        self.data = torch_batches(model, batches, name="batches")
        self.data.keep()  # it is read several times
        self.samples = first_samples(self.data)
        self.traced = cached_trace(model, _first_sample(self.samples[0]) if example is None else example)
        kept = _kept(options.keep, self.traced)
        self.wanted = Wanted(ratio=lambda _: HALF, align=lambda _: options.align, kept=kept)
        self.journal = Journal(None if options.resume is None else Path(options.resume), self._bound())
        self._sizes = cut_chosen(
            self.traced,
            self.wanted,
            lambda found: choose(found.channel_map, found.cells, self.wanted.ratio, self.wanted.align),
        )[1]

    def _bound(self) -> dict[str, str]:
        """What the journal belongs to."""
        state = [part for name, value in self.traced.model.state_dict().items() for part in (name, value)]
        options = self.options
        what = "a loss" if options.loss else "the output"
        kept = [f"without {name}" for name in self.wanted.kept]
        return {
            "model": fingerprint([part for part in state if isinstance(part, (str, torch.Tensor))]),
            "data": fingerprint(pytree.tree_leaves([sample.original for sample in self.samples])),  # labels too
            "budget": ", ".join([str(options.budget), f"align {options.align}", what, *kept]),
        }

    def pruned(self, budget: Budget) -> BudgetedModel:
        """The model for one budget; that of all of it is whole.

        Raises:
            SearchError: The budget cannot be reached.
        """
        search = _Searching(self, budget)
        found, _ = cut_chosen(self.traced, self.wanted, search.choice, self.data, self._sizes)
        plan = everywhere(self.traced)
        chains = [] if plan is None else find_chains(self.traced, plan)
        settings = f"{budget}, align {self.options.align}"
        base = pruned_model(self._model, self.traced, found, settings, self.options.io)
        result = BudgetedModel(
            **{each.name: getattr(base, each.name) for each in fields(base)},
            budget=str(budget),
            ladder=search.ladder,
            cfg=config_text(ratios_of(chains, found.channels)),
            measured=search.measured,
        )
        if found.chains:
            refresh_batch_norms(result.model, self.data)
        return result


def _kept(keep: Iterable[str], traced: Traced) -> dict[str, str]:
    """The layers that keep their channels, with the reason."""
    names = [keep] if isinstance(keep, str) else list(keep)
    for name in names:
        if name not in traced.module_types:
            raise ArgumentError(
                f'keep: there is no layer "{name}".{did_you_mean(str(name), list(traced.module_types))}'
            )
    return dict.fromkeys(names, "named in keep")


def _first_sample(sample: Sample) -> tuple[Any, ...]:
    """The first sample of a batch, if all tensors have as many, else the batch."""
    args, kwargs = sample.args, sample.kwargs
    if all(tensor.ndim and len(tensor) == sample.count for tensor in sample.tensors):
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:1], (args, kwargs))
    return (*args, kwargs)


class _Searching:
    """Makes the choice for a model whose channels are known, and remembers the ladder."""

    def __init__(self, job: PruneJob, budget: Budget) -> None:
        self._job, self._budget = job, budget
        self.ladder: tuple[Rung, ...] = ()
        self.measured = 0

    def choice(self, reached: Reached) -> Removal:
        """The channels that go.

        Raises:
            SearchError: The budget cannot be reached.
        """
        job, cells = self._job, reached.cells
        if self._budget.share >= 1:
            return Removal(reached.channel_map)
        options = [cell.removable(job.options.align) for cell in cells]
        if not any(len(each) > 1 for each in options):
            raise SearchError(
                f"{type(job.traced.model).__name__}: no channel can be removed with align={job.options.align}; "
                "prune says why in skipped"
            )
        measure = Measure(job.traced, job.samples, job.options.loss)
        measure.check_depends_on(sorted(reached.moments))
        probes = Probes(job.traced, reached.channel_map, cells, reached.moments, measure, job.journal)
        search = BudgetSearch(probes, options, self._budget.costs(reached.channel_map, cells))
        budget = self._budget
        if budget.kind == LATENCY:
            watch = LatencySearch(search, probes, Stopwatch(job.traced, job.options.io))
            counts = watch.reach(budget.share, search.cost(_nothing(cells)))
            self.ladder = self._ladder(search, probes, counts, watch.time)
        else:
            counts = self._counted(search, Removal(reached.channel_map))
            whole = search.cost(_nothing(cells))
            self.ladder = self._ladder(search, probes, counts, lambda counts: search.cost(counts) / whole)
        self.measured = probes.measured
        return probes.removal(counts)

    def _counted(self, search: BudgetSearch, whole: Removal) -> Counts:
        """The choice for a budget that is counted."""
        budget = self._budget
        count = budget.counted(cost_of(whole))
        least = search.smallest_cost() / count
        if least > budget.share:
            raise SearchError(
                f"{budget.kind}: expected at least {math.ceil(1000 * least) / 1000:g}, got {budget.share:g}: without "
                f"every channel that can be removed with align={self._job.options.align}, so much of the "
                f"{budget.noun} is left"
            )
        return search.corrected(budget.share * count).counts

    @staticmethod
    def _ladder(
        search: BudgetSearch, probes: Probes, counts: Counts, share: Callable[[Counts], float]
    ) -> tuple[Rung, ...]:
        """The choices between the whole model and the last one that no cheaper one beats."""
        whole, last = search.cost(_nothing(counts)), search.cost(counts)
        limits = [whole + (last - whole) * number / RUNGS for number in range(1, RUNGS)]
        choices = dict.fromkeys(search.rung(limit) for limit in limits if limit >= search.smallest_cost())
        found: list[Rung] = []
        for each in (*(choice for choice in choices if last < search.cost(choice) < whole), counts):
            removal = probes.removal(each)
            makers = removal.channel_map.producers
            left = {maker.name: removal.left(maker.outputs, len(maker.outputs)) for maker in makers}
            rung = Rung(share=share(each), lost=probes.lost(each), cost=cost_of(removal), channels=left)
            found = [other for other in found if other.share > rung.share and other.lost < rung.lost]
            found.append(rung)
        return tuple(found)


def _nothing(cells: Sequence[object]) -> Counts:
    """The choice of the whole model."""
    return (0,) * len(cells)
