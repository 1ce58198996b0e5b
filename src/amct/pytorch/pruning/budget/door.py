"""``prune_to``: pruning to a budget in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.pytorch.inputs import IoOptions
from amct.pytorch.pruning.budget.combining import combined
from amct.pytorch.pruning.budget.goal import Budget
from amct.pytorch.pruning.budget.job import PruneJob, PruneOptions

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from torch import nn

    from amct.pytorch.pruning.budget.probes import Loss
    from amct.pytorch.pruning.budget.result import BudgetedModel


def prune_to(  # noqa: PLR0913  a front door with its settings
    model: nn.Module,
    batches: object,
    *,
    flops: float | None = None,
    latency: float | None = None,
    params: float | None = None,
    loss: Loss | None = None,
    align: int = 8,
    keep: Iterable[str] = (),
    example: object = None,
    resume: str | os.PathLike[str] | None = None,
    quantize: bool = False,
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
        keep: Names of layers that keep all channels.
        example: An input with which operations are counted and time is measured; the first sample unless given.
        resume: A file such as ``out/net.search.jsonl``: what is measured is kept there, and a search that was killed
            goes on from it; it is removed at the end.
        quantize: Whether also 8 bits, 2:4 sparsity and layers of low rank may be used to meet the budget, alone and
            together: ``combinations`` has all of them, the best one first. ``flops`` then counts multiplications times
            the bits of both factors, ``params`` bytes, and ``latency`` the time of the QDQ file.
        io: Names and dynamic axes of the exported files.

    Raises:
        SearchError: The budget cannot be reached, no channel can be removed, or the loss does not depend on a layer.
        AmctError: The subclass tells whether arguments, model, data or loss are invalid.
    """
    budget = Budget.of({"flops": flops, "latency": latency, "params": params})
    options = PruneOptions(budget=budget, align=align, loss=loss, keep=keep, resume=resume, io=io or IoOptions())
    job = PruneJob(model, batches, example, options)
    result = combined(job) if quantize else job.pruned(budget)
    job.journal.remove()
    return result
