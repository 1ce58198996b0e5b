"""The end of post-training quantization: fake-quant and deploy models, quant.json and the final factors."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct import atomic, log
from amct.arguments import check_types
from amct.atomic import FileGroup
from amct.caffe.model_files import write_model
from amct.caffe.ptq.deploy import Results
from amct.caffe.ptq.graph import QuantGraph, Stage, check_graph, record_layers
from amct.calibration.record_files import progress_path, read_progress
from amct.config.plan_text import config_text
from amct.errors import ArgumentError, RecordError
from amct.record import encode_record, read_caffe_record, validate_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.caffe.model import CaffeModel
    from amct.caffe.ptq.deploy import QuantizedNet
    from amct.caffe.ptq.fold import FusionReport
    from amct.caffe.ptq.qdq import QdqFile
    from amct.record import CaffeRecord

logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]
SAVE_TYPES = ("Fakequant", "Deploy", "Both")
QUANT_JSON_VERSION = 1


def save_model(graph: QuantGraph, save_type: str, save_path: AnyPath) -> None:
    """Write the quantized model, after ``batch_num`` forwards of the calibration model.

    Args:
        graph: As ``activation_quantize_model`` left it.
        save_type: ``Fakequant``, ``Deploy`` or ``Both``.
        save_path: Folder and prefix of the files, such as ``results/model``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument cannot be used.
        FileError: a file cannot be read or written.
        CalibrationError: called out of order.
        RecordError: calibration has not seen enough batches, or the record is another model's.
    """
    graph = check_graph("save_model", graph)
    check_types("save_model", {"save_type": (save_type, (str,)), "save_path": (save_path, (str, os.PathLike))})
    check_save_type("save_model", save_type)
    log.start("amct_caffe")
    graph.need(Stage.CALIBRATING, "save_model")
    save_results(
        results_of(graph),
        save_path,
        save_type=save_type,
        original=graph.original,
        fusion=graph.fusion,
        not_quantized=graph.not_quantized,
    )
    assert graph.calibration_record is not None
    progress_path(graph.calibration_record).unlink(missing_ok=True)  # nothing is missing any more


def check_save_type(function: str, save_type: str) -> None:
    """Check which models a user asks for.

    Raises:
        ArgumentError: there is no such choice.
    """
    if save_type not in SAVE_TYPES:
        raise ArgumentError(f"{function}: save_type must be {', '.join(SAVE_TYPES)}, got {save_type!r}")


def results_of(graph: QuantGraph) -> Results:
    """Both results of a calibrated graph.

    Raises:
        RecordError: the record is not complete, or another model's.
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
    return Results(graph.model, graph.weights, record, config=config_text(graph.plan), equalized=graph.equalized)


def save_results(
    results: Results,
    save_path: AnyPath,
    *,
    save_type: str,
    original: CaffeModel,
    fusion: FusionReport,
    not_quantized: Mapping[str, str],
    qdq: QdqFile | None = None,
) -> list[Path]:
    """Write all files of a result, together or not at all, and return their paths.

    ``qdq`` is the QDQ file that belongs to them; None, as in AMCT's flow, for none. Of an equalized model the float
    form is written too: the record is its, and comparing layer by layer needs it.

    Raises:
        FileError: they cannot be written.
    """
    names = file_names(save_path)
    atomic.check_writable(names["folder"])
    nets: dict[str, QuantizedNet] = {}
    if save_type in ("Fakequant", "Both"):
        nets["fake_quant"] = results.fake_quant()
    if save_type in ("Deploy", "Both"):
        nets["deploy"] = results.deploy()
    written = [names["quant.json"], names["quant_param_record.txt"], names["quant_param_record.bin"]]
    document = quant_json(nets, results.record, original, fusion, not_quantized)
    if results.config:
        document["config"] = results.config
    if results.equalized:
        document["equalized"] = list(results.equalized)
    if qdq is not None:
        document["qdq"] = qdq.report()
    with FileGroup() as group:
        for kind, net in nets.items():
            pair = names[f"{kind}_model.prototxt"], names[f"{kind}_weights.caffemodel"]
            write_model(group, net.model, *pair)
            written += pair
        if results.equalized:
            pair = names["equalized_model.prototxt"], names["equalized_weights.caffemodel"]
            write_model(group, results.folded_model, *pair)
            written += pair
        group.write_text(names["quant.json"], json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        group.write_bytes(names["quant_param_record.txt"], encode_record(results.record, "text"))
        group.write_bytes(names["quant_param_record.bin"], encode_record(results.record, "binary"))
        if qdq is not None:
            written += qdq.write(group, names["qdq_model.onnx"])
    logger.info("Saved %s of %d quantized layers to %s.", " and ".join(nets), len(results.record), names["folder"])
    return written


def file_names(save_path: AnyPath) -> dict[str, Path]:
    """The path of each file; ``save_path`` ends with the prefix of their names, or with a slash for none."""
    text = os.fspath(save_path)
    if not text:
        raise ArgumentError("save_path: expected a folder and a prefix such as results/model, got nothing")
    prefix = "" if text.endswith(("/", os.sep)) else f"{Path(text).name}_"
    folder = Path(text) if not prefix else Path(text).parent
    kinds = [
        f"{kind}_{part}"
        for kind in ("fake_quant", "deploy", "equalized")
        for part in ("model.prototxt", "weights.caffemodel")
    ]
    names = {kind: folder / f"{prefix}{kind}" for kind in kinds}
    for kind in ("quant.json", "quant_param_record.txt", "quant_param_record.bin", "qdq_model.onnx"):
        names[kind] = folder / f"{prefix}{kind}"
    names["folder"] = folder
    return names


def quant_json(
    nets: Mapping[str, QuantizedNet],
    record: CaffeRecord,
    original: CaffeModel,
    fusion: FusionReport,
    not_quantized: Mapping[str, str],
) -> dict[str, Any]:
    """What became of each layer, for comparing layer by layer.

    ``output`` names the blob that holds a layer's result: in the original net (without in-place layers the name is
    the same) and in each written one.
    """
    first = next(iter(nets.values())).model
    tops = {layer.name: list(layer.top) for layer in original.layers}
    layers: dict[str, Any] = {}
    for layer in first.layers:
        name = layer.name
        absorbed = fusion.folded.get(name, [])
        if name not in tops or (name not in record.layers and not absorbed):
            continue
        outputs = tops[absorbed[-1]] if absorbed and absorbed[-1] in tops else tops[name]
        if not set(outputs) & {blob for each in first.layers for blob in each.top}:
            outputs = list(layer.top)
        entry = record.layers.get(name)
        layers[name] = {
            "type": layer.type,
            "quantized": entry is not None,
            "original_layers": [name, *(each for each in absorbed if each != name)],
            "output": outputs,
            "inserted": {kind: net.inserted.get(name, []) for kind, net in nets.items()},
        }
        if entry is not None:
            layers[name]["data_bits"] = [data.bits for data in entry.record_d]
            layers[name]["weight_bits"] = entry.weight_bits if entry.scale_w else None
    return {
        "version": QUANT_JSON_VERSION,
        "layers": layers,
        "accelerated": fusion.accelerated,
        "not_fused": [{"layer": skip.layer, "reason": skip.reason} for skip in fusion.skipped],
        "not_quantized": [{"layer": name, "reason": reason} for name, reason in not_quantized.items()],
    }
