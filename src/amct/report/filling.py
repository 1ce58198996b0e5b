"""Makes the content of a report from a quantized model and its measurements."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amct import __version__
from amct.errors import FileError
from amct.model.quant_json import QUANT_JSON, add_measurement, add_related, read_quant_json
from amct.printable import counted
from amct.report.activations import InputStatistics
from amct.report.content import (
    SIMULATION,
    Figure,
    FileSize,
    InputContent,
    LayerContent,
    LayerNote,
    ReportContent,
    WeightRanges,
)
from amct.report.measuring import OUTPUT
from amct.report.page import shown_bytes, write_page

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from amct.model import Skip
    from amct.model.certificate import Certificate, Point
    from amct.model.quant_json import FileCheck
    from amct.model.verdict import Verdict
    from amct.numerics.qparams import QParams
    from amct.numerics.similarity import BoxComparison, LayerComparison
    from amct.report.measuring import Measured
    from amct.report.network import Network

OUTPUTS_SHOWN = 4
"""The worst outputs have figures of their own; the others are counted."""
_PERCENT_NAMES = ("accuracy", "top1", "top-1", "top5", "top-5", "precision", "recall", "iou", "f1")


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportLayer:
    """One quantized layer, without measurements.

    Attributes:
        name: The layer's name in the model.
        type: Its type name.
        inputs: The quantization parameters of its inputs.
        weight_bits: The bits of its weights; None for a layer without weights.
        weight_rows: Its float weights as matrices with one row per output channel.
        weight_bytes: The size of its weights in bytes, as floats and as stored integers.
    """

    name: str
    type: str
    inputs: tuple[QParams, ...]
    weight_bits: int | None
    weight_rows: Sequence[Tensor] = ()
    weight_bytes: tuple[float, float] = (0, 0)

    def content(self, measured: Measured, alone: float | None = None) -> LayerContent:
        """Return the report content of the layer, with its measurements; ``alone`` as in ``LayerContent``."""
        compared = measured.layers.get(self.name)
        inputs = (
            InputContent(
                bits=each.bits,
                scale=each.step,
                offset=each.zero_point,
                activation=measured.inputs.get(input_key(self.name, index)),
            )
            for index, each in enumerate(self.inputs)
        )
        return LayerContent(
            name=self.name,
            type=self.type,
            inputs=tuple(inputs),
            weight_bits=self.weight_bits,
            sqnr=compared.sqnr if compared is not None else None,
            alone=alone,
            cosine=compared.cosine if compared is not None else None,
            weights=weight_ranges(self.weight_rows),
        )


def input_key(layer: str, index: int = 0) -> str:
    """Return the key of one input of a layer in ``Measured.inputs``."""
    return f"{layer}:{index}"


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportSubject:
    """The quantized model of a report, without measurements.

    Attributes:
        model: The model's name.
        layers: The quantized layers, in execution order.
        fused: The folded layers, each with the layer it was folded into.
        skipped: The layers that are not quantized, each with the reason.
        config: The config used, as text.
        network: The network as a graph; None if it is not known.
        proposals: What would help.
        certificate: What a search for settings has reached; None without one.
        curve: As ``ReportContent.curve``.
        alone: By layer: the SQNR of the model's outputs when only this layer is quantized, where that is known.
    """

    model: str
    layers: tuple[ReportLayer, ...]
    fused: tuple[LayerNote, ...] = ()
    skipped: tuple[Skip, ...] = ()
    config: str = ""
    network: Network | None = None
    proposals: tuple[str, ...] = ()
    certificate: Certificate | None = None
    curve: tuple[Point, ...] = ()
    alone: Mapping[str, float] = field(default_factory=dict)

    def statistics(self) -> dict[str, InputStatistics]:
        """Return a new ``InputStatistics`` for each quantized input, by its ``input_key``."""
        return {
            input_key(layer.name, index): InputStatistics(each)
            for layer in self.layers
            for index, each in enumerate(layer.inputs)
        }


def folded_notes(folded: Mapping[str, Sequence[str]]) -> tuple[LayerNote, ...]:
    """Return a note for each folded layer; ``folded`` maps each layer to the layers folded into it."""
    return tuple(
        LayerNote(layer=name, text=f'folded into "{layer}"') for layer, names in folded.items() for name in names
    )


def report_content(
    subject: ReportSubject,
    measured: Measured,
    *,
    files: Iterable[str | os.PathLike[str]] = (),
    measured_on: str | None = None,
    outputs_of: str = SIMULATION,
    layers_of: str = SIMULATION,
) -> ReportContent:
    """Return the complete content of a report.

    Args:
        subject: The quantized model.
        measured: The measurements.
        files: Files whose sizes are listed.
        measured_on: A description of the data; None: the number of batches.
        outputs_of: What the outputs and the metric were measured of: the name of a written file, or the simulation.
        layers_of: The same for the layers.

    Raises:
        FileError: One of the files cannot be read.
    """
    before, after = (sum(layer.weight_bytes[index] for layer in subject.layers) for index in (0, 1))
    batches = f"{measured.batches} batch{'es' if measured.batches > 1 else ''}"
    layers = tuple(layer.content(measured, subject.alone.get(layer.name)) for layer in subject.layers)
    return ReportContent(
        model=subject.model,
        measured_on=measured_on or batches,
        outputs_of=outputs_of,
        layers_of=layers_of,
        verdict=measured.verdict(outputs_of),
        proposals=subject.proposals,
        certificate=subject.certificate,
        curve=subject.curve,
        network=subject.network,
        figures=tuple(_figures(measured, (before, after))),
        files=file_sizes([Path(file) for file in files]),
        layers=layers,
        fused=subject.fused,
        skipped=tuple(LayerNote(layer=skip.layer, text=skip.reason) for skip in subject.skipped),
        config=subject.config,
        versions=program_versions(),
        created=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def file_sizes(paths: Sequence[Path]) -> tuple[FileSize, ...]:
    """The files with their sizes, and the numbers that a quant.json among them has of their check."""
    documents = [read_quant_json(path) for path in paths if path.name.endswith(QUANT_JSON) and path.is_file()]
    checks = {name: entry.check for document in documents for name, entry in document.files.items()}
    return tuple(_file_size(path, checks.get(path.name)) for path in paths)


def _file_size(path: Path, check: FileCheck | None) -> FileSize:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise FileError(f'files: "{path}" cannot be read: {error.strerror}') from error
    return FileSize(name=path.name, size=size, check=check.text() if check is not None else "")


def _figures(measured: Measured, weight_bytes: tuple[float, float]) -> Iterator[Figure]:
    """Yield the summary: the metric, the similarity of the outputs, and the size of the weights before and after."""
    if measured.metric is not None:
        yield metric_figure(measured.metric_name, *measured.metric)
    yield from output_figures(measured.outputs)
    yield from box_figures(measured.boxes)
    before, after = weight_bytes
    if before:
        yield Figure(
            label="weights of the quantized layers", before=shown_bytes(int(before)), after=shown_bytes(int(after))
        )


def output_figures(outputs: Sequence[LayerComparison]) -> Iterator[Figure]:
    """Yield the similarity of the worst outputs, and how many others there are."""
    worst = sorted(outputs, key=lambda output: -math.inf if math.isnan(output.sqnr) else output.sqnr)
    others = worst[OUTPUTS_SHOWN:]
    for output in (each for each in outputs if each not in others):
        alone = len(outputs) == 1 or output.layer == OUTPUT
        cosine, sqnr = f"{output.cosine:.5f}", f"{output.sqnr:.1f} dB"
        yield Figure(label="cosine of both outputs" if alone else f"cosine of {output.layer}", after=cosine)
        yield Figure(label="SQNR of the output" if alone else f"SQNR of {output.layer}", after=sqnr)
    if others:
        yield Figure(label=f"SQNR of {counted(len(others), 'more output')}", after=f"from {others[0].sqnr:.1f} dB")


def box_figures(boxes: Iterable[BoxComparison]) -> Iterator[Figure]:
    """Yield what became of the boxes of a detector."""
    for found in boxes:
        more = f", and {found.more} more" if found.more else ""
        yield Figure(label=f"boxes found again in {found.output}", after=f"{found.found} of {found.boxes}{more}")
        if found.found:
            yield Figure(label="mean IoU of these boxes", after=f"{found.mean_iou:.3f}")
            yield Figure(label="their scores differ by", after=f"{found.score_difference:.3f}")


def metric_figure(name: str, before: float, after: float) -> Figure:
    """Return a metric before and after with its change; accuracies are shown in percent.

    >>> metric_figure("top1 accuracy", 0.9916, 0.9899)
    Figure(label='top1 accuracy', before='99.16 %', after='98.99 %', change='−0.17')
    """
    if any(word in name.lower() for word in _PERCENT_NAMES):
        factor = 100.0 if max(abs(before), abs(after)) <= 1 else 1.0
        before, after = factor * before, factor * after
        shown = [f"{value:.2f} %" for value in (before, after)]
        change = f"{round(after, 2) - round(before, 2):+.2f}"
    else:
        shown = [f"{value:.4g}" for value in (before, after)]
        change = f"{after - before:+.2g}"
    return Figure(label=name, before=shown[0], after=shown[1], change=change.replace("-", "−"))


def weight_ranges(parts: Iterable[Tensor]) -> WeightRanges | None:
    """Return the weight ranges of matrices with one row per output channel, concatenated; None without matrices."""
    minima: list[float] = []
    maxima: list[float] = []
    for rows in parts:
        minimum, maximum = torch.aminmax(rows.float(), dim=1)
        minima += minimum.tolist()
        maxima += maximum.tolist()
    return WeightRanges(minimum=tuple(minima), maximum=tuple(maxima)) if minima else None


def program_versions() -> tuple[tuple[str, str], ...]:
    """Return the names and versions of the programs used."""
    others = ("onnx", "onnxruntime", "numpy")
    return (
        ("amct", __version__),
        ("torch", torch.__version__),
        *((name, metadata.version(name)) for name in others),
        ("Python", platform.python_version()),
    )


# -- beside the files of a save ----------------------------------------------------------------------------------------


def write_report(page: Path, content: ReportContent, listed: Iterable[Path]) -> None:
    """Write the page; a quant.json among the files refers to it."""
    write_page(page, content)
    for file in listed:
        if file.name.endswith(QUANT_JSON):
            add_related(file, "report", page)


def note_measurement(measured: Measured, of: str, verdict: Verdict | None, listed: Iterable[Path]) -> None:
    """Put what was measured, and its judgement if it is the latest, into a quant.json among the files."""
    for file in listed:
        if file.name.endswith(QUANT_JSON):
            add_measurement(file, measured.as_measurement(of), verdict)
