"""Writes the files of one save path from the float ONNX model, the record and the tensor factors."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from amct import atomic
from amct.export.binding import LayerFactors, bindings_by_name
from amct.export.check.checking import OnnxCheck, Subject, WrittenFile
from amct.export.exported import ExportedModel, ExportReport
from amct.export.fake_quant import fake_quant_model
from amct.export.formats import RECORD, check_formats, export_formats, file_name
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.options import ExportOptions
from amct.export.qdq.tensor_factors import tensor_factors_path, tensor_factors_text
from amct.export.save_path import SavePath
from amct.export.writer import add_model, check_opset, save_models
from amct.memory import give_back_freed
from amct.model import Skip
from amct.model.quant_json import VERSION, FileEntry, LayerEntry, LayerInFile, QuantJson, RelatedFile, related_file
from amct.record import encode_record

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from onnx import ModelProto

    from amct.atomic import FileGroup
    from amct.export.binding import LayerBinding, TensorFactors
    from amct.export.check.reference import Reference
    from amct.export.exported import LayerReport
    from amct.export.formats import Exported
    from amct.model.quant_json import FileCheck
    from amct.record import LayerRecord

logger = logging.getLogger(__name__)

DEFAULT_FORMATS = ("qdq", "deploy", "fake_quant", RECORD)
"""The default formats of ``QuantizedModel.save``."""


def layer_factors(entry: LayerRecord) -> LayerFactors:
    """Convert the record of a layer to the form for exporters."""
    assert entry.scale_d is not None
    assert entry.offset_d is not None
    one = (1.0,)
    balance = np.array(entry.tensor_balance_factor, dtype=np.float32) if entry.tensor_balance_factor else None
    return LayerFactors(
        scale_d=entry.scale_d,
        offset_d=entry.offset_d,
        act_bits=int(entry.activation_type.removeprefix("INT")),
        scale_w=np.array(entry.scale_w or one, dtype=np.float32),
        wts_bits=int(entry.weight_type.removeprefix("INT")),
        scale_h=entry.scale_h,
        offset_h=entry.offset_h,
        scale_r=np.array(entry.scale_r, dtype=np.float32) if entry.scale_r else None,
        balance=balance,
    )


class ModelNotes(Protocol):
    """What a front door knows about a model in addition to its record."""

    @property
    def fusions(self) -> Mapping[str, Sequence[str]]:
        """By layer: the layers of the original model that were folded into it."""

    @property
    def skipped(self) -> Mapping[str, str]:
        """Layers that stay float, with the reason."""

    @property
    def config(self) -> str:
        """The config used, as readable text."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """The arguments of ``QuantizedModel.save``, checked.

    Attributes:
        where: The folder, which is writable, and the prefix.
        formats: The names of the exported models.
        options: Options of the QDQ file.
        with_record: Whether the factors are written too.
        opset: The opset of the ONNX files; None: the default of the front door.
        record_file: The file that the factors were read from, which ``quant.json`` names.
    """

    where: SavePath
    formats: tuple[str, ...] = ("deploy", "fake_quant", "qdq")
    opset: int | None = None
    options: ExportOptions = field(default_factory=ExportOptions)
    with_record: bool = False
    record_file: Path | None = None

    def related(self) -> dict[str, RelatedFile]:
        """The files that belong to the save without being part of it.

        Raises:
            FileError: the record file cannot be read.
        """
        return {} if self.record_file is None else {"record": related_file(self.record_file, self.where.folder)}

    @classmethod
    def checked(
        cls,
        path: str | os.PathLike[str],
        formats: Iterable[str],
        *,
        options: ExportOptions,
        opset: int | None,
    ) -> SaveRequest:
        """Check all arguments before any work is done.

        Raises:
            ArgumentError: an unknown format or opset, or an invalid path.
            FileError: the folder cannot be written to.
        """
        if opset is not None:
            check_opset(opset)
        where = SavePath.parse(path)
        atomic.check_writable(where.folder)
        names = (formats,) if isinstance(formats, str) else tuple(formats)
        check_formats(names)
        return cls(
            where=where,
            formats=tuple(name for name in dict.fromkeys(names) if name != RECORD),
            options=options,
            with_record=RECORD in names,
            opset=opset,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedContent:
    """What a save writes, and what the files are compared with.

    Attributes:
        record: The factors in the front door's own dialect, complete and checked.
        tensors: Factors of the tensors between layers; None if nothing was observed.
        reference: The batch on which the written files are run; None: they are not.
        calls: How often each layer is computed, if more than once.
        others: Further files of the group, by path.
    """

    record: Any
    tensors: Mapping[str, TensorFactors] | None = None
    reference: Reference | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[Path, bytes] = field(default_factory=dict)


def save_files(
    request: SaveRequest,
    model: ModelProto | None,
    content: SavedContent,
    notes: ModelNotes,
) -> list[Path]:
    """Export a model and write all files of one save as one group: models, record, tensor factors, quant.json.

    Args:
        request: the formats and the save path.
        model: the float ONNX model, whose nodes have the names of their layers; None if only the record is saved.
        content: the factors, and what the files are compared with.
        notes: further information about the model.

    Raises:
        ExportError: a model cannot be exported, or a written file cannot be used.
        FileError: a file cannot be written; none was.
    """
    exports = _Exports.of(request, model, content) if model is not None else None
    others = dict(content.others)
    if request.with_record:
        path = request.where.file("record.txt")
        others[path] = encode_record(content.record, "text")
        if content.tensors is not None:
            others[tensor_factors_path(path)] = tensor_factors_text(content.tensors).encode()

    def document() -> QuantJson:
        assert exports is not None
        assert model is not None
        found = quant_document(model.graph.name, exports.reports, notes, request.where, exports.checks)
        return replace(found, related=request.related())

    written = save_models(
        request.where,
        () if exports is None else exports.files(),
        after_each=None if exports is None else exports.check,
        others=others,
        document=document if exports is not None and request.formats else None,
    )
    logger.info("wrote %s", ", ".join(str(path) for path in written))
    return written


@dataclass(kw_only=True, eq=False)
class _Exports:
    """The exports of one save: each file is made, written and checked before the next one is made.

    Attributes:
        request: The formats and the save path.
        model: The float ONNX model.
        content: The factors, and what the files are compared with.
        bindings: The node of each layer.
        factors: The factors of each layer.
        reports: What each exporter did, by format, as far as its file is written; None for one that is no model.
        checks: The results of the checks by format.
    """

    request: SaveRequest
    model: ModelProto
    content: SavedContent
    bindings: Sequence[LayerBinding]
    factors: Mapping[str, LayerFactors]
    reports: dict[str, ExportReport | None] = field(default_factory=dict)
    checks: dict[str, FileCheck] = field(default_factory=dict)
    _kept: KeptWeights | None = None
    """The weights of the file that is being written."""

    @classmethod
    def of(cls, request: SaveRequest, model: ModelProto, content: SavedContent) -> _Exports:
        factors = {name: layer_factors(entry) for name, entry in content.record.items()}
        bindings = bindings_by_name(model, content.record, content.calls)
        return cls(request=request, model=model, content=content, bindings=bindings, factors=factors)

    @cached_property
    def _check(self) -> OnnxCheck | None:
        reference = self.content.reference
        if reference is None:
            return None
        subject = Subject(
            reference=reference,
            original=self.model,
            simulate=self._simulation,
            export_qdq=self._qdq_without if self.content.tensors else None,
            tensors=self.content.tensors,
        )
        return OnnxCheck(subject)

    def files(self) -> Iterator[tuple[str, ModelProto | bytes]]:
        """Each format exported when it is asked for; nothing of it is kept but its report."""
        for name in self.request.formats:
            yield file_name(name), self._content(name)

    def _content(self, name: str) -> ModelProto | bytes:
        exported = self._exported(name, self.request.options)
        self.reports[name] = report_of(exported)
        if isinstance(exported, bytes):
            return exported
        self._kept = exported.kept
        return exported.model

    def check(self, group: FileGroup, name: str) -> None:
        """Run the file that was written last."""
        self._kept = None  # nobody needs the exported model any more
        give_back_freed()
        done = list(self.reports)[-1]
        assert name == file_name(done)
        report = self.reports[done]
        if self._check is not None and report is not None:
            self.checks[done], self.reports[done] = check_file(self._check, group, self.request.where, done, report)

    def _simulation(self) -> ExportedModel:
        return fake_quant_model(self.model, self.bindings, self.factors, kept=KeptWeights())

    def _qdq_without(self, left_float: Collection[str]) -> ExportedModel:
        options = replace(self.request.options, float_tensors=self.request.options.float_tensors.union(left_float))
        exported = self._exported("qdq", options)
        assert isinstance(exported, ExportedModel)
        return exported

    def _exported(self, name: str, options: ExportOptions) -> Exported:
        factors, tensors = self.factors, self.content.tensors
        return export_formats([name], self.model, self.bindings, factors, tensors, options, keep_weights=True)[name]


def report_of(exported: Exported) -> ExportReport | None:
    """What is kept of an exported file; None for one that is no model."""
    return None if isinstance(exported, bytes) else exported.report


def check_file(
    check: OnnxCheck, group: FileGroup, where: SavePath, name: str, report: ExportReport
) -> tuple[FileCheck, ExportReport]:
    """Run the file of a format in a group; one that is repaired replaces the first in the group.

    Returns:
        The result, and the report of the file as it is in the group now.

    Raises:
        ExportError: the file cannot be loaded or run.
    """
    target = where.file(file_name(name))
    apart = {path.name: own for path, own in group.written().items() if path.suffix == ".external"}
    file = WrittenFile(format=name, path=group.temporary(target), target=target, report=report, beside=apart)
    found, repaired = check.check(file)
    if repaired is None:
        return found, report
    group.remove(target)
    add_model(group, target, repaired.model, file_name(name))
    return found, repaired.report


def quant_document(
    name: str,
    exported: Mapping[str, ExportReport | None],
    notes: ModelNotes,
    where: SavePath,
    checks: Mapping[str, FileCheck] | None = None,
) -> QuantJson:
    """The content of quant.json for exported ONNX models; ``checks`` has the results by format."""
    layers: dict[str, LayerEntry] = {}
    files: dict[str, FileEntry] = {}
    for format_name, result in exported.items():
        file = where.file(file_name(format_name)).name
        files[file] = file_entry(format_name, result, (checks or {}).get(format_name))
        for report in () if result is None else result.layers:
            before = layers.get(report.layer) or _layer_entry(report, notes.fusions.get(report.layer, ()))
            layers[report.layer] = _with_node(before, format_name, report)
    skipped = tuple(Skip(layer, reason) for layer, reason in notes.skipped.items())
    return QuantJson(version=VERSION, model=name, layers=layers, skipped=skipped, files=files, config=notes.config)


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


def file_entry(format_name: str, result: ExportReport | None, check: FileCheck | None) -> FileEntry:
    """The quant.json entry of one exported file."""
    if result is None:
        return FileEntry(format=format_name, check=check)
    return FileEntry(
        format=format_name,
        tensors=result.tensors,
        rescaled=result.rescaled,
        skipped=result.skipped,
        notes=result.notes,
        check=check,
    )


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
