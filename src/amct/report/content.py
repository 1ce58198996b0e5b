"""The content of a report as plain data, independent of the framework; ``page`` renders it.

Numbers that were not measured are None. A cosine or SQNR may be infinite or NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.errors import ArgumentError

if TYPE_CHECKING:
    from amct.model.certificate import Certificate, Point
    from amct.model.verdict import Verdict
    from amct.report.network import Network

LARGEST_BARS = 64
SIMULATION = "the simulation"
"""What numbers were measured of that are not those of a written file."""
SQNR_STEPS = (10.0, 20.0, 30.0)
"""The thresholds between the colour classes 0 (worst) to 3."""


def sqnr_class(sqnr: float | None) -> str:
    """Return the CSS class of an SQNR: q0 (below 10 dB) to q3 (30 dB and more), "unmeasured" for None."""
    if sqnr is None:
        return "unmeasured"
    return f"q{sum(sqnr >= step for step in SQNR_STEPS)}"  # NaN is below every threshold


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """A histogram with bars of equal width over ``low``..``high``.

    Attributes:
        low: The lower edge of the first bar.
        high: The upper edge of the last bar.
        counts: The number of values per bar, for at most ``LARGEST_BARS`` bars.
        below: The number of values below ``low``; the range does not include far outliers.
        above: The number of values above ``high``.

    Raises:
        ArgumentError: There are no bars or too many, or ``low`` is not less than ``high``.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    below: int = 0
    above: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.counts) <= LARGEST_BARS:
            raise ArgumentError(f"counts: expected 1..{LARGEST_BARS} bars, got {len(self.counts)}")
        if not self.low < self.high:
            raise ArgumentError(f"a histogram needs low < high, got {self.low:g} and {self.high:g}")


@dataclass(frozen=True, kw_only=True)
class ActivationContent:
    """Statistics of a layer's input, and its clip range.

    Attributes:
        minimum: The smallest value observed.
        maximum: The largest value observed.
        clip_low: The smallest representable value.
        clip_high: The largest representable value.
        clipped: The fraction of values outside the clip range.
        saturated: The fraction of values quantized to the lowest or highest integer. An integer that represents zero is
            not counted, because after a ReLU about half of the values are zero, without any loss.
        histogram: The histogram of the values; None if there were none.
    """

    minimum: float
    maximum: float
    clip_low: float
    clip_high: float
    clipped: float
    saturated: float
    histogram: Histogram | None


