"""The last step of post-training quantization: writes fake-quant and deploy models, quant.json and final factors."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from amct import atomic, log
from amct.arguments import check_types
from amct.atomic import FileGroup
from amct.caffe.model_files import write_model
from amct.caffe.ptq.checking import check_onnx, check_save, content_digest, pair_of, reference_beside
from amct.caffe.ptq.deploy import Results
from amct.caffe.ptq.graph import QuantGraph, Stage, check_graph, record_layers
from amct.caffe.ptq.qdq import add_onnx_formats
from amct.calibration import all_ranks
from amct.calibration.record_files import progress_path, read_progress
from amct.config.plan import config_text
from amct.errors import ArgumentError, RecordError
from amct.export.formats import file_name
from amct.export.save_path import SavePath, warn_of_replaced
from amct.export.saving import SavedContent, SaveRequest, file_entry
from amct.memory import give_back_freed, own_pages_of_large_tensors
from amct.model import Skip
from amct.model.kinds import KIND_OF_CAFFE_TYPE
from amct.model.quant_json import VERSION, FileEntry, LayerEntry, LayerInFile, QuantJson, write_quant_json
from amct.record import encode_record, read_caffe_record, validate_record
from amct.schema import format_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from amct.caffe.model import CaffeModel
    from amct.caffe.ptq.deploy import QuantizedNet
    from amct.caffe.ptq.folding import FusionReport
    from amct.export.exported import ExportReport
    from amct.model.quant_json import FileCheck
    from amct.record import CaffeRecord

logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]
PAIRS = ("fake_quant", "deploy")
"""The formats that are a prototxt and a caffemodel."""
CAFFE_FORMATS = {"Fakequant": ("fake_quant",), "Deploy": ("deploy",), "Both": PAIRS}


def save_model(graph: QuantGraph, save_type: str, save_path: AnyPath) -> None:
    """Write the quantized model, after ``batch_num`` forwards of the calibration model.

    Under ``torch.distributed`` only the process of rank 0 does so.

    Args:
        graph: The graph after ``activation_quantize_model``.
        save_type: ``Fakequant``, ``Deploy`` or ``Both``.
        save_path: Folder and prefix of the files, such as ``results/model``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.
        FileError: a file cannot be read or written.
        CalibrationError: called out of order.
        RecordError: calibration has not seen enough batches, or the record belongs to another model.
    """
    graph = check_graph("save_model", graph)
    check_types("save_model", {"save_type": (save_type, (str,)), "save_path": (save_path, (str, os.PathLike))})
    check_save_type("save_model", save_type)
    log.start("amct_caffe")
    graph.need(Stage.CALIBRATING, "save_model")
    if not all_ranks().is_first:
        return
    request = SaveRequest(
        where=prefix_of(save_path),
        formats=CAFFE_FORMATS[save_type],
        with_record=True,
        record_file=graph.calibration_record,
    )
    give_back_freed()  # what calibration needed, more with many batches than with one
    results = results_of(graph)
    assert graph.calibration_record is not None
    with own_pages_of_large_tensors():
        content = SavedContent(record=results.record, reference=reference_beside(graph.calibration_record, results))
        save_results(results, request, notes=SaveNotes.of(graph), content=content)
    progress_path(graph.calibration_record).unlink(missing_ok=True)  # calibration is complete


def prefix_of(save_path: AnyPath) -> SavePath:
    """Folder and prefix of the files of ``save_model`` and ``convert_model``.

    Raises:
        ArgumentError: The path is empty or not a path.
    """
    if not os.fspath(save_path):
        raise ArgumentError("save_path: expected a folder and a prefix such as results/model, got nothing")
    return SavePath.parse(save_path)


def check_save_type(function: str, save_type: str) -> None:
    """Check the ``save_type`` argument.

    Raises:
        ArgumentError: the value is unknown.
    """
    if save_type not in CAFFE_FORMATS:
        raise ArgumentError(f"{function}: save_type must be {', '.join(CAFFE_FORMATS)}, got {save_type!r}")


def results_of(graph: QuantGraph) -> Results:
    """Build the results of a graph from the record file that calibration wrote.

    Raises:
        RecordError: the record is incomplete or belongs to another model.
    """
    assert graph.calibration_record is not None
    record = read_caffe_record(graph.calibration_record)
    expected = set(graph.plans())
    if not expected:
        raise RecordError("no layer is quantized: every layer is switched off in the config")
    progress = read_progress(graph.calibration_record)
    known = max(progress.values(), default=(0, graph.plan.batch_num))
    unfinished = {name: progress.get(name, known) for name in expected}
    validate_record(record, record_layers(graph.model, expected), progress=unfinished)
    return results_with(graph, record)


def results_with(graph: QuantGraph, record: CaffeRecord) -> Results:
    """Build the results of a graph from a complete record."""
    return Results(graph.model, graph.weights, record, config=config_text(graph.plan), equalized=graph.equalized)


@dataclass(frozen=True, kw_only=True, eq=False)
class SaveNotes:
    """Content of ``quant.json``: the original net, the folded layers, and why layers stay float."""

    original: CaffeModel
    fusion: FusionReport
    not_quantized: Mapping[str, str]

    @classmethod
    def of(cls, graph: QuantGraph) -> SaveNotes:
        """The notes of a graph."""
        return cls(original=graph.original, fusion=graph.fusion, not_quantized=graph.not_quantized)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inference:
    """The form of a trained net that is deployed: Input layers instead of data layers, no losses."""

    results: Results
    content: SavedContent


def save_results(
    results: Results,
    request: SaveRequest,
    *,
    notes: SaveNotes,
    content: SavedContent,
    inference: Inference | str | None = None,
) -> list[Path]:
    """Write all files of a result as one group and return their paths.

    "fake_quant" and "deploy" are Caffe pairs; other formats are exported from the float ONNX form of the net. If the
    net has no ONNX form, a warning and ``quant.json`` give the reason. For an equalized model the float model is
    written too: the record belongs to it, and layer-by-layer comparison needs it.

    Args:
        results: The quantized model.
        request: The formats and the save path.
        notes: Further content of ``quant.json``.
        content: The factors of the blobs between layers, for the QDQ file, and what the files are compared with.
        inference: For a net with data layers or losses: its form for ``atc_model.prototxt`` and for the ONNX formats,
            or the reason why there is none.

    Raises:
        ArgumentError: The exporters do not support the opset.
        ExportError: A written file cannot be used; nothing was saved.
        FileError: The files cannot be written; none was.
    """
    where = request.where
    atomic.check_writable(where.folder)
    onnx_formats = [name for name in request.formats if name not in PAIRS]
    onnx = inference if isinstance(inference, Inference) else Inference(results=results, content=content)
    reports: dict[str, ExportReport | None] = {}
    not_written = dict.fromkeys((*onnx_formats, "atc"), inference) if isinstance(inference, str) else {}
    written: list[Path] = [where.quant_json] if request.formats else []
    with FileGroup() as group:
        nets, digests, paths = _write_nets(group, results, request, with_digest=content.reference is not None)
        written += paths
        if results.equalized:
            written += _write_pair(group, where, "equalized", results.folded_model)
        if isinstance(inference, Inference) and "deploy" in nets:
            path = where.file("atc_model.prototxt")
            group.write_text(path, format_text(inference.results.deploy().model.net))
            written.append(path)
        if request.with_record:
            written += _write_record(group, where, results.record)
        if not not_written:
            factors = onnx.content.tensors or {}
            paths, reports, not_written = add_onnx_formats(group, onnx.results, onnx_formats, factors, request)
            written += paths
        if request.formats:
            give_back_freed()  # the weights of several nets
            checks, content = check_save(group, results, request, content, digests)
            checked = onnx.content if onnx is inference else content
            checks |= check_onnx(group, onnx.results, request, checked, reports)
            document = replace(
                quant_json(nets or {"fake_quant": results.fake_quant()}, results.record, notes),
                config=results.config,
                equalized=tuple(results.equalized),
                not_written=not_written,
                related=request.related(),
                files=_file_entries(where, reports, checks),
            )
            write_quant_json(group, where.quant_json, document)
        warn_of_replaced(group.written())
    logger.info("wrote %s", ", ".join(str(path) for path in written))
    return written


def _write_nets(
    group: FileGroup, results: Results, request: SaveRequest, *, with_digest: bool
) -> tuple[dict[str, QuantizedNet], dict[str, bytes | None], list[Path]]:
    """Write the Caffe pairs that are asked for.

    Returns:
        By kind: the nets without weights, so that those of one net at a time are in memory, and the digest of the
        simulation, None for the others; and the paths.
    """
    nets: dict[str, QuantizedNet] = {}
    digests: dict[str, bytes | None] = {}
    written: list[Path] = []
    for kind in (name for name in PAIRS if name in request.formats):
        net = results.fake_quant() if kind == "fake_quant" else results.deploy()
        written += _write_pair(group, request.where, kind, net.model)
        digests[kind] = content_digest(net.model) if with_digest and kind == "fake_quant" else None
        nets[kind] = replace(net, model=replace(net.model, weights={}))
        del net
    return nets, digests, written


def _write_pair(group: FileGroup, where: SavePath, kind: str, model: CaffeModel) -> list[Path]:
    """Write a net as prototxt and caffemodel; return the paths."""
    files = pair_of(where, kind)
    write_model(group, model, *files)
    return [*files]


def _write_record(group: FileGroup, where: SavePath, record: CaffeRecord) -> list[Path]:
    """Write the record of the factors as text and as bytes; return the paths."""
    text, binary = where.file("quant_param_record.txt"), where.file("quant_param_record.bin")
    group.write_bytes(text, encode_record(record, "text"))
    group.write_bytes(binary, encode_record(record, "binary"))
    return [text, binary]


def _file_entries(
    where: SavePath, reports: Mapping[str, ExportReport | None], checks: Mapping[Path, FileCheck]
) -> dict[str, FileEntry]:
    files = {path: FileEntry(format=path.suffix.lstrip("."), check=check) for path, check in checks.items()}
    for name, report in reports.items():
        path = where.file(file_name(name))
        files[path] = file_entry(name, report, checks.get(path))
    return {path.name: entry for path, entry in files.items()}


def quant_json(nets: Mapping[str, QuantizedNet], record: CaffeRecord, notes: SaveNotes) -> QuantJson:
    """Describe each layer for layer-by-layer comparison.

    ``output`` names the blob that holds a layer's result: in the original net (without in-place layers the name is
    the same) and in each written one.
    """
    first, fusion, original = next(iter(nets.values())).model, notes.fusion, notes.original
    tops = {layer.name: list(layer.top) for layer in original.layers}
    written = {blob for layer in first.layers for blob in layer.top}
    types = {kind: {layer.name: layer.type for layer in net.model.layers} for kind, net in nets.items()}
    layers: dict[str, LayerEntry] = {}
    for layer in first.layers:
        name = layer.name
        absorbed = fusion.folded.get(name, [])
        if name not in tops or (name not in record.layers and not absorbed):
            continue
        outputs = tops[absorbed[-1]] if absorbed and absorbed[-1] in tops else tops[name]
        entry = record.layers.get(name)
        layers[name] = LayerEntry(
            type=layer.type,
            kind=KIND_OF_CAFFE_TYPE.get(layer.type),
            quantized=entry is not None,
            original_layers=(name, *(each for each in absorbed if each != name)),
            output=tuple(outputs if set(outputs) & written else layer.top),
            data_bits=tuple(data.bits for data in entry.record_d) if entry is not None else (),
            weight_bits=entry.weight_bits if entry is not None and entry.scale_w else None,
            files={
                kind: LayerInFile(node=name, operator=types[kind][name], inserted=tuple(net.inserted.get(name, ())))
                for kind, net in nets.items()
            },
        )
    skipped = [Skip(name, reason) for name, reason in notes.not_quantized.items()]
    skipped += fusion.skipped
    return QuantJson(
        version=VERSION,
        model=original.net.name,
        layers=layers,
        skipped=tuple(skipped),
        files={},
        accelerated=tuple(fusion.accelerated),
    )
