"""Why a quantized model is worse than it should be: the guilty layers, the cause, and what helps, without labels.

Each layer is quantized alone, which names the guilty ones. Of those the noise of the input is told from that of the
weights by giving the input 16 bits; the values that the layer gets say the rest. Remedies are then tried on the guilty
layers only, and measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from amct import log
from amct.config.layers import CAFFE_TYPES, PTQ_TYPES
from amct.errors import AmctError, CalibrationError, ExportError
from amct.export.check.batch import KeptBatches
from amct.export.check.losses import similarity_over
from amct.export.onnx.messages import fixed_batch_size
from amct.export.onnx.runtime import Runner
from amct.model.kinds import KIND_OF_TORCH_TYPE, LayerKind
from amct.numerics.affine import integer_range
from amct.numerics.settings import IfmrSettings
from amct.pipeline.sensitivity import layer_sensitivity
from amct.printable import counted
from amct.report.filling import input_key
from amct.search.causes import (
    CLIPPED,
    FEW_BITS,
    FIRST,
    LAST,
    OUTLIER_CHANNEL,
    PER_TENSOR,
    RESIDUAL,
    SENSITIVE,
    Cause,
    channels,
    data_cause,
    few_samples,
    outlier,
    readers_of_sums,
    stream_outliers,
    weight_cause,
    wide_range,
)
from amct.search.choices import FLOAT, INT16, plan_with, planned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from amct.config.plan import LayerPlan, Plan
    from amct.config.python_config import AnyConfig
    from amct.pipeline.quantized_model import QuantizedModel


class Quantizes(Protocol):
    """Quantizes the model that is diagnosed."""

    def __call__(self, batches: object, config: AnyConfig, /, *, equalize: bool = False) -> QuantizedModel:
        """With some calibration data and settings."""


GUILTY_SHARE = 0.2
"""A layer with this share of the noise of the worst one, and twice the even share, is guilty."""
MOST_GUILTY = 3
"""Layers that are guilty together; when they are healed, as many others may be, and once more."""
CONVOLUTIONS = (LayerKind.CONV, LayerKind.CONV_TRANSPOSE)
HARMLESS, HARMLESS_BESIDE = 1e-5, 1e-6
"""A layer whose noise alone is 50 dB below the signal is not to blame for anything; beside a worse one, 60 dB."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What was tried.

    Attributes:
        name: Such as "16-bit inputs of fc1".
        sqnr: The SQNR of the output with it, in dB.
        gain: How many dB more than without.
        cost: What it costs, for people.
        config: A full config that gives it.
        data: Whether the model must also be calibrated with the data that the diagnosis was made on.
        equalize: Whether it must also be quantized with ``equalize=True`` (``--equalize``).
    """

    name: str
    sqnr: float
    gain: float
    cost: str
    config: Mapping[str, Any]
    data: bool = False
    equalize: bool = False


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found.

    Attributes:
        sqnr: Of the output of the simulation, in dB.
        causes: The worst first.
        remedies: The best first.
        impossible: By remedy that cannot be had here: why.
    """

    sqnr: float
    causes: tuple[Cause, ...]
    remedies: tuple[Remedy, ...]
    impossible: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"SQNR of the output: {self.sqnr:.1f} dB"]
        lines += [
            f"cause   {each.name}{f' of {each.layer}' if each.layer else ''}: {each.text}" for each in self.causes
        ]
        if not self.causes:
            lines.append("no single cause: the noise comes from all layers alike")
        lines += [f"remedy  {each.name:<44} {each.gain:+6.1f} dB   {each.cost}" for each in self.remedies]
        lines += [f"skipped {name}: {reason}" for name, reason in self.impossible.items()]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A remedy to be tried: its name, its cost, its plan, and what else differs."""

    name: str
    cost: str
    plan: Plan
    data: bool = False
    equalize: bool = False


def diagnose(quantize: Quantizes, calibration: object, data: object, config: AnyConfig = None) -> Diagnosis:
    """Find out why a quantized model is worse than it should be.

    Args:
        quantize: Quantizes the model.
        calibration: The calibration data.
        data: Samples as the model will see them, of which the first 16 or so are used.
        config: The settings that are diagnosed.

    Raises:
        ExportError: The model has no ONNX form.
        CalibrationError: There is no data.
    """
    quantized = quantize(calibration, config)
    kept = KeptBatches()
    for batch in quantized.prepared.batches(data):
        kept.notice(batch)
        if kept.is_full:
            break
    if not kept.kept:
        raise CalibrationError("the data for the diagnosis is empty; at least one batch is needed")
    return _Patient(quantized, kept.kept).diagnosis(quantize, calibration, data)


class _Patient:
    """The model that is diagnosed, on some batches."""

    def __init__(self, quantized: QuantizedModel, batches: Sequence[Any]) -> None:
        self._quantized, self._prepared, self._batches = quantized, quantized.prepared, batches
        feeds = [quantized.prepared.onnx_inputs(each) for each in batches]
        model = quantized.prepared.with_only(quantized.qparams, ())  # it owns its weights
        self._float = model.model
        self._stream: dict[str, int] = {}
        self._groups: list[list[str]] = []
        self._suspects: list[str] = []
        self._feeds = _of_size(feeds, fixed_batch_size(model.model))
        runner = Runner(model.model)
        self._expected = [runner.run(each) for each in self._feeds]

    def diagnosis(self, quantize: Quantizes, calibration: object, data: object) -> Diagnosis:
        """Causes and remedies."""
        before = self._sqnr(self._quantized)
        causes = self._causes()
        remedies, impossible = [], {}
        for trial in log.track(list(self._trials(causes)), "Trying remedies"):
            config = self._prepared.config_of(trial.plan)
            try:
                sqnr = self._sqnr(quantize(data if trial.data else calibration, config, equalize=trial.equalize))
            except AmctError as error:
                impossible[trial.name] = str(error)
                continue
            remedies.append(
                Remedy(
                    name=trial.name,
                    sqnr=sqnr,
                    gain=sqnr - before,
                    cost=trial.cost,
                    config=config,
                    data=trial.data,
                    equalize=trial.equalize,
                )
            )
        remedies.sort(key=lambda each: -each.gain)
        return Diagnosis(sqnr=before, causes=tuple(causes), remedies=tuple(remedies), impossible=impossible)

    def _sqnr(self, quantized: QuantizedModel) -> float:
        """Of the output of the simulation, in the worst of several."""
        model = quantized.prepared.with_only(quantized.qparams, quantized.layers)
        size = fixed_batch_size(model.model)
        runner = Runner(model.model)
        found, _ = similarity_over(
            (exact, runner.run(feeds)) for feeds, exact in _pairs_of_size(self._feeds, self._expected, size)
        )
        if found is None:
            raise ExportError("no output can be compared")
        return found.sqnr

    # -- the data ------------------------------------------------------------------------------------------------------

    def _data_cause(self) -> Cause | None:
        examples = [self._prepared.onnx_inputs(each) for each in self._quantized.examples]
        name = max(self._feeds[0], key=lambda key: self._feeds[0][key].nbytes)
        used = self._quantized.calibration
        is_counted = used is not None and used.unit != "batches"
        samples = used.used if used is not None and is_counted else _samples(examples, name)
        if self._feeds[0][name].dtype.kind != "f":
            return few_samples(samples)
        ours, theirs = (channels([each[name] for each in feeds]) for feeds in (self._feeds, examples))
        return data_cause(ours, theirs, samples)

    # -- layers --------------------------------------------------------------------------------------------------------

    def _noises(self, quantized: QuantizedModel, layers: Sequence[str]) -> dict[str, float]:
        prepared, qparams = quantized.prepared, quantized.qparams
        found = layer_sensitivity(layers, lambda names: prepared.with_only(qparams, names), self._feeds)
        return {each.layer: 10 ** (-each.sqnr / 10) if math.isfinite(each.sqnr) else 0.0 for each in found}

    def _guilty(self) -> list[str]:
        """The layers that have most of the noise, the worst first; then those that have most of what is left."""
        self._alone = self._noises(self._quantized, self._quantized.layers)
        left = sorted(self._alone.items(), key=lambda item: -item[1])
        for _ in range(MOST_GUILTY):
            worst, even = left[0][1] if left else 0.0, sum(noise for _, noise in left) / max(1, len(left))
            least = HARMLESS_BESIDE if self._groups else HARMLESS
            group = [
                name
                for name, noise in left[:MOST_GUILTY]
                if noise > max(least, GUILTY_SHARE * worst) and (noise > 2 * even or len(left) < 3)
            ]
            if not group:
                break
            self._groups.append(group)
            left = left[len(group) :]
        if not self._groups:  # no layer stands out; those with more than their share may still have a cause
            least = max(HARMLESS, even) if left else 0.0
            self._suspects = [name for name, noise in left[:MOST_GUILTY] if noise > least]
        return [name for group in self._groups for name in group] or self._suspects

    def _look(self, guilty: Sequence[str]) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.float64]]]:
        """What layers get in the float model: of the guilty ones all, of every layer the largest of each channel."""
        found: dict[str, list[Tensor]] = {input_key(name): [] for name in guilty}
        names = {input_key(name): name for name in self._quantized.layers}
        largest: dict[str, NDArray[np.float64]] = {}

        def take(key: str, tensor: Tensor) -> None:
            if key in found:
                found[key].append(tensor.detach().clone())  # a Caffe net uses its memory again
            if key in names:
                array = tensor.detach().cpu().float().numpy()
                seen = np.abs(channels([array], last=self._has_last(names[key], array.ndim))).max(1)
                before = largest.get(names[key])
                largest[names[key]] = seen if before is None or before.shape != seen.shape else np.maximum(before, seen)

        with self._prepared.compared_models(self._quantized.qparams)[0].watch(inputs=take) as run:
            for batch in self._batches:
                run(batch)
        rows = {}
        for name in guilty:
            arrays = [tensor.detach().cpu().float().numpy() for tensor in found[input_key(name)]]
            if arrays:
                rows[name] = channels(arrays, last=self._has_last(name, arrays[0].ndim))
        return rows, {name: largest[name] for name in self._quantized.layers if name in largest}

    def _has_last(self, name: str, rank: int) -> bool:
        """Whether the channels of a layer's input are its last axis; those of pictures and signals are axis 1."""
        kind = self._plan_of(name).type
        return kind == "Linear" or (rank != 4 and KIND_OF_TORCH_TYPE.get(kind) not in CONVOLUTIONS)

    def _causes(self) -> list[Cause]:
        """What is wrong with the data, and with each guilty layer."""
        of_data, guilty = self._data_cause(), self._guilty()
        rows, largest = self._look(guilty)
        self._stream = stream_outliers(largest, readers_of_sums(self._float, list(largest)))
        found = [self._cause(name, rows.get(name), largest.get(name)) for name in guilty]
        first = len(self._groups[0]) if self._groups else 0
        found = [*found[:first], *(each for each in found[first:] if each.name not in (FIRST, LAST, SENSITIVE))]
        if not self._groups and found:
            self._groups.append([each.layer for each in found])
        layer = self._quantized.layers[0]
        if of_data is None and layer in largest and self._quantized.qparams[layer].inputs:
            of_data = wide_range(float(largest[layer].max()), self._quantized.qparams[layer].input)
        return [*([] if of_data is None else [of_data]), *found]

    def _cause(self, name: str, rows: NDArray[np.float64] | None, largest: NDArray[np.float64] | None) -> Cause:
        """What is wrong with a guilty layer."""
        quantized, freedom = self._quantized, self._prepared.freedom()
        wide = planned(self._plan_of(name), INT16, freedom[name])
        of_input = True
        if wide is not None:
            plan = plan_with(self._prepared.plan, {name: INT16}, freedom)
            of_input = self._noises(quantized.variant(plan), [name])[name] < 0.5 * self._alone[name]
        seen = clipped = self._clipped(name, rows) if rows is not None else None
        if rows is not None and largest is not None and (of_input or clipped is not None):
            seen = self._outlier(name, largest) or clipped
        elif not of_input:
            layer = next(each for each in self._prepared.report_layers(quantized.qparams) if each.name == name)
            seen = weight_cause(layer, one_scale=quantized.qparams[name].weight.scale.numel() == 1)
        if seen is not None:
            return Cause(layer=name, name=seen[0], text=seen[1])
        place = {quantized.layers[0]: FIRST, quantized.layers[-1]: LAST}.get(name, SENSITIVE)
        what = "input" if of_input else "weights"
        share = self._alone[name] / max(1e-30, sum(self._alone.values()))
        return Cause(layer=name, name=place, text=f"{share:.0%} of the noise; most of it comes from its {what}")

    def _outlier(self, name: str, largest: NDArray[np.float64]) -> tuple[str, str] | None:
        """Whether a channel is much larger than the others, here or in the whole residual stream."""
        seen = outlier(largest)
        if seen is None:
            return None
        text = f"channel {seen[0]} is {seen[1]:.0f} times as large as others"
        if self._stream.get(name) != seen[0]:
            return OUTLIER_CHANNEL, text
        readers = [layer for layer, channel in self._stream.items() if channel == seen[0]]
        return RESIDUAL, f"{text} in the stream of {counted(len(readers), 'layer')}, {readers[0]} first"

    def _clipped(self, name: str, rows: NDArray[np.float64]) -> tuple[str, str] | None:
        """Whether values outside of the range make more noise than the steps inside."""
        qparams = self._quantized.qparams[name].input
        step, offset = qparams.step, qparams.zero_point
        low, high = ((end - offset) * step for end in integer_range(qparams.bits))
        if float(np.mean((rows - rows.clip(low, high)) ** 2)) <= 2 * step**2 / 12:
            return None
        return CLIPPED, f"values go from {rows.min():.3g} to {rows.max():.3g}, the range from {low:.3g} to {high:.3g}"

    def _plan_of(self, name: str) -> LayerPlan:
        found = self._prepared.plan.find(name)
        assert found is not None
        return found

    # -- remedies ------------------------------------------------------------------------------------------------------

    def _trials(self, causes: Sequence[Cause]) -> Iterator[_Trial]:
        """What may help: to the first guilty layers, to all of them, and to all that read a stream."""
        plan = self._prepared.plan
        if any(not each.layer or each.name == CLIPPED for each in causes):
            here = replace(plan, batch_num=len(self._batches))
            yield _Trial(
                name="calibrate with data as the model will see it", cost="a calibration", plan=here, data=True
            )
        if not self._groups:
            return
        yield _Trial(name="equalize channels of all layers", cost="nothing on the target", plan=plan, equalize=True)
        sets = [self._groups[0], [name for group in self._groups for name in group]]
        if any(each.name == RESIDUAL for each in causes):
            sets.append([name for name in self._quantized.layers if name in self._stream or name in sets[1]])
        for names in {tuple(sorted(each)): each for each in sets}.values():
            yield from self._trials_of(names, plan)
        own = {name: self._own_remedy(name, causes) for name in sets[1]}
        if len({next(iter(each), FLOAT) for each in own.values()}) > 1:
            floats = {name: FLOAT for name, each in own.items() if not each}
            mixed = _changed(plan_with(plan, floats, self._prepared.freedom()), own)
            yield _Trial(name=f"each its own: {_short_list(list(own))}", cost="16 bits or float in part", plan=mixed)

    def _own_remedy(self, name: str, causes: Sequence[Cause]) -> dict[str, Any]:
        """What is changed for one layer and its cause; nothing: it is left float."""
        layer, cause = self._plan_of(name), next((each.name for each in causes if each.layer == name), "")
        weight = layer.weight
        if cause == CLIPPED:
            return {"activations": tuple(map(_usual_range, layer.activations))}
        if cause == FEW_BITS and weight is not None:
            return {"weight": replace(weight, num_bits=8)}
        if cause == PER_TENSOR and weight is not None:
            return {"weight": replace(weight, channel_wise=True)} if _can_be_channel_wise(layer.type) else {}
        if cause in (OUTLIER_CHANNEL, RESIDUAL) and self._prepared.freedom()[name].wide:
            return {"activations": tuple(replace(each, num_bits=16) for each in layer.activations)}  # type: ignore[type-var]
        return {}

    def _trials_of(self, guilty: Sequence[str], plan: Plan) -> Iterator[_Trial]:
        """What may help these layers."""
        freedom, names = self._prepared.freedom(), _short_list(guilty)
        wide = plan_with(plan, dict.fromkeys(guilty, INT16), freedom)
        yield _Trial(name=f"16-bit inputs: {names}", cost="slower where 16 bits are", plan=wide)
        weights = sum(freedom[name].values for name in guilty)
        if len(guilty) < len(self._quantized.layers):
            left = plan_with(plan, dict.fromkeys(guilty, FLOAT), freedom)
            yield _Trial(name=f"float: {names}", cost=f"{3 * weights} bytes more", plan=left)
        if not any(freedom[name].clustered for name in guilty):  # Caffe has none
            balanced = _changed(plan, {name: {"migration_strength": 0.5} for name in guilty})
            yield _Trial(name=f"DMQ balancing: {names}", cost="one more pass over the calibration data", plan=balanced)
        own = {name: self._plan_of(name) for name in guilty}
        weight = {name: each.weight for name, each in own.items() if each.weight is not None}
        if any(each.num_bits < 8 for each in weight.values()):
            more = _changed(plan, {name: {"weight": replace(each, num_bits=8)} for name, each in weight.items()})
            yield _Trial(name=f"8-bit weights: {names}", cost=f"{weights // 2} bytes more", plan=more)
        coarse = {
            name: {"weight": replace(each, channel_wise=True)}
            for name, each in weight.items()
            if not each.channel_wise and _can_be_channel_wise(own[name].type)
        }
        if coarse:
            text = _short_list(list(coarse))
            yield _Trial(name=f"a scale for each output: {text}", cost="nothing", plan=_changed(plan, coarse))
        ranges = {name: {"activations": tuple(map(_usual_range, layer.activations))} for name, layer in own.items()}
        if any(ranges[name]["activations"] != layer.activations for name, layer in own.items()):
            yield _Trial(name=f"the usual ranges: {names}", cost="nothing", plan=_changed(plan, ranges))


