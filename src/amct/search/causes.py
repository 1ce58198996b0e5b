"""The causes that the doctor knows, as seen in numbers: of calibration data, of a layer's input and of its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.export.onnx.graph import OnnxGraph
from amct.model.kinds import KIND_OF_OPERATOR
from amct.numerics.affine import integer_range

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.numerics.qparams import QParams
    from amct.report.filling import ReportLayer

OUTLIER_CHANNEL, RESIDUAL, CLIPPED = "outlier channel", "residual stream", "clipped range"
PER_TENSOR, FEW_BITS, OUTLIER_WEIGHT = "per-tensor weights", "few bits", "outlier weight"
FEW_SAMPLES, OTHER_SCALE = "too few calibration samples", "odd calibration samples"
WRONG_MEAN, CHANNEL_ORDER = "wrong mean", "channel order"
FIRST, LAST, SENSITIVE = "sensitive first layer", "sensitive last layer", "sensitive layer"
FEWEST_SAMPLES = 8
_FEW_VALUES = 64
"""With fewer values of a channel its mean and deviation say little: then the channels are judged together."""
_OUTLIER = 4.0
"""How many times larger than the median channel an outlier channel is: 12 dB that the others lose."""
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


def data_cause(ours: NDArray[np.float64], theirs: NDArray[np.float64], samples: int) -> Cause | None:
    """What the calibration data has that the data has not, channel by channel.

    Args:
        ours: The data as the model will see it, a row for each channel.
        theirs: That of the calibration.
        samples: How many samples calibrated.
    """
    deviation = ours.std(1) + 1e-9
    shift = np.abs(ours.mean(1) - theirs.mean(1)) / deviation
    swapped = np.abs(ours.mean(1) - theirs.mean(1)[::-1]) / deviation
    ratio = (theirs.std(1) + 1e-9) / deviation
    count = theirs.shape[1]
    if count < _FEW_VALUES:  # what is left when the error of so small a sample is taken away
        spread = (theirs.std(1, ddof=1) / deviation) ** 2 if count > 1 else np.ones(1)
        ratio = np.sqrt(np.mean(spread, keepdims=True)) + 1e-9
        shift = np.sqrt(np.clip(np.mean(shift**2, keepdims=True) - 1 / count, 0, None))
    worst = max(ratio.max(), ratio.min(), key=lambda each: abs(math.log(each)))
    if len(ours) == 3 and shift.max() > _SHIFT / 3 and swapped.max() < shift.max() / 3:
        text = "the channels of the calibration data have the means of the data's in reverse order"
        return Cause(layer="", name=CHANNEL_ORDER, text=text)
    if max(worst, 1 / worst) > _RATIO:
        text = f"its deviation is {worst:.3g} times that of the data: another scale, or no usual samples"
        return Cause(layer="", name=OTHER_SCALE, text=text)
    if shift.max() > _SHIFT:
        text = f"its mean is {shift.max():.2g} deviations away from that of the data"
        return Cause(layer="", name=WRONG_MEAN, text=text)
    return few_samples(samples)


def wide_range(largest: float, qparams: QParams) -> Cause | None:
    """What the range that calibration found for the model's input says of its samples: a broken one widens it.

    Args:
        largest: The largest value of the data as the model will see it.
        qparams: Of the first layer's input.
    """
    ends = [abs(end - qparams.zero_point) * qparams.step for end in integer_range(qparams.bits)]
    if not largest or max(ends) <= _RATIO * largest:
        return None
    text = f"a range up to {max(ends):.3g} was found for values up to {largest:.3g}: some sample is not as usual"
    return Cause(layer="", name=OTHER_SCALE, text=text)


def few_samples(samples: int) -> Cause | None:
    """Whether so few samples calibrated that their ranges are chance."""
    if samples >= FEWEST_SAMPLES:
        return None
    return Cause(layer="", name=FEW_SAMPLES, text=f"{samples}; {FEWEST_SAMPLES} to 64 are usual")


def outlier(largest: NDArray[np.float64]) -> tuple[int, float] | None:
    """The channel that is much larger than the others, by its largest value, and how many times."""
    usual = float(np.median(largest[largest > 0])) if (largest > 0).any() else 0.0
    if not usual or largest.max() <= _OUTLIER * usual:
        return None
    return int(largest.argmax()), float(largest.max()) / usual


def stream_outliers(largest: Mapping[str, NDArray[np.float64]], in_stream: Collection[str]) -> dict[str, int]:
    """By layer: the outlier channel of the residual stream that it reads, where another layer reads it too.

    Args:
        largest: By layer, in the order of the model: the largest value of each channel of its input.
        in_stream: The layers whose input comes from a sum.
    """
    found = {name: (each.size, seen[0]) for name, each in largest.items() if (seen := outlier(each)) is not None}
    streams = {found[name] for name in in_stream if name in found}
    readers = {place: [name for name, own in found.items() if own == place] for place in streams}
    return {name: place[1] for place, names in readers.items() if len(names) > 1 for name in names}


def readers_of_sums(model: ModelProto, layers: Sequence[str]) -> list[str]:
    """The layers whose input comes from a sum of two tensors that are computed, with no layer in between.

    Args:
        model: The float model, whose nodes have the names of their layers.
        layers: The layers.
    """
    graph = OnnxGraph(model)
    nodes = {node.name: node for node in graph.nodes}
    found = []
    for name in layers:
        waiting = [nodes[name].input[0]] if name in nodes else []
        seen: set[str] = set()
        while waiting:
            tensor = waiting.pop()
            node = graph.producer(tensor)
            if node is None or tensor in seen:
                continue
            seen.add(tensor)
            computed = [each for each in node.input if each and not graph.is_constant(each)]
            if node.op_type in ("Add", "Sum") and len(computed) > 1:
                found.append(name)
                break
            if node.op_type == "AveragePool" or node.op_type not in KIND_OF_OPERATOR:
                waiting += computed
    return found


def weight_cause(layer: ReportLayer, *, one_scale: bool) -> tuple[str, str] | None:
    """What is wrong with the weights of a layer, and in words what was seen."""
    for rows in layer.weight_rows:
        values = rows.abs().flatten(1).double().cpu().numpy()
        peak = values.max(1) / (np.sqrt((values**2).mean(1)) + 1e-30)
        if values.shape[1] >= 64 and peak.max() > 0.6 * math.sqrt(values.shape[1]):
            text = f"one weight of output {int(peak.argmax())} is {peak.max():.0f} times the usual one"
            return OUTLIER_WEIGHT, text
    if layer.weight_rows and one_scale:
        largest = np.sort(np.concatenate([rows.abs().flatten(1).amax(1).cpu().numpy() for rows in layer.weight_rows]))
        usual = float(np.median(largest))
        if usual and largest[-1] > _UNEVEN_ROWS * usual:
            times = largest[-1] / usual
            return PER_TENSOR, f"one scale for all outputs, the largest of which is {times:.0f} times the usual one"
    if layer.weight_bits is not None and layer.weight_bits < 8:
        return FEW_BITS, f"its weights have {layer.weight_bits} bits"
    return None


def channels(arrays: Sequence[NDArray[Any]], *, last: bool = False) -> NDArray[np.float64]:
    """Values with a row for each channel: axis 1, or the last one."""
    rows = []
    for array in arrays:
        axis = array.ndim - 1 if last or array.ndim < 3 else 1
        rows.append(np.moveaxis(array.astype(np.float64), axis, 0).reshape(array.shape[axis], -1))
    return np.concatenate(rows, 1)
