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
from amct.errors import AmctError, CalibrationError, ExportError
from amct.export.check.batch import KeptBatches
from amct.export.check.losses import similarity_over
from amct.export.onnx.messages import fixed_batch_size
from amct.export.onnx.runtime import Runner
from amct.numerics.affine import integer_range
from amct.pipeline.sensitivity import layer_sensitivity
from amct.report.filling import input_key
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


OUTLIER_CHANNEL, CLIPPED, PER_TENSOR = "outlier channel", "clipped range", "per-tensor weights"
FEW_SAMPLES, OTHER_SCALE = "too few calibration samples", "odd calibration samples"
WRONG_MEAN, CHANNEL_ORDER = "wrong mean", "channel order"
FEW_BITS, OUTLIER_WEIGHT = "few bits", "outlier weight"
FIRST, LAST, SENSITIVE = "sensitive first layer", "sensitive last layer", "sensitive layer"
GUILTY_SHARE = 0.2
"""A layer with this share of all noise, or more than this share of the worst one's, is guilty."""
MOST_GUILTY = 3
HARMLESS = 1e-5
"""A layer whose noise alone is 50 dB below the signal is not to blame for anything."""
FEWEST_SAMPLES = 8
_OUTLIER = 8.0
"""How many times larger than the median channel an outlier channel is."""
_UNEVEN_ROWS = 4.0
_SHIFT, _RATIO = 0.75, 3.0
"""By how many deviations means differ, and by which factor deviations do, of data that is prepared otherwise."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why the model loses.

    Attributes:
        layer: The guilty layer; empty if the data is.
        name: Such as "outlier channel".
        text: What was seen.
    """

    layer: str
    name: str
    text: str


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
        self._feeds = _of_size(feeds, fixed_batch_size(model.model))
        runner = Runner(model.model)
        self._expected = [runner.run(each) for each in self._feeds]

    def diagnosis(self, quantize: Quantizes, calibration: object, data: object) -> Diagnosis:
        """Causes and remedies."""
        before = self._sqnr(self._quantized)
        causes = [*self._data_causes()]
        guilty = self._guilty()
        seen = self._inputs(guilty)
        causes += [self._cause(name, seen.get(name)) for name in guilty]
        remedies, impossible = [], {}
        for trial in log.track(list(self._trials(guilty, causes)), "Trying remedies"):
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
        expected = _of_size(self._expected, size)
        runner = Runner(model.model)
        found, _ = similarity_over(
            (exact, runner.run(feeds)) for exact, feeds in zip(expected, _of_size(self._feeds, size), strict=True)
        )
        if found is None:
            raise ExportError("no output can be compared")
        return found.sqnr

    # -- the data ------------------------------------------------------------------------------------------------------

    def _data_causes(self) -> list[Cause]:
        """What the calibration data has that the data has not, channel by channel."""
        examples = [self._prepared.onnx_inputs(each) for each in self._quantized.examples]
        name = max(self._feeds[0], key=lambda key: self._feeds[0][key].nbytes)
        if self._feeds[0][name].dtype.kind != "f":
            return []
        ours, theirs = (_channels([each[name] for each in feeds]) for feeds in (self._feeds, examples))
        found = []
        shift = np.abs(ours.mean(1) - theirs.mean(1)) / (ours.std(1) + 1e-9)
        ratio = (theirs.std(1) + 1e-9) / (ours.std(1) + 1e-9)
        swapped = np.abs(ours.mean(1) - theirs.mean(1)[::-1]) / (ours.std(1) + 1e-9)
        if len(ours) == 3 and shift.max() > _SHIFT / 3 and swapped.max() < shift.max() / 3:
            text = "the channels of the calibration data have the means of the data's in reverse order"
            found.append(Cause(layer="", name=CHANNEL_ORDER, text=text))
        elif max(ratio.max(), 1 / ratio.min()) > _RATIO:
            text = f"its deviation is {ratio.max():.3g} times that of the data: another scale, or no usual samples"
            found.append(Cause(layer="", name=OTHER_SCALE, text=text))
        elif shift.max() > _SHIFT:
            text = f"its mean is {shift.max():.2g} deviations away from that of the data"
            found.append(Cause(layer="", name=WRONG_MEAN, text=text))
        used = self._quantized.calibration
        is_counted = used is not None and used.unit != "batches"
        samples = used.used if used is not None and is_counted else _samples(examples, name)
        if not found and samples < FEWEST_SAMPLES:
            found.append(Cause(layer="", name=FEW_SAMPLES, text=f"{samples}; {FEWEST_SAMPLES} to 64 are usual"))
        return found

    # -- layers --------------------------------------------------------------------------------------------------------

    def _noises(self, quantized: QuantizedModel, layers: Sequence[str]) -> dict[str, float]:
        prepared, qparams = quantized.prepared, quantized.qparams
        found = layer_sensitivity(layers, lambda names: prepared.with_only(qparams, names), self._feeds)
        return {each.layer: 10 ** (-each.sqnr / 10) if math.isfinite(each.sqnr) else 0.0 for each in found}

    def _guilty(self) -> list[str]:
        """The layers that have most of the noise, the worst first."""
        self._alone = self._noises(self._quantized, self._quantized.layers)
        total, ranked = sum(self._alone.values()), sorted(self._alone.items(), key=lambda item: -item[1])
        if not total:
            return []
        even = total / len(ranked)
        return [
            name
            for name, noise in ranked[:MOST_GUILTY]
            if noise > HARMLESS and noise > GUILTY_SHARE * ranked[0][1] and (noise > 2 * even or len(ranked) < 3)
        ]

    def _inputs(self, layers: Sequence[str]) -> dict[str, NDArray[np.float64]]:
        """By layer: its input in the float model, a row for each channel."""
        found: dict[str, list[Tensor]] = {}

        def take(key: str, tensor: Tensor) -> None:
            found.setdefault(key, []).append(tensor)

        with self._prepared.compared_models(self._quantized.qparams)[0].watch(inputs=take) as run:
            for batch in self._batches:
                run(batch)
        rows = {}
        for name in layers:
            tensors = found.get(input_key(name))
            if tensors:
                arrays = [tensor.detach().cpu().float().numpy() for tensor in tensors]
                rows[name] = _channels(arrays, last=arrays[0].ndim != 4)
        return rows

    def _cause(self, name: str, rows: NDArray[np.float64] | None) -> Cause:
        """What is wrong with a guilty layer."""
        quantized, freedom = self._quantized, self._prepared.freedom()
        wide = planned(self._plan_of(name), INT16, freedom[name])
        of_input = True
        if wide is not None:
            plan = plan_with(self._prepared.plan, {name: INT16}, freedom)
            of_input = self._noises(quantized.variant(plan), [name])[name] < 0.5 * self._alone[name]
        seen = clipped = self._clipped(name, rows) if rows is not None else None
        if rows is not None and (of_input or clipped is not None):
            seen = self._outlier(rows) or clipped
        elif not of_input:
            seen = self._weight_cause(name)
        if seen is not None:
            return Cause(layer=name, name=seen[0], text=seen[1])
        place = {quantized.layers[0]: FIRST, quantized.layers[-1]: LAST}.get(name, SENSITIVE)
        what = "input" if of_input else "weights"
        share = self._alone[name] / max(1e-30, sum(self._alone.values()))
        return Cause(layer=name, name=place, text=f"{share:.0%} of the noise; most of it comes from its {what}")

    def _clipped(self, name: str, rows: NDArray[np.float64]) -> tuple[str, str] | None:
        """Whether values outside of the range make more noise than the steps inside."""
        qparams = self._quantized.qparams[name].input
        step, offset = qparams.step, qparams.zero_point
        low, high = ((end - offset) * step for end in integer_range(qparams.bits))
        if float(np.mean((rows - rows.clip(low, high)) ** 2)) <= 2 * step**2 / 12:
            return None
        return CLIPPED, f"values go from {rows.min():.3g} to {rows.max():.3g}, the range from {low:.3g} to {high:.3g}"

    @staticmethod
    def _outlier(rows: NDArray[np.float64]) -> tuple[str, str] | None:
        """Whether a channel is much larger than the others."""
        largest = np.abs(rows).max(1)
        usual = float(np.median(largest[largest > 0])) if (largest > 0).any() else 0.0
        if not usual or largest.max() <= _OUTLIER * usual:
            return None
        times = largest.max() / usual
        return OUTLIER_CHANNEL, f"channel {int(largest.argmax())} is {times:.0f} times as large as others"

    def _weight_cause(self, name: str) -> tuple[str, str] | None:
        layer = next(each for each in self._prepared.report_layers(self._quantized.qparams) if each.name == name)
        scale = self._quantized.qparams[name].weight.scale
        if layer.weight_rows and scale.numel() == 1:
            largest = np.sort(
                np.concatenate([rows.abs().flatten(1).amax(1).cpu().numpy() for rows in layer.weight_rows])
            )
            usual = float(np.median(largest))
            if usual and largest[-1] > _UNEVEN_ROWS * usual:
                text = (
                    f"one scale for all outputs, the largest of which is {largest[-1] / usual:.0f} times the usual one"
                )
                return PER_TENSOR, text
        if layer.weight_bits is not None and layer.weight_bits < 8:
            return FEW_BITS, f"its weights have {layer.weight_bits} bits"
        for rows in layer.weight_rows:
            values = rows.abs().flatten(1).double().cpu().numpy()
            peak = values.max(1) / (np.sqrt((values**2).mean(1)) + 1e-30)
            if values.shape[1] > 64 and peak.max() > 0.6 * math.sqrt(values.shape[1]):
                return (
                    OUTLIER_WEIGHT,
                    f"one weight of output {int(peak.argmax())} is {peak.max():.0f} times the usual one",
                )
        return None

    def _plan_of(self, name: str) -> LayerPlan:
        found = self._prepared.plan.find(name)
        assert found is not None
        return found

    # -- remedies ------------------------------------------------------------------------------------------------------

    def _trials(self, guilty: Sequence[str], causes: Sequence[Cause]) -> Iterator[_Trial]:
        """What may help."""
        plan, freedom = self._prepared.plan, self._prepared.freedom()
        names = ", ".join(guilty)
        if any(not each.layer or each.name == CLIPPED for each in causes):
            here = replace(plan, batch_num=len(self._batches))
            yield _Trial(
                name="calibrate with data as the model will see it", cost="a calibration", plan=here, data=True
            )
        if not guilty:
            return
        yield _Trial(name="equalize channels of all layers", cost="nothing on the target", plan=plan, equalize=True)
        wide = plan_with(plan, dict.fromkeys(guilty, INT16), freedom)
        yield _Trial(name=f"16-bit inputs: {names}", cost="slower where 16 bits are", plan=wide)
        weights = sum(freedom[name].values for name in guilty)
        if len(guilty) < len(self._quantized.layers):
            left = plan_with(plan, dict.fromkeys(guilty, FLOAT), freedom)
            yield _Trial(name=f"float: {names}", cost=f"{3 * weights} bytes more", plan=left)
        balanced = _changed(plan, {name: {"migration_strength": 0.5} for name in guilty})
        yield _Trial(name=f"DMQ balancing: {names}", cost="one more pass over the calibration data", plan=balanced)
        own = {name: weight for name in guilty if (weight := self._plan_of(name).weight) is not None}
        if any(weight.num_bits < 8 for weight in own.values()):
            more = _changed(plan, {name: {"weight": replace(weight, num_bits=8)} for name, weight in own.items()})
            yield _Trial(name=f"8-bit weights: {names}", cost=f"{weights // 2} bytes more", plan=more)


def _changed(plan: Plan, layers: Mapping[str, Mapping[str, Any]]) -> Plan:
    """A plan with other settings of some layers."""
    return replace(plan, layers=tuple(replace(each, **layers.get(each.name, {})) for each in plan.layers))


def _channels(arrays: Sequence[NDArray[Any]], *, last: bool = False) -> NDArray[np.float64]:
    """Values with a row for each channel: axis 1, or the last one."""
    rows = []
    for array in arrays:
        axis = array.ndim - 1 if last or array.ndim < 3 else 1
        rows.append(np.moveaxis(array.astype(np.float64), axis, 0).reshape(array.shape[axis], -1))
    return np.concatenate(rows, 1)


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


def _samples(feeds: Sequence[Mapping[str, NDArray[Any]]], name: str) -> int:
    return sum(len(each[name]) for each in feeds)