def _usual_range(settings: Any) -> Any:  # noqa: ANN401  settings of any algorithm
    return IfmrSettings(num_bits=settings.num_bits, asymmetric=settings.asymmetric)


def _can_be_channel_wise(kind: str) -> bool:
    found = PTQ_TYPES.get(kind) or CAFFE_TYPES.get(kind)
    return found is not None and found.channel_wise


def _short_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_GUILTY} more" if len(names) > MOST_GUILTY else ""
    return ", ".join(names[:MOST_GUILTY]) + more


def _changed(plan: Plan, layers: Mapping[str, Mapping[str, Any]]) -> Plan:
    """A plan with other settings of some layers."""
    return replace(plan, layers=tuple(replace(each, **layers.get(each.name, {})) for each in plan.layers))


def _of_size(feeds: Sequence[Mapping[str, NDArray[Any]]], size: int | None) -> list[dict[str, NDArray[Any]]]:
    """The same samples in batches of a size, the last one repeated to fill it; as they are if not divisible."""
    arrays = [array for each in feeds for array in each.values()]
    counts = [{len(array) if array.ndim else 0 for array in each.values()} for each in feeds]
    if size is None or not arrays or any(len(each) != 1 or 0 in each for each in counts):
        return [dict(each) for each in feeds]
    if all(each == {size} for each in counts):
        return [dict(each) for each in feeds]
    joined = {name: np.concatenate([each[name] for each in feeds]) for name in feeds[0]}
    total = sum(each.pop() for each in counts)
    rows = np.minimum(np.arange(-(-total // size) * size), total - 1)
    return [{name: array[rows[i : i + size]] for name, array in joined.items()} for i in range(0, len(rows), size)]


def _pairs_of_size(
    feeds: Sequence[Mapping[str, NDArray[Any]]], outputs: Sequence[Mapping[str, NDArray[Any]]], size: int | None
) -> list[tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]]:
    """Inputs with their outputs in batches of a size: both divided alike, or neither."""
    joined = [
        {**{f"<{name}": array for name, array in given.items()}, **{f">{name}": array for name, array in made.items()}}
        for given, made in zip(feeds, outputs, strict=True)
    ]
    return [
        (
            {name[1:]: each[name] for name in each if name[0] == "<"},
            {name[1:]: each[name] for name in each if name[0] == ">"},
        )
        for each in _of_size(joined, size)
    ]


def _samples(feeds: Sequence[Mapping[str, NDArray[Any]]], name: str) -> int:
    return sum(len(each[name]) for each in feeds)
