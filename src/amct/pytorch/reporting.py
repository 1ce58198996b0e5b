"""Fills a report: runs the float and the quantized model on data and gathers what their layers show.

One batch at a time is in memory; what is kept of a layer does not grow with the data.
"""

from __future__ import annotations

import platform
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import onnx
import onnxruntime
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from amct import __version__, progress
from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError, FileError
from amct.numerics.arq import channels_first
from amct.numerics.dmq import balance_activation
from amct.pytorch.comparing import side_by_side
from amct.pytorch.layer_hooks import given_input
from amct.pytorch.layer_weights import balanced_weight, channel_axis, weight_parts
from amct.report.activations import InputStatistics
from amct.report.compare import Comparison
from amct.report.content import Figure, FileSize, LayerContent, LayerNote, ReportContent, WeightRanges

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from amct.config.plan import LayerPlan, Plan
    from amct.pytorch.layer_hooks import Arguments
    from amct.pytorch.preparation import Preparation
    from amct.pytorch.quantized_weights import LayerWeights
    from amct.record import LayerRecord, Record
    from amct.report.compare import LayerComparison

    Metric = Callable[[Any, Any], float]
    """``metric(output, batch)``: the mean over the samples of one batch, which is as the data gave it."""

    Originals = Iterable[tuple[Any, Arguments]]

_OUTPUT = "output"
_NO_CONFIG = "create_quant_config"
"""What a plan names as its source when the user gave none."""


@dataclass
class _Measured:
    """What the runs showed."""

    layers: Mapping[str, LayerComparison] = field(default_factory=dict)
    inputs: Mapping[str, InputStatistics] = field(default_factory=dict)
    output: LayerComparison | None = None
    metric: tuple[float, float] | None = None
    batches: int = 0


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
    if metric is not None and data is None:
        raise ArgumentError("metric: it needs data, with labels; pass data= too")
    sizes = tuple(_file_size(Path(file)) for file in files)
    example = preparation.traced.inputs
    batches = data if data is not None else [(example.args, (example.args, example.kwargs))]
    measured = _measure(preparation, record, simulated, batches, metric)
    if measured.batches == 0:
        raise CalibrationError("data is empty; a report needs at least one batch, or None for the calibration batch")
    number = f"{measured.batches} batch{'es' if measured.batches > 1 else ''}"
    return ReportContent(
        model=type(preparation.traced.model).__name__,
        measured_on=number if data is not None else "the first calibration batch",
        figures=tuple(_figures(preparation, measured, metric)),
        files=sizes,
        layers=tuple(_layer(preparation, plan, record[plan.name], measured) for plan in preparation.layers),
        fused=tuple(
            LayerNote(layer=norm, text=f'folded into "{layer}"') for layer, norm in preparation.fused.fusions.items()
        ),
        skipped=tuple(LayerNote(layer=skip.layer, text=skip.reason) for skip in preparation.skips),
        config=config_text(preparation.plan),
        versions=_versions(),
        created=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def _file_size(path: Path) -> FileSize:
    try:
        return FileSize(name=path.name, size=path.stat().st_size)
    except OSError as error:
        raise FileError(f'files: cannot look at "{path}": {error.strerror}') from error


# -- the runs ----------------------------------------------------------------------------------------------------------


def _measure(
    preparation: Preparation, record: Record, simulated: nn.Module, batches: Originals, metric: Metric | None
) -> _Measured:
    reference = preparation.fused.model
    layers, outputs = Comparison(), Comparison()
    inputs = {name: _statistics(record[name]) for name in preparation.weights}
    scores = _Scores(metric)
    count = 0
    with ExitStack() as stack:
        for name, weights in preparation.weights.items():
            module = reference.get_submodule(name)
            hook = _input_hook(inputs[name], weights, channel_axis(module))
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        run = stack.enter_context(side_by_side(reference, simulated, {name: name for name in inputs}, layers))
        for batch, arguments in progress.track(batches, "Measuring"):
            expected, got = run(arguments)
            for one, other in zip(_tensors(expected), _tensors(got), strict=True):
                outputs.add(_OUTPUT, one, other)
            scores.add(expected, got, batch)
            count += 1
    return _Measured(
        layers={found.layer: found for found in layers.layers()},
        inputs=inputs,
        output=next(iter(outputs.layers()), None),
        metric=scores.result(),
        batches=count,
    )


def _statistics(entry: LayerRecord) -> InputStatistics:
    assert entry.scale_d is not None
    assert entry.offset_d is not None
    return InputStatistics(entry.scale_d, entry.offset_d, _bits(entry.activation_type))


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


class _Scores:
    """The mean of a metric for both models; batches count as much as they have samples."""

    def __init__(self, metric: Metric | None) -> None:
        self._metric = metric
        self._sums = [0.0, 0.0]
        self._samples = 0

    def add(self, expected: object, got: object, batch: object) -> None:
        if self._metric is None:
            return
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 0]
        samples = tensors[0].shape[0] if tensors else 1
        for place, output in enumerate((expected, got)):
            value = self._metric(output, batch)
            try:
                self._sums[place] += float(value) * samples
            except (TypeError, ValueError, RuntimeError) as error:
                raise ArgumentTypeError(
                    f"metric: expected a number for each batch, got {type(value).__name__}; "
                    "let it return the mean over the batch, such as (output.argmax(1) == batch[1]).float().mean()"
                ) from error
        self._samples += samples

    def result(self) -> tuple[float, float] | None:
        if self._metric is None or self._samples == 0:
            return None
        return self._sums[0] / self._samples, self._sums[1] / self._samples


