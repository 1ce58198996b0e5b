"""The last step of post-training quantization: writes fake-quant and deploy models, quant.json and final factors."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from amct import log
from amct.caffe.model import caffemodel_parts
from amct.caffe.onnx.graph import DEFAULT_OPSET, NetOnnx, float_onnx
from amct.caffe.onnx.quant import export_net, types_with_ready_integers
from amct.caffe.prototxt import caffe_function
from amct.caffe.ptq.checking import PairCheck, content_digest, reference_beside
from amct.caffe.ptq.deploy import Results
from amct.caffe.ptq.graph import QuantGraph, Stage, caffe_record, check_graph, record_layers
from amct.calibration import all_ranks
from amct.calibration.record_files import progress_path, read_progress
from amct.config.plan import config_text
from amct.errors import ArgumentError, ExportError, RecordError
from amct.export.check.checking import OnnxCheck
from amct.export.formats import ExportedFiles, ExportedModel
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.onnx.messages import with_batch_size
from amct.export.request import RECORD, SavePath, SaveRequest
from amct.export.saving import save_files
from amct.memory import give_back_freed
from amct.model.kinds import KIND_OF_CAFFE_TYPE
from amct.model.quant_json import VERSION, LayerEntry, LayerInFile, QuantJson
from amct.record import encode_record, read_caffe_record, validate_record
from amct.record.conversion import caffe_layer_qparams
from amct.schema import format_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from amct.atomic import AnyPath
    from amct.caffe.model import CaffeModel
    from amct.caffe.ptq.deploy import QuantizedNet
    from amct.caffe.ptq.folding import FusionReport
    from amct.export.check.checking import FileToCheck
    from amct.export.check.losses import Reference
    from amct.export.formats import Exported, ExportReport
    from amct.model import Skip
    from amct.model.quant_json import FileCheck
    from amct.numerics.qparams import LayerQParams, Observed

logger = logging.getLogger(__name__)

PAIRS = ("fake_quant", "deploy")
"""The formats that are a prototxt and a caffemodel."""
CAFFE_FORMATS = {"Fakequant": ("fake_quant", RECORD), "Deploy": ("deploy", RECORD), "Both": (*PAIRS, RECORD)}


@caffe_function
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
    check_save_type("save_model", save_type)
    graph.need(Stage.CALIBRATING, "save_model")
    if not all_ranks().is_first:
        return
    where, record = prefix_of(save_path), graph.calibration_record
    give_back_freed()  # what calibration needed, more with many batches than with one
    save_results(results_of(graph), SaveNotes.of(graph), where, record, save_type)
    progress_path(record).unlink(missing_ok=True)  # calibration is complete


def save_results(results: Results, notes: SaveNotes, where: SavePath, record_file: Path, save_type: str) -> None:
    """Write what AMCT's functions write of a model that was calibrated with a record file."""
    request = SaveRequest(where=where, formats=CAFFE_FORMATS[save_type], record_file=record_file)
    reference = reference_beside(record_file, results)
    log_layers(request.formats, results)
    save_files(CaffeFiles(request, results, notes, reference=reference))


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
    record = read_caffe_record(graph.calibration_record)
    expected = set(graph.plans())
    if not expected:
        raise RecordError("no layer is quantized: every layer is switched off in the config")
    progress = read_progress(graph.calibration_record)
    known = max(progress.values(), default=(0, graph.plan.batch_num))
    unfinished = {name: progress.get(name, known) for name in expected}
    validate_record(record, record_layers(graph.model, expected), progress=unfinished)
    return Results(graph.model, graph.weights, {name: caffe_layer_qparams(entry) for name, entry in record.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class SaveNotes:
    """What ``quant.json`` says about a model beside its numbers.

    Attributes:
        original: The net as read.
        fusion: The folded layers.
        not_quantized: Why layers stay float.
        config: The config as readable text.
        equalized: The layers whose output channels were divided by factors.
    """

    original: CaffeModel
    fusion: FusionReport
    not_quantized: Sequence[Skip]
    config: str = ""
    equalized: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: QuantGraph) -> SaveNotes:
        """The notes of a graph."""
        return cls(
            original=graph.original,
            fusion=graph.fusion,
            not_quantized=graph.not_quantized,
            config=config_text(graph.plan),
            equalized=graph.equalized,
        )

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """Every layer that stays float and every layer that was not folded, with the reason."""
        return (*self.not_quantized, *self.fusion.skipped)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inference:
    """The form of a trained net that is deployed: Input layers instead of data layers, no losses.

    Attributes:
        results: The net.
        reference: What its ONNX files are compared with; None: they are not.
    """

    results: Results
    reference: Reference | None


class CaffeFiles:
    """The files of a quantized net.

    "fake_quant" and "deploy" are pairs of prototxt and caffemodel; other formats are exported from the float ONNX form
    of the net. If it has none, a warning and ``quant.json`` give the reason. For an equalized model the float model is
    written too: the record belongs to it, and layer-by-layer comparison needs it.

    Args:
        request: What is asked for.
        results: The quantized model.
        notes: Further content of ``quant.json``.
        tensors: The factors of the blobs between layers, for the QDQ file.
        reference: What the files are compared with; None: they are not.
        inference: For a net with data layers or losses: its form for ``atc_model.prototxt`` and for the ONNX formats,
            or the reason why there is none.
        form: The float ONNX form of the folded model, if there is one already.
    """

    def __init__(
        self,
        request: SaveRequest,
        results: Results,
        notes: SaveNotes,
        *,
        tensors: Mapping[str, Observed] | None = None,
        reference: Reference | None = None,
        inference: Inference | str | None = None,
        form: NetOnnx | None = None,
    ) -> None:
        pairs = [name for name in PAIRS if name in request.formats]  # one of them may be run as the simulation
        self._with_record = RECORD in request.formats
        self._with_record |= "deploy" in pairs  # the chip's converter may ask for it
        record = [RECORD] if self._with_record or notes.equalized else []
        onnx = [name for name in request.models if name not in PAIRS]
        self.request = replace(request, formats=(*pairs, *record, *onnx))
        self._results = results
        self._notes = notes
        self._tensors = tensors or {}
        self._inference = inference
        self._pairs = None if reference is None else PairCheck(reference, results)
        self._nets: dict[str, QuantizedNet] = {}
        """The pairs without their weights, so that those of one net at a time are in memory."""
        self._digest: bytes | None = None
        self.propose: Callable[[Reference], str | None] = lambda _compared: None
        """What would help against a loss, from what the files were compared with; called if one is not Good."""
        self._levels: set[str | None] = set()
        self._form = form
        self._forms: dict[tuple[str, ...], NetOnnx] = {}

    def export(self, name: str) -> Exported | ExportError:
        """A pair, or the net in an ONNX format; an error if it has no ONNX form."""
        if name in PAIRS:
            return self._pair(name)
        if name == RECORD:
            return self._record_files()
        if isinstance(self._inference, str):
            return ExportError(self._inference)
        try:
            return self._in_onnx(name)
        except ExportError as error:
            return error

    def _pair(self, name: str) -> ExportedFiles:
        is_simulation = name == "fake_quant"
        net = self._results.fake_quant() if is_simulation else self._results.deploy()
        if is_simulation and self._pairs is not None:
            self._digest = content_digest(net.model)
        self._nets[name] = replace(net, model=replace(net.model, weights={}))
        files = pair_files(name, net.model)
        if not is_simulation and isinstance(self._inference, Inference):
            prototxt = format_text(self._inference.results.deploy().model.net)
            files["atc_model.prototxt"] = [prototxt.encode()]
        return ExportedFiles(files=files)

    def _record_files(self) -> ExportedFiles:
        """The record as text and as bytes, and the equalized float model to which it belongs."""
        files: dict[str, Sequence[bytes | memoryview]] = {}
        if self._notes.equalized:
            files |= pair_files("equalized", self._results.folded_model)
        if self._with_record:
            record = caffe_record(self._results.layers)
            files["quant_param_record.txt"] = [encode_record(record, "text")]
            files["quant_param_record.bin"] = [encode_record(record, "binary")]
        return ExportedFiles(files=files)

    @property
    def _onnx_results(self) -> Results:
        return self._inference.results if isinstance(self._inference, Inference) else self._results

    def _onnx_form(self, rounded: tuple[str, ...] = ()) -> NetOnnx:
        """The float ONNX form; weights of the ``rounded`` layer types are quantized and dequantized."""
        if rounded not in self._forms:
            model = self._onnx_results.float_model(rounded=rounded)
            opset = DEFAULT_OPSET if self.request.opset is None else self.request.opset
            given = self._form if opset == DEFAULT_OPSET and model is self._results.folded_model else None
            form = given or float_onnx(model.build(), opset=opset, kept=KeptWeights())
            size = self.request.batch_size
            self._forms[rounded] = form if size is None else replace(form, model=with_batch_size(form.model, size))
        return self._forms[rounded]

    def _in_onnx(self, name: str, left_float: Collection[str] = ()) -> Exported:
        options = self.request.options.without(left_float)
        rounded = types_with_ready_integers(options.placement, options.target) if name == "qdq" else ()
        form = self._onnx_form(rounded)
        return export_net(name, form, self._onnx_results.layers, self._tensors, options, keep_weights=True)

    def _onnx_model(self, name: str, left_float: Collection[str] = ()) -> ExportedModel:
        exported = self._in_onnx(name, left_float)
        assert isinstance(exported, ExportedModel)
        return exported

    @cached_property
    def _onnx_check(self) -> OnnxCheck | None:
        if isinstance(self._inference, Inference):
            reference = self._inference.reference
        else:
            reference = None if self._pairs is None else self._pairs.simulated()
        if reference is None:
            return None
        return OnnxCheck(
            reference=reference,
            original=self._onnx_form().model,
            simulate=lambda: self._onnx_model("fake_quant"),
            export_qdq=None if self.request.is_judged else lambda left: self._onnx_model("qdq", left),
            tensors=self._tensors,
        )

    def check(self, file: FileToCheck) -> tuple[FileCheck | None, ExportedModel | None]:
        """Run a pair in our engine, or an ONNX file."""
        result = self._checked(file)
        self._levels.add(None if result[0] is None else result[0].verdict)
        return result

    def _checked(self, file: FileToCheck) -> tuple[FileCheck | None, ExportedModel | None]:
        if file.format in PAIRS:
            digest = self._digest if file.format == "fake_quant" else None
            return None if self._pairs is None else self._pairs.check(file, digest), None
        return (None, None) if not file.is_model or self._onnx_check is None else self._onnx_check.check(file)

    def _proposals(self) -> tuple[str, ...]:
        if self._pairs is None or self._levels <= {None, "good"}:
            return ()
        text = self.propose(self._pairs.simulated())
        return () if text is None else (text,)

    def document(self, reports: Mapping[str, ExportReport]) -> QuantJson:
        """The layers with their blobs in the pairs."""
        del reports
        nets = self._nets or {"fake_quant": self._results.fake_quant()}
        notes = self._notes
        return QuantJson(
            version=VERSION,
            model=notes.original.net.name,
            layers=layer_entries(nets, self._results.layers, notes),
            skipped=notes.skipped,
            files={},
            config=notes.config,
            equalized=notes.equalized,
            accelerated=tuple(notes.fusion.accelerated),
            proposals=self._proposals(),
            not_written={"atc": self._inference} if isinstance(self._inference, str) else {},
        )


def log_layers(formats: Collection[str], results: Results) -> None:
    """Write the log files of the layers of a fake-quant model, as AMCT's functions do."""
    if "fake_quant" in formats:
        log.write_layer_files("amct_caffe", {name: _log_lines(each) for name, each in results.layers.items()})


def _log_lines(layer: LayerQParams) -> list[tuple[int, str]]:
    """How a layer of the fake-quant model is quantized: a line for each input and weight; all scales in DEBUG."""
    lines = []
    for index, found in layer.inputs.items():
        low, high = float(found.clip_min), float(found.clip_max)
        text = f"input {index}: {found.bits} bits, scale {found.step:.9g}, offset {found.zero_point}"
        lines.append((logging.INFO, f"{text}, range {low:.6g} to {high:.6g}"))
    for index, weight in enumerate(layer.weights):
        scales = weight.scale.reshape(-1).tolist()
        ends = f"{min(scales):.9g} to {max(scales):.9g}"
        lines.append((logging.INFO, f"weight {index}: {weight.bits} bits, {len(scales)} scale(s), {ends}"))
        lines.append((logging.DEBUG, f"weight {index}: scales {', '.join(f'{scale:.9g}' for scale in scales)}"))
    return lines


def pair_files(kind: str, model: CaffeModel) -> dict[str, Sequence[bytes | memoryview]]:
    """A net as prototxt and caffemodel: by the file name behind the prefix, the content in parts."""
    return {
        f"{kind}_model.prototxt": [format_text(model.net).encode()],
        f"{kind}_weights.caffemodel": caffemodel_parts(model),
    }


def layer_entries(
    nets: Mapping[str, QuantizedNet], quantized: Mapping[str, LayerQParams], notes: SaveNotes
) -> dict[str, LayerEntry]:
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
        if name not in tops or (name not in quantized and not absorbed):
            continue
        outputs = tops[absorbed[-1]] if absorbed and absorbed[-1] in tops else tops[name]
        qparams = quantized.get(name)
        layers[name] = LayerEntry(
            type=layer.type,
            kind=KIND_OF_CAFFE_TYPE.get(layer.type),
            quantized=qparams is not None,
            original_layers=(name, *(each for each in absorbed if each != name)),
            output=tuple(outputs if set(outputs) & written else layer.top),
            data_bits=tuple(data.bits for data in qparams.inputs.values()) if qparams is not None else (),
            weight_bits=qparams.weight.bits if qparams is not None and qparams.weights else None,
            files={
                kind: LayerInFile(node=name, operator=types[kind][name], inserted=tuple(net.inserted.get(name, ())))
                for kind, net in nets.items()
            },
        )
    return layers
