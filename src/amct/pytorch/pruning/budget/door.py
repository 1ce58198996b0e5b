"""``prune_to``: pruning to a budget in one call."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from amct.calibration.ranks import fingerprint
from amct.errors import ArgumentTypeError, SearchError
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
    from collections.abc import Callable, Sequence

    from torch import nn

    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.pruning.budget.allocation import Counts
    from amct.pytorch.pruning.budget.probes import Loss, Sample
    from amct.pytorch.pruning.full_reach import Reached

RUNGS = 5
"""How many steps the ladder has, at most; the whole model is not one."""
HALF = 0.5


def prune_to(  # noqa: PLR0913  a front door with its settings
    model: nn.Module,
    batches: object,
    *,
    flops: float | None = None,
    latency: float | None = None,
    params: float | None = None,
    loss: Loss | None = None,
    align: int = 8,
    example: object = None,
    resume: str | os.PathLike[str] | None = None,
    io: IoOptions | None = None,
) -> BudgetedModel:
    """Prune a model to a budget: find how many channels each layer keeps, so that the least is lost.

    What is lost is measured on some 256 samples without training, with the layers behind removed channels fitted to
    make up for them. Train the model afterwards.

    Args:
        model: Any nn.Module; it is not changed.
        batches: Data: a tensor, an iterable or a DataLoader. In distributed training every process must call this,
            each with its own data.
        flops: The share of the multiply-accumulate operations that may be left.
        latency: Or the share of the time in onnxruntime that may be left, measured on this machine.
        params: Or the share of the parameters.
        loss: ``loss(output, batch)`` returns the mean loss over a batch, with a gradient; the batch is that of the
            data, with its labels. Without it the change of the output counts.
        align: Each layer keeps a multiple of so many channels, as for ``prune``; 1: any number.
        example: An input with which operations are counted and time is measured; the first sample unless given.
        resume: A file such as ``out/net.search.jsonl``: what is measured is kept there, and a search that was killed
            goes on from it; it is removed at the end.
        io: Names and dynamic axes of the exported files.

    Raises:
        SearchError: The budget cannot be reached, no channel can be removed, or the loss does not depend on a layer.
        AmctError: The subclass tells whether arguments, model, data or loss are invalid.
    """
    check_model(model)
    check_align(align)
    budget = Budget.of({"flops": flops, "latency": latency, "params": params})
    if resume is not None and not isinstance(resume, (str, os.PathLike)):
        raise ArgumentTypeError(f"resume: expected the path of a file, got {type(resume).__name__}")
    data = torch_batches(model, batches, name="batches")
    data.keep()  # it is read several times
    samples = first_samples(data)
    traced = cached_trace(model, _first_sample(samples[0]) if example is None else example)
    request = _Request(
        budget=budget, align=align, loss=loss, resume=None if resume is None else Path(resume), io=io or IoOptions()
    )
    wanted = Wanted(ratio=lambda _: HALF, align=lambda _: align, kept={})
    literal = cut_chosen(
        traced, wanted, lambda found: choose(found.channel_map, found.cells, wanted.ratio, wanted.align)
    )[1]
    search = _Searching(traced, samples, request)
    found, _ = cut_chosen(traced, wanted, search.choice, data, literal)
    plan = everywhere(traced)
    chains = [] if plan is None else find_chains(traced, plan)
    base = pruned_model(model, traced, found, f"{budget}, align {align}", io)
    result = BudgetedModel(
        **{field.name: getattr(base, field.name) for field in fields(base)},
        budget=str(budget),
        ladder=search.ladder,
        cfg=config_text(ratios_of(chains, found.channels)),
        measured=search.measured,
    )
    refresh_batch_norms(result.model, data)
    search.journal.remove()
    return result


def _first_sample(sample: Sample) -> tuple[Any, ...]:
    """The first sample of a batch, if all tensors have as many, else the batch."""
    args, kwargs = sample.args, sample.kwargs
    if all(tensor.ndim and len(tensor) == sample.count for tensor in sample.tensors):
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:1], (args, kwargs))
    return (*args, kwargs)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    """What the user asks for."""

    budget: Budget
    align: int
    loss: Loss | None
    resume: Path | None
    io: IoOptions


class _Searching:
    """Makes the choice for a model whose channels are known, and remembers the ladder."""

    def __init__(self, traced: Traced, samples: list[Sample], request: _Request) -> None:
        self._traced, self._samples, self._request = traced, samples, request
        self.ladder: tuple[Rung, ...] = ()
        self.measured = 0
        tensors = [tensor for sample in samples for tensor in sample.tensors]
        state = [part for name, tensor in traced.model.state_dict().items() for part in (name, tensor)]
        bound = {
            "model": fingerprint([*(part for part in state if isinstance(part, (str, torch.Tensor)))]),
            "data": fingerprint(tensors),
            "budget": f"{request.budget}, align {request.align}, {'a loss' if request.loss else 'the output'}",
        }
        self.journal = Journal(request.resume, bound)

    def choice(self, reached: Reached) -> Removal:
        """The channels that go.

        Raises:
            SearchError: The budget cannot be reached.
        """
        request, cells = self._request, reached.cells
        options = [cell.removable(request.align) for cell in cells]
        if not any(len(each) > 1 for each in options):
            raise SearchError(
                f"{type(self._traced.model).__name__}: no channel can be removed with align={request.align}; "
                "prune says why in skipped"
            )
        measure = Measure(self._traced, self._samples, request.loss)
        measure.check_depends_on(sorted(reached.moments))
        probes = Probes(self._traced, reached.channel_map, cells, reached.moments, measure, self.journal)
        search = BudgetSearch(probes, options, request.budget.costs(reached.channel_map, cells))
        budget = request.budget
        if budget.kind == LATENCY:
            watch = LatencySearch(search, probes, Stopwatch(self._traced, request.io))
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
        budget = self._request.budget
        count = budget.counted(cost_of(whole))
        least = search.smallest_cost() / count
        if least > budget.share:
            raise SearchError(
                f"{budget.kind}: expected at least {math.ceil(1000 * least) / 1000:g}, got {budget.share:g}: without "
                f"every channel that can be removed with align={self._request.align}, so much of the {budget.noun} is "
                "left"
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
