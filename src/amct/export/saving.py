"""Writes the files of one save path from the float ONNX model, the record and the tensor factors."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from amct import atomic
from amct.export.binding import LayerFactors, bindings_by_name
from amct.export.formats import RECORD, ExportOptions, check_formats, export_formats, file_name
from amct.export.qdq.tensor_factors import tensor_factors_path, tensor_factors_text
from amct.export.writer import SavePath, check_opset, save_models
from amct.model import Skip
from amct.model.quant_json import VERSION, FileEntry, LayerEntry, LayerInFile, QuantJson
from amct.record import encode_record

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from onnx import ModelProto

    from amct.export.binding import TensorFactors
    from amct.export.exported import ExportedModel, LayerReport
    from amct.export.formats import Exported
    from amct.record import LayerRecord, Record

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
    """

    where: SavePath
    formats: tuple[str, ...] = ("deploy", "fake_quant", "qdq")
    opset: int | None = None
    options: ExportOptions = field(default_factory=ExportOptions)
    with_record: bool = False

    @classmethod
    def checked(
        cls, path: str | os.PathLike[str], formats: Iterable[str], *, placement: str, target: str, opset: int | None
    ) -> SaveRequest:
        """Check all arguments before any work is done.

        Raises:
            ArgumentError: an unknown format, placement, target or opset, or an invalid path.
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
            options=ExportOptions(placement=placement, target=target),
            with_record=RECORD in names,
            opset=opset,
        )


def save_files(
    request: SaveRequest,
    model: ModelProto | None,
    record: Record,
    notes: ModelNotes,
    tensors: Mapping[str, TensorFactors] | None,
) -> list[Path]:
    """Export a model and write all files of one save as one group: models, record, tensor factors, quant.json.

    Args:
        request: the formats and the save path.
        model: the float ONNX model, whose nodes have the names of their layers; None if only the record is saved.
        record: complete and checked.
        notes: further information about the model.
        tensors: factors of the tensors between layers; None if nothing was observed.

    Raises:
        ExportError: a model cannot be exported.
        FileError: a file cannot be written; none was.
    """
    exported: dict[str, Exported] = {}
    if model is not None:
        factors = {name: layer_factors(entry) for name, entry in record.items()}
        bindings = bindings_by_name(model, record)
        exported = export_formats(request.formats, model, bindings, factors, tensors, request.options)
    others: dict[Path, bytes] = {}
    if request.with_record:
        path = request.where.file("record.txt")
        others[path] = encode_record(record, "text")
        if tensors is not None:
            others[tensor_factors_path(path)] = tensor_factors_text(tensors).encode()
    files = {
        file_name(name): result if isinstance(result, bytes) else result.model for name, result in exported.items()
    }
    name = "" if model is None else model.graph.name
    document = quant_document(name, exported, notes, request.where) if exported else None
    written = save_models(request.where, files, others=others, document=document)
    logger.info("wrote %s", ", ".join(str(path) for path in written))
    return written


def quant_document(name: str, exported: Mapping[str, Exported], notes: ModelNotes, where: SavePath) -> QuantJson:
    """The content of quant.json for exported ONNX models."""
    layers: dict[str, LayerEntry] = {}
    files: dict[str, FileEntry] = {}
    for format_name, result in exported.items():
        file = where.file(file_name(format_name)).name
        files[file] = FileEntry(format=format_name) if isinstance(result, bytes) else file_entry(format_name, result)
        for report in () if isinstance(result, bytes) else result.layers:
            before = layers.get(report.layer) or _layer_entry(report, notes.fusions.get(report.layer, ()))
            here = LayerInFile(
                node=report.layer, operator=report.operator, weight_bits=report.weight_bits, inserted=report.inserted
            )
            layers[report.layer] = replace(before, files={**before.files, format_name: here})
    skipped = tuple(Skip(layer, reason) for layer, reason in notes.skipped.items())
    return QuantJson(version=VERSION, model=name, layers=layers, skipped=skipped, files=files, config=notes.config)


def file_entry(format_name: str, result: ExportedModel) -> FileEntry:
    """The quant.json entry of one exported ONNX file."""
    return FileEntry(
        format=format_name,
        tensors=result.tensors,
        rescaled=result.rescaled,
        skipped=result.skipped,
        notes=result.notes,
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
