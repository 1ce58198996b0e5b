"""Fills a report: runs the float and the quantized model on data and gathers what their layers show.

One batch at a time is in memory; what is kept of a layer does not grow with the data.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from amct import progress
from amct.config.plan_text import config_text
from amct.numerics.arq import channels_first
from amct.numerics.dmq import balance_activation
from amct.pytorch.comparing import side_by_side
from amct.pytorch.layer_weights import balanced_weight, channel_axis, weight_parts
from amct.pytorch.watch.layer_hooks import given_input
from amct.report.content import LayerNote, ReportContent
from amct.report.filling import figures, file_sizes, measured_on, now, versions
from amct.report.measuring import OUTPUT, Measuring, check_metric
from amct.report.recorded_layers import recorded_layer, recorded_statistics

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from amct.config.plan import LayerPlan
    from amct.pytorch.preparation import Preparation
    from amct.pytorch.quantized_weights import LayerWeights
    from amct.pytorch.watch.layer_hooks import Arguments
    from amct.record import LayerRecord, Record
    from amct.report.activations import InputStatistics
    from amct.report.content import LayerContent
    from amct.report.measuring import Measured, Metric

    Originals = Iterable[tuple[Any, Arguments]]


def report_content(
    preparation: Preparation,
    record: Record,
    simulated: nn.Module,
    data: Originals | None,
    metric: Metric | None = None,
    files: Iterable[str | os.PathLike[str]] = (),
) -> ReportContent:
    """Everything the report of a quantized model shows.

    Args:
        preparation: the model as it was prepared.
        record: its complete factors.
        simulated: the quantized model in torch.
        data: batches as the data gave them and as arguments; None: the first calibration batch.
        metric: accuracy of one batch.
        files: whose sizes are shown.

    Raises:
        ArgumentTypeError: the metric gives no number.
        CalibrationError: there is no data.
        ArgumentError: a metric without data, whose labels it needs.
        FileError: one of the files cannot be looked at.
    """
    check_metric(metric, data)
    sizes = file_sizes(files)
    example = preparation.traced.inputs
    batches = data if data is not None else [(example.args, (example.args, example.kwargs))]
    measured = _measure(preparation, record, simulated, batches, metric)
    return ReportContent(
        model=type(preparation.traced.model).__name__,
        measured_on=measured_on(measured) if data is not None else "the first calibration batch",
        figures=tuple(figures(measured, _weight_bytes(preparation))),
        files=sizes,
        layers=tuple(_layer(preparation, plan, record[plan.name], measured) for plan in preparation.layers),
        fused=tuple(
            LayerNote(layer=norm, text=f'folded into "{layer}"') for layer, norm in preparation.fused.fusions.items()
        ),
        skipped=tuple(LayerNote(layer=skip.layer, text=skip.reason) for skip in preparation.skips),
        config=config_text(preparation.plan),
        versions=versions(),
        created=now(),
    )


# -- the runs ----------------------------------------------------------------------------------------------------------


def _measure(
    preparation: Preparation, record: Record, simulated: nn.Module, batches: Originals, metric: Metric | None
) -> Measured:
    reference = preparation.fused.model
    inputs = {name: recorded_statistics(record[name]) for name in preparation.weights}
    measuring = Measuring(inputs, metric)
    with ExitStack() as stack:
        for name, weights in preparation.weights.items():
            module = reference.get_submodule(name)
            hook = _input_hook(inputs[name], weights, channel_axis(module))
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        layers = {name: name for name in inputs}
        run = stack.enter_context(side_by_side(reference, simulated, layers, measuring.layers))
        for batch, arguments in progress.track(batches, "Measuring"):
            expected, got = run(arguments)
            pairs = zip(_tensors(expected), _tensors(got), strict=True)
            measuring.add((OUTPUT, one, other) for one, other in pairs)
            measuring.score(expected, got, batch, _samples(batch))
    return measuring.result()


def _input_hook(statistics: InputStatistics, weights: LayerWeights, axis: int) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = given_input(args, kwargs)
        if x is None:
            return
        if weights.balance is not None:  # the grid is that of the balanced input
            x = balance_activation(x, weights.balance.to(x.device), axis)
        statistics.add(x)

    return hook


def _tensors(output: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _samples(batch: object) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    return tensors[0].shape[0] if tensors else 1


# -- the content -------------------------------------------------------------------------------------------------------


def _weight_bytes(preparation: Preparation) -> tuple[float, float]:
    before = after = 0.0
    for name, weights in preparation.weights.items():
        module = preparation.fused.model.get_submodule(name)
        for part in weight_parts(module):
            weight = part.of(module)
            before += weight.numel() * weight.element_size()
            after += weight.numel() * weights.recorded_bits / 8
    return before, after


def _layer(preparation: Preparation, plan: LayerPlan, entry: LayerRecord, measured: Measured) -> LayerContent:
    weights = preparation.weights[plan.name]
    rows = _weight_rows(preparation.fused.model.get_submodule(plan.name), weights)
    return recorded_layer(plan, entry, measured, weight_bits=weights.bits if weights.factors else None, rows=rows)


def _weight_rows(module: nn.Module, weights: LayerWeights) -> Iterator[Tensor]:
    """A row each output channel; of a recurrent layer, the rows of the input's matrix and then those of the state's."""
    for part in weight_parts(module):
        yield channels_first(balanced_weight(module, part, weights.balance), part.kind, part.groups)