@dataclass(frozen=True, kw_only=True)
class WeightRanges:
    """The smallest and the largest weight of each output channel.

    Attributes:
        minimum: The smallest weight of each channel, or of each group of ``channels_each`` adjacent channels.
        maximum: The largest weight of each channel or group.
        channels_each: The number of channels per entry; the last entry may have fewer.

    Raises:
        ArgumentError: ``minimum`` and ``maximum`` differ in length.
    """

    minimum: tuple[float, ...]
    maximum: tuple[float, ...]
    channels_each: int = 1

    def __post_init__(self) -> None:
        if len(self.minimum) != len(self.maximum):
            raise ArgumentError(
                f"weight ranges: expected as many minima as maxima, got {len(self.minimum)} and {len(self.maximum)}"
            )

    def joined(self, limit: int) -> WeightRanges:
        """Return these ranges with at most ``limit`` entries: adjacent channels are merged by minimum and maximum."""
        run = -(-len(self.minimum) // max(limit, 1))
        if run <= 1:
            return self
        starts = range(0, len(self.minimum), run)
        return WeightRanges(
            minimum=tuple(min(self.minimum[start : start + run]) for start in starts),
            maximum=tuple(max(self.maximum[start : start + run]) for start in starts),
            channels_each=self.channels_each * run,
        )


@dataclass(frozen=True, kw_only=True)
class InputContent:
    """One quantized input of a layer: its bits, scale and offset, and its statistics."""

    bits: int
    scale: float | None = None
    offset: int | None = None
    activation: ActivationContent | None = None


@dataclass(frozen=True, kw_only=True)
class LayerContent:
    """One quantized layer.

    Attributes:
        name: The layer's name in the model.
        type: Its type name.
        inputs: Its quantized inputs, at least one.
        weight_bits: The bits of its weights; None for a layer without weights.
        sqnr: The signal-to-quantization-noise ratio of its output in dB.
        alone: That of the model's outputs when only this layer is quantized.
        cosine: The cosine similarity of its outputs in the float and in the quantized model.
        weights: Its weight ranges.
    """

    name: str
    type: str
    inputs: tuple[InputContent, ...]
    weight_bits: int | None = None
    sqnr: float | None = None
    alone: float | None = None
    cosine: float | None = None
    weights: WeightRanges | None = None

    @property
    def clipped(self) -> float | None:
        """The largest clipped fraction of all inputs; None if not measured."""
        return max((seen.clipped for seen in self._seen()), default=None)

    @property
    def saturated(self) -> float | None:
        """The largest saturated fraction of all inputs; None if not measured."""
        return max((seen.saturated for seen in self._seen()), default=None)

    def _seen(self) -> list[ActivationContent]:
        return [each.activation for each in self.inputs if each.activation is not None]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of the summary, as text: for the float model (``before``), the quantized one (``after``), or both.

    ``change`` is what became of the number, such as "−0.17".
    """

    label: str
    before: str | None = None
    after: str | None = None
    change: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerNote:
    """A note on a layer: the layer it was folded into, or the reason why it is not quantized."""

    layer: str
    text: str


@dataclass(frozen=True, kw_only=True)
class PrunedLayer:
    """A layer that makes channels: their number before and after pruning, or its rank."""

    layer: str
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class FileSize:
    """A file that belongs to the report, with its size in bytes and what was measured when it was checked."""

    name: str
    size: int
    check: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainedClips:
    """The clips of a layer's input before training, where they were known, and after."""

    layer: str
    before: tuple[float, float] | None
    after: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class TrainingContent:
    """What quantization-aware training did.

    Attributes:
        before: What the metric before is that of.
        losses: Of its steps or epochs.
        clips: Where they moved.
    """

    before: str = ""
    losses: tuple[float, ...] = ()
    clips: tuple[TrainedClips, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReportContent:
    """Everything a report shows.

    Attributes:
        model: The model's name.
        measured_on: A description of the data, such as "8 batches".
        outputs_of: What the outputs and the metric were measured of: the name of a written file, or "the simulation".
        layers_of: The same for the layers.
        verdict: The judgement; None if nothing was measured that a model can be judged by.
        proposals: What would help.
        network: The network as a graph; None if it is not known.
        figures: The summary.
        files: The files of the model with their sizes.
        layers: The quantized layers, in execution order.
        fused: The folded layers, each with the layer it was folded into.
        skipped: The layers that are not quantized, or not pruned, each with the reason.
        pruned: The layers of a pruned model.
        counted: What is counted of them, such as channels.
        kind: What the page is called.
        config: The config used, as text.
        versions: Names and versions of the programs used.
        created: The time of creation, as text.
        training: What quantization-aware training did; None without training.
        certificate: What a search for settings has reached; None without one.
        curve: What it has tried, the cheapest first.
    """

    model: str
    measured_on: str
    outputs_of: str = SIMULATION
    layers_of: str = SIMULATION
    verdict: Verdict | None = None
    proposals: tuple[str, ...] = ()
    network: Network | None = None
    figures: tuple[Figure, ...] = ()
    files: tuple[FileSize, ...] = ()
    layers: tuple[LayerContent, ...] = ()
    fused: tuple[LayerNote, ...] = ()
    skipped: tuple[LayerNote, ...] = ()
    pruned: tuple[PrunedLayer, ...] = ()
    counted: str = "channels"
    kind: str = "Quantization report"
    config: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    created: str = ""
    training: TrainingContent | None = None
    certificate: Certificate | None = None
    curve: tuple[Point, ...] = ()
