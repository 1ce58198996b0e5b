"""What a report shows, as plain data: any front door fills it, ``page`` draws it.

Numbers that were not measured are None. A cosine or SQNR may be infinite or NaN: the page says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from amct.errors import ArgumentError

LARGEST_BARS = 64


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How often values occurred, in bars of equal width over ``low``..``high``.

    Attributes:
        low: Where the first bar begins.
        high: Where the last bar ends.
        counts: One number per bar, at most ``LARGEST_BARS``.
        below: Values left of the first bar (far outliers, which would squeeze everything else into one bar).
        above: Values right of the last bar.

    Raises:
        ArgumentError: no bars, too many, or a range that is not one.
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
    """A layer's input: what was seen, and what its grid can hold.

    Attributes:
        minimum: The smallest value seen.
        maximum: The largest value seen.
        clip_low: The smallest value that the integers can stand for.
        clip_high: The largest.
        clipped: Share of values beyond the integers, which become the outermost one.
        saturated: Share of values that are on an outermost integer, clipped or not; the integer that stands for zero is
            not counted, because a ReLU before the layer puts half of all values there, without loss.
        histogram: The values; None when there were none.
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
    """Smallest and largest weight of each output channel.

    Attributes:
        minimum: One per channel, or per run of ``channels_each`` neighbours where there are too many to draw.
        maximum: As many.
        channels_each: How many channels an entry stands for; the last one may stand for fewer.

    Raises:
        ArgumentError: not as many minima as maxima.
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
        """At most ``limit`` entries: neighbours are joined, so that no extreme is lost."""
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
    """A quantized input of a layer: its grid, and what was seen of it; a sum has several."""

    bits: int
    scale: float | None = None
    offset: int | None = None
    activation: ActivationContent | None = None


@dataclass(frozen=True, kw_only=True)
class LayerContent:
    """One quantized layer.

    Attributes:
        name: As the model calls it.
        type: Its type name.
        inputs: Its quantized inputs, at least one.
        weight_bits: Bits of its weights; None for a layer without weights.
        sqnr: Signal-to-quantization-noise ratio of its output in dB.
        cosine: Between its output in the float and in the quantized model.
        weights: Its weight ranges.
    """

    name: str
    type: str
    inputs: tuple[InputContent, ...]
    weight_bits: int | None = None
    sqnr: float | None = None
    cosine: float | None = None
    weights: WeightRanges | None = None

    @property
    def clipped(self) -> float | None:
        """The clipped share of the input that lost most; None when nothing was measured."""
        return max((seen.clipped for seen in self._seen()), default=None)

    @property
    def saturated(self) -> float | None:
        """The saturated share of the input that has most."""
        return max((seen.saturated for seen in self._seen()), default=None)

    def _seen(self) -> list[ActivationContent]:
        return [each.activation for each in self.inputs if each.activation is not None]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of the summary, as text: of the float model, of the quantized model, or of both."""

    label: str
    before: str | None = None
    after: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerNote:
    """A note on a layer: what it was folded into, or why it stays float."""

    layer: str
    text: str


@dataclass(frozen=True, kw_only=True)
class FileSize:
    """A file that belongs to the report, with its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class ReportContent:
    """Everything a report shows.

    Attributes:
        model: The model's name.
        measured_on: What the numbers were measured on, such as "8 batches".
        figures: The summary.
        files: Files and their sizes.
        layers: The quantized layers, in execution order.
        fused: What was folded, each with the layer that it was folded into.
        skipped: What stays float, and why.
        config: The config used, as text.
        versions: Program names and versions.
        created: When, as text.
    """

    model: str
    measured_on: str
    figures: tuple[Figure, ...] = ()
    files: tuple[FileSize, ...] = ()
    layers: tuple[LayerContent, ...] = ()
    fused: tuple[LayerNote, ...] = ()
    skipped: tuple[LayerNote, ...] = ()
    config: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    created: str = ""