# -- the content -------------------------------------------------------------------------------------------------------


def _figures(preparation: Preparation, measured: _Measured, metric: Metric | None) -> Iterator[Figure]:
    if measured.metric is not None:
        name = getattr(metric, "__name__", "metric")
        before, after = measured.metric
        label = "metric" if name == "<lambda>" else name.replace("_", " ")
        yield Figure(label=label, before=f"{before:.4g}", after=f"{after:.4g}")
    if measured.output is not None:
        yield Figure(label="cosine of both outputs", after=f"{measured.output.cosine:.5f}")
        yield Figure(label="SQNR of the output", after=f"{measured.output.sqnr:.1f} dB")
    before, after = _weight_bytes(preparation)
    if before:
        yield Figure(label="weights of the quantized layers", before=_size(before), after=_size(after))


def _weight_bytes(preparation: Preparation) -> tuple[float, float]:
    before = after = 0.0
    for name, weights in preparation.weights.items():
        module = preparation.fused.model.get_submodule(name)
        for part in weight_parts(module):
            weight = part.of(module)
            before += weight.numel() * weight.element_size()
            after += weight.numel() * weights.recorded_bits / 8
    return before, after


def _size(number: float) -> str:
    return f"{number / 1e6:.3g} MB" if number >= 1e6 else f"{number / 1e3:.3g} kB"


def _layer(preparation: Preparation, plan: LayerPlan, entry: LayerRecord, measured: _Measured) -> LayerContent:
    module = preparation.fused.model.get_submodule(plan.name)
    compared = measured.layers.get(plan.name)
    weights = preparation.weights[plan.name]
    return LayerContent(
        name=plan.name,
        type=plan.type,
        activation_bits=_bits(entry.activation_type),
        weight_bits=weights.bits if weights.factors else None,
        scale=entry.scale_d,
        offset=entry.offset_d,
        sqnr=compared.sqnr if compared is not None else None,
        cosine=compared.cosine if compared is not None else None,
        activation=measured.inputs[plan.name].result(),
        weights=_weight_ranges(module, weights),
    )


def _weight_ranges(module: nn.Module, weights: LayerWeights) -> WeightRanges | None:
    """Of each output channel; of a recurrent layer, the rows of the input's matrix and then those of the state's."""
    minima: list[float] = []
    maxima: list[float] = []
    for part in weight_parts(module):
        rows = channels_first(balanced_weight(module, part, weights.balance), part.kind, part.groups)
        minimum, maximum = torch.aminmax(rows.float(), dim=1)
        minima += minimum.tolist()
        maxima += maximum.tolist()
    return WeightRanges(minimum=tuple(minima), maximum=tuple(maxima)) if minima else None


def _bits(type_name: str) -> int:
    return int(type_name.removeprefix("INT"))


def config_text(plan: Plan) -> str:
    """What a plan says, short: layers with the same settings are told together."""
    lines = [
        f"source: {'defaults' if plan.source == _NO_CONFIG else plan.source}",
        f"batch_num: {plan.batch_num}",
        f"activation_offset: {str(plan.activation_offset).lower()}",
        f"do_fusion: {str(plan.do_fusion).lower()}",
    ]
    if plan.skip_fusion_layers:
        lines.append(f"skip_fusion_layers: {', '.join(plan.skip_fusion_layers)}")
    if plan.force_fp16:
        lines.append("fakequant_precision_mode: FORCE_FP16_QUANT")
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in plan.enabled:
        groups.setdefault(_settings(layer), []).append(layer.name)
    for settings, names in groups.items():
        lines += ["", ", ".join(names), *(f"  {setting}" for setting in settings)]
    return "\n".join(lines)


def _settings(layer: LayerPlan) -> tuple[str, ...]:
    balance = f"dmq_balancer: migration_strength={layer.migration_strength}"
    return (
        f"activations: {layer.activation}",
        *([f"weights: {layer.weight}"] if layer.weight is not None else []),
        *([balance] if layer.migration_strength is not None else []),
    )


def _versions() -> tuple[tuple[str, str], ...]:
    return (
        ("amct", __version__),
        ("torch", torch.__version__),
        ("onnx", onnx.__version__),
        ("onnxruntime", onnxruntime.__version__),
        ("numpy", numpy.__version__),
        ("Python", platform.python_version()),
    )
