"""One budget, several means: channels, 2:4 sparsity, layers of low rank, and 8 bits, alone and together.

Each combination meets the budget: its bits and its sparsity save a known share, and as many channels go as are needed
for the rest. What each loses is measured without training, on the same samples. Each is then one fine-tuning away; the
one that loses least is the first to try.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from amct.errors import ArgumentError, ExportError, ModelError, SearchError
from amct.pytorch.decomposition.door import decompose
from amct.pytorch.door import quantize
from amct.pytorch.pruning.budget.goal import FLOPS, LATENCY, PARAMS, Budget
from amct.pytorch.pruning.budget.probes import Measure
from amct.pytorch.pruning.budget.result import FLOAT_BITS, BudgetedModel, Combination
from amct.pytorch.pruning.door import sparsify
from amct.pytorch.pruning.saving import plain_copy
from amct.pytorch.pruning.timing import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amct.pipeline.quantized_model import QuantizedModel
    from amct.pytorch.pruning.budget.job import PruneJob
    from amct.pytorch.pruning.pruned_model import PrunedModel

logger = logging.getLogger(__name__)

BITS = 8
TRIES = 3
"""How often the channels of a quantized model are chosen anew until its file is fast enough."""
ENOUGH = 1.02
"""A file that takes this share of the wanted time, or less, is fast enough."""


@dataclass(frozen=True)
class _Means:
    """What a combination uses besides channels."""

    bits: int
    sparse: bool

    def saved(self, kind: str) -> float:
        """The share of what a budget counts that is left with them."""
        sparse = 1.0
        if self.sparse:  # two of four weights; in bytes each of these has its place too, in two bits
            sparse = 0.5 + 1 / self.bits if kind == PARAMS else 0.5
        return sparse * (self.bits / FLOAT_BITS) ** (2 if kind == FLOPS else 1)


def combined(job: PruneJob) -> BudgetedModel:
    """The best combination with channels, and all that were tried.

    Raises:
        SearchError: None meets the budget.
    """
    comparison = _Comparison(job)
    found = sorted(comparison.all(), key=lambda each: each.lost)
    best = next((each for each in found if isinstance(each.result, BudgetedModel)), None)
    if best is None:
        raise SearchError(f"{job.options.budget}: no combination meets it; {comparison.last_error}")
    assert isinstance(best.result, BudgetedModel)
    return replace(best.result, combinations=tuple(found), budget=str(job.options.budget))


class _Comparison:
    """Makes the combinations and measures them."""

    def __init__(self, job: PruneJob) -> None:
        self._job, self._budget = job, job.options.budget
        self._measure = Measure(job.traced, job.samples, job.options.loss, own_statistics=False)
        self._stopwatch = Stopwatch(job.traced, job.options.io)
        self.last_error = ""

    def all(self) -> Iterator[Combination]:
        """Every combination that meets the budget."""
        for bits in (FLOAT_BITS, BITS):
            for sparse in (False, True) if self._budget.kind != LATENCY else (False,):
                yield from self._tried("channels", lambda: self._of(_Means(bits, sparse)))  # noqa: B023  called at once
            if self._budget.kind == FLOPS:
                yield from self._tried("low rank", lambda: self._of_low_rank(_Means(bits, sparse=False)))  # noqa: B023

    def _tried(self, what: str, make: Callable[[], Combination]) -> Iterator[Combination]:
        try:
            yield make()
        except (ArgumentError, ExportError, ModelError, SearchError) as error:
            self.last_error = str(error)
            logger.info("%s cannot meet the budget: %s", what, error)

    def _of(self, means: _Means) -> Combination:
        """Channels with some other means."""
        if self._budget.kind == LATENCY and means.bits != FLOAT_BITS:
            return self._of_file()
        share = min(1.0, self._budget.share / means.saved(self._budget.kind))
        result = self._job.pruned(Budget(kind=self._budget.kind, share=share))
        if means.sparse:
            masked = sparsify(result.model, self._example)
            record = replace(result.record, prune=(*result.record.prune, *masked.record.prune))
            result = replace(result, model=masked.model, record=record)
        return self._combination(means, result, "channels" if share < 1 else "")

    def _of_low_rank(self, means: _Means) -> Combination:
        share = self._budget.share / means.saved(FLOPS)
        if share >= 1:
            raise SearchError("nothing has to be decomposed")
        job = self._job
        result = decompose(job.traced.model, self._batches(), flops=share, align=job.options.align, io=job.options.io)
        return self._combination(means, result, "low rank")

    def _of_file(self) -> Combination:
        """Channels and 8 bits, by the time of the file."""
        share = 1.0
        for _ in range(TRIES):
            result = self._job.pruned(Budget(kind=LATENCY, share=share))
            quantized = self._quantized(result)
            exported = quantized.exported()
            if isinstance(exported, ExportError):
                raise SearchError(f"there is no file to be timed: {exported}")
            whole, seconds = self._stopwatch.seconds_of(exported.model)
            time = seconds / whole
            if time <= ENOUGH * self._budget.share:
                name = " + ".join(["channels"] * (share < 1) + ["INT8"])
                return Combination(
                    name=name, share=time, lost=self._measure.lost(quantized.model), bits=BITS, result=result
                )
            share *= self._budget.share / time
        raise SearchError(f"the file with 8 bits takes {time:.3f} of the time")

    def _combination(self, means: _Means, result: PrunedModel, first: str) -> Combination:
        parts = [first, "2:4" if means.sparse else "", "INT8" if means.bits == BITS else ""]
        model = plain_copy(result.model) if means.bits == FLOAT_BITS else self._quantized(result).model
        share = means.saved(self._budget.kind)
        if self._budget.kind == LATENCY:
            share = result.ladder[-1].share if isinstance(result, BudgetedModel) and result.ladder else 1.0
        else:
            share *= self._budget.counted(result.after) / self._budget.counted(result.before)
        return Combination(
            name=" + ".join(part for part in parts if part),
            share=share,
            lost=self._measure.lost(model),
            bits=means.bits,
            result=result,
        )

    def _quantized(self, result: PrunedModel) -> QuantizedModel:
        return quantize(plain_copy(result.model), self._batches())

    def _batches(self) -> list[tuple[object, ...]]:
        return [(*each.args, each.kwargs) for each in self._job.samples]

    @property
    def _example(self) -> tuple[object, ...]:
        inputs = self._job.traced.inputs
        return (*inputs.args, inputs.kwargs)
