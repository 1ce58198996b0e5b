"""Writes the files of one save as one group: each is checked before it gets its name, ``quant.json`` is the last."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from amct.atomic import FileGroup
from amct.errors import ExportError
from amct.export.check.checking import FileToCheck, OnnxCheck
from amct.export.deploy import fake_quant_model
from amct.export.formats import ExportedFiles, ExportedModel, ExportRequest, add_exported, export, warn_of_replaced
from amct.export.onnx.float_weights import large_float_weights, not_said
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.onnx.layer_lookup import bindings_by_name
from amct.export.onnx.messages import with_batch_size
from amct.export.request import RECORD
from amct.memory import give_back_freed
from amct.model.quant_json import (
    VERSION,
    FileEntry,
    LayerEntry,
    LayerInFile,
    QuantJson,
    verdict_of_files,
    write_quant_json,
)
from amct.record import AnyRecord, encode_record
from amct.record.conversion import tensor_qparams_path, tensor_qparams_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from onnx import ModelProto

    from amct.export.check.losses import Reference
    from amct.export.formats import Exported, ExportReport, LayerReport
    from amct.export.onnx.float_weights import LargeFloatWeight
    from amct.export.request import SaveRequest
    from amct.model import Skip
    from amct.model.quant_json import FileCheck
    from amct.model.verdict import Verdict
    from amct.numerics.qparams import LayerQParams, Observed

logger = logging.getLogger(__name__)

ADVICE = (
    ". The layers to blame: quantized.sensitivity() or amct sensitivity; what helps against which cause: "
    "docs/my-accuracy-dropped.md"
)


TRAINED_ADVICE = (
    ". Training has changed what the model computes; whether for the better, only a metric tells: "
    "report(path, data, metric)"
)


class ModelFiles(Protocol):
    """What a front door gives to a save: its model in each format."""

    @property
    def request(self) -> SaveRequest:
        """What is asked for; the formats in the order of writing."""

    def export(self, name: str) -> Exported | ExportError:
        """The model in one format, or why it has no such form where the others can be written without it.

        Raises:
            ExportError: the model cannot be exported.
        """

    def check(self, file: FileToCheck) -> tuple[FileCheck | None, ExportedModel | None]:
        """Run a written file; returns what was measured, and the content if the file must be written again.

        Raises:
            ExportError: the file cannot be used.
        """

    def document(self, reports: Mapping[str, ExportReport]) -> QuantJson:
        """The content of ``quant.json`` but for the files; ``reports`` has what was exported by format."""


class Saved(NamedTuple):
    """What a save wrote, and the judgement of its worst file; None if no file could be compared."""

    paths: list[Path]
    verdict: Verdict | None = None


def save_files(files: ModelFiles) -> Saved:
    """Write all files of one save as one group.

    After an error nothing has changed; after a kill all are old, all are new, or a notice marks them as mixed, and
    readers refuse them. Each format is made, written and checked before the next one is made, so that one is in memory
    at a time.

    Raises:
        ExportError: a model cannot be exported, or a written file cannot be used; nothing was saved.
        FileError: a file cannot be written; none was.
    """
    request = files.request
    saved: list[FileToCheck] = []
    checks: dict[str, FileCheck | None] = {}
    not_written: dict[str, str] = {}
    verdict, proposals = None, tuple[str, ...]()
    left_float: dict[str, LargeFloatWeight] = {}
    with FileGroup() as group:
        for name in request.formats:
            exported = files.export(name)
            left_float.update(_left_float(name, exported))
            file = _written(group, request, name, exported)
            del exported
            if isinstance(file, str):
                not_written[name] = file
                continue
            give_back_freed()
            checks[name], repaired = files.check(file)
            if repaired is not None:
                left_float.update(_left_float(name, repaired))
                group.remove(file.target)
                add_exported(group, request.where, name, repaired)
                file, repaired = replace(file, report=repaired.report), None
            saved.append(file)
        if request.models:
            document = files.document({file.format: file.report for file in saved})
            verdict = verdict_of_files({file.target.name: checks[file.format] for file in saved})
            said = [*document.skipped, *(skip for file in saved for skip in file.report.skipped)]
            document = replace(
                document,
                skipped=(*document.skipped, *not_said(left_float.values(), said)),
                files={file.target.name: _file_entry(file, checks[file.format]) for file in saved},
                not_written={**not_written, **document.not_written},
                related=request.related(),
                calibration=request.calibration,
                verdict=verdict,
            )
            proposals = document.proposals
            write_quant_json(group, request.where.quant_json, document)
        warn_of_replaced(group.written())
    written = [path for file in saved for path in (file.target, *map(file.target.with_name, file.beside))]
    if request.models:
        written.append(request.where.quant_json)
    logger.info("wrote %s", ", ".join(map(str, written)))
    if verdict is not None:
        bad = verdict.is_at_best("poor")
        trained = any(check is not None and check.handed_in_sqnr is not None for check in checks.values())
        advice = TRAINED_ADVICE if trained else ADVICE
        logger.log(logging.WARNING if bad else logging.INFO, "verdict %s%s", verdict, advice if bad else "")
    for proposal in proposals:
        logger.info("would help: %s", proposal)
    return Saved(written, verdict)


def _left_float(name: str, exported: Exported | ExportError) -> dict[str, LargeFloatWeight]:
    """The large weights of a model that are float as it will be written; those of a simulation are so on purpose."""
    if name == "fake_quant" or not isinstance(exported, ExportedModel):
        return {}
    return {weight.name: weight for weight in large_float_weights(exported.model)}


def _written(group: FileGroup, request: SaveRequest, name: str, exported: Exported | ExportError) -> FileToCheck | str:
    """Write what was exported in one format; returns the file, or why there is none."""
    if isinstance(exported, ExportError):
        logger.warning("no %s file is written: %s", "QDQ" if name == "qdq" else name, exported)
        return str(exported)
    target, *beside = add_exported(group, request.where, name, exported)
    return FileToCheck(
        format=name,
        path=group.temporary(target),
        target=target,
        report=exported.report,
        beside={path.name: group.temporary(path) for path in beside},
        is_model=isinstance(exported, ExportedModel),
    )


def _file_entry(file: FileToCheck, check: FileCheck | None) -> FileEntry:
    """The quant.json entry of the file of a format; a record and the first of several files are listed by suffix."""
    by_suffix = file.format == RECORD or (file.beside and not file.is_model)
    report = file.report
    return FileEntry(
        format=file.target.suffix.lstrip(".") if by_suffix else file.format,
        tensors=report.tensors,
        rescaled=report.rescaled,
        skipped=report.skipped,
        notes=report.notes,
        check=check,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class OnnxFiles:
    """The files of a model that has one float ONNX form for all formats.

    Attributes:
        request: What is asked for.
        model: The float ONNX model, whose nodes have the names of their layers; None if only the record is saved.
        layers: The parameters of its layers.
        record: The same as a record, if it is saved.
        tensors: Factors of the tensors between layers; None if nothing was observed.
        reference: The batch on which the written files are run; None: they are not.
        calls: How often each layer is computed, if more than once.
        folded: By layer: the layers of the original model that were folded into it.
        skipped: What stays float, with the reason.
        config: The config used, as readable text.
        beside_record: Further files that are written with the record: content by file name behind the prefix.
    """

    request: SaveRequest
    model: ModelProto | None
    layers: Mapping[str, LayerQParams]
    record: AnyRecord | None = None
    tensors: Mapping[str, Observed] | None = None
    reference: Reference | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    folded: Mapping[str, Sequence[str]] = field(default_factory=dict)
    skipped: Sequence[Skip] = ()
    config: str = ""
    beside_record: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def _quantized(self) -> ExportRequest:
        assert self.model is not None
        size = self.request.batch_size
        model = self.model if size is None else with_batch_size(self.model, size)
        return ExportRequest(
            model=model,
            bindings=bindings_by_name(model, self.layers, self.calls),
            qparams=self.layers,
            tensors=self.tensors,
            options=self.request.options,
        )

    @cached_property
    def _check(self) -> OnnxCheck | None:
        if self.reference is None:
            return None
        return OnnxCheck(
            reference=self.reference,
            original=self._quantized.model,
            simulate=self._simulation,
            export_qdq=self._qdq_without if self.tensors and not self.request.is_judged else None,
            tensors=self.tensors,
        )

    def _simulation(self) -> ExportedModel:
        quantized = self._quantized
        return fake_quant_model(quantized.model, quantized.bindings, quantized.qparams, kept=KeptWeights())

    def _qdq_without(self, tensors: Collection[str]) -> ExportedModel:
        options = self.request.options.without(tensors)
        exported = export("qdq", replace(self._quantized, options=options), keep_weights=True)
        assert isinstance(exported, ExportedModel)
        return exported

    def export(self, name: str) -> Exported:
        """The model in one format, or the record with the parameters of the tensors between layers."""
        return self._record_files() if name == RECORD else export(name, self._quantized, keep_weights=True)

    def _record_files(self) -> ExportedFiles:
        files = {name: [content] for name, content in self.beside_record.items()}
        if self.record is not None:
            files["record.txt"] = [encode_record(self.record, "text")]
        if self.tensors is not None:
            files[str(tensor_qparams_path("record.txt"))] = [tensor_qparams_text(self.tensors).encode()]
        return ExportedFiles(files=files)

    def check(self, file: FileToCheck) -> tuple[FileCheck | None, ExportedModel | None]:
        """Run a written file, if it is a model."""
        return (None, None) if self._check is None or not file.is_model else self._check.check(file)

    def document(self, reports: Mapping[str, ExportReport]) -> QuantJson:
        """The layers with their nodes in each file."""
        assert self.model is not None
        return QuantJson(
            version=VERSION,
            model=self.model.graph.name,
            layers=layer_entries(reports, self.folded),
            skipped=tuple(self.skipped),
            files={},
            config=self.config,
        )


def layer_entries(reports: Mapping[str, ExportReport], folded: Mapping[str, Sequence[str]]) -> dict[str, LayerEntry]:
    """The quant.json entries of the layers that exporters report; ``folded`` as in ``OnnxFiles``."""
    layers: dict[str, LayerEntry] = {}
    for format_name, result in reports.items():
        for report in result.layers:
            before = layers.get(report.layer) or _layer_entry(report, folded.get(report.layer, ()))
            layers[report.layer] = _with_node(before, format_name, report)
    return layers


def _layer_entry(report: LayerReport, folded: Sequence[str]) -> LayerEntry:
    return LayerEntry(
        type=report.type,
        kind=report.kind,
        quantized=True,
        original_layers=(report.layer, *folded),
        output=(report.output,),
        data_bits=(report.activation_bits,),
        weight_bits=report.weight_bits,
    )


def _with_node(entry: LayerEntry, format_name: str, report: LayerReport) -> LayerEntry:
    """The entry with one node in one file; of several nodes of a layer the first is named."""
    first = entry.files.get(format_name)
    here = LayerInFile(
        node=report.node if first is None else first.node,
        operator=report.operator,
        weight_bits=report.weight_bits,
        inserted=report.inserted if first is None else (*first.inserted, *report.inserted),
    )
    further = (report.output,) if first is not None and report.output not in entry.output else ()
    return replace(entry, output=(*entry.output, *further), files={**entry.files, format_name: here})
