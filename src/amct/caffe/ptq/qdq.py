"""The QDQ file of ``amct.caffe.quantize``: the observers it needs during calibration, and its export."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from amct.caffe.model import FEEDFORWARD_TYPES
from amct.caffe.onnx.graph import DEFAULT_OPSET, float_onnx
from amct.caffe.onnx.quant import NARROW, other_format, quantized_onnx, tensors_to_observe
from amct.caffe.running import build_net
from amct.errors import ExportError
from amct.export.check.checking import Subject
from amct.export.exported import ExportedModel, ExportReport
from amct.export.formats import file_name
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.options import Placement, Target
from amct.export.saving import report_of
from amct.export.writer import add_file
from amct.model.kinds import KIND_OF_CAFFE_TYPE, LayerKind
from amct.numerics.min_max import MinMaxObserver

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from amct.atomic import FileGroup
    from amct.caffe.engine.net import Net
    from amct.caffe.ptq.deploy import Results
    from amct.config.plan import LayerPlan
    from amct.export.binding import TensorFactors
    from amct.export.formats import Exported
    from amct.export.saving import SavedContent, SaveRequest
    from amct.numerics.observer import TensorObserver

logger = logging.getLogger(__name__)


def types_with_ready_integers(placement: str, target: str) -> tuple[str, ...]:
    """The layer types whose weights in the QDQ file are the integers of the deploy model.

    All others stay float or are rounded again from the float weights, with a scale per output: for every CPU all are,
    so that pairs of them fit 16 bits.
    """
    if target == Target.PORTABLE.value:
        return ()
    others: set[LayerKind] = set()
    if placement != Placement.EXACT.value:
        others = {LayerKind.CONV_TRANSPOSE} | ({LayerKind.LINEAR} if target == Target.VNNI.value else set())
    return tuple(each for each in FEEDFORWARD_TYPES if KIND_OF_CAFFE_TYPE[each] not in others)


def qdq_observers(net: Net, plans: Mapping[str, LayerPlan]) -> dict[str, TensorObserver]:
    """Observers of the blobs that placement ``fast`` quantizes and for which the record has no factors.

    Args:
        net: The folded float net.
        plans: The layers that will be quantized.
    """
    wide = [name for name, plan in plans.items() if any(each.num_bits != NARROW for each in plan.activations)]
    try:
        wanted = tensors_to_observe(net, plans, other_bits=wide)
    except ExportError as error:
        logger.debug("nothing is observed for the QDQ file: %s", error)
        return {}
    known = {
        blob
        for layer in net.layers
        if layer.name in plans and layer.name not in wide
        for blob in layer.parameter.bottom
    }
    return {name: MinMaxObserver() for name in wanted if name not in known}


def add_onnx_formats(
    group: FileGroup,
    results: Results,
    formats: Sequence[str],
    tensors: Mapping[str, TensorFactors],
    request: SaveRequest,
) -> tuple[list[Path], dict[str, ExportReport | None], dict[str, str]]:
    """Export a quantized net in ONNX formats and write each as part of a group.

    Returns:
        The paths; what each exporter did by format, None for one whose file is no model; and the reason for each
        format that cannot be written.

    Raises:
        ArgumentError: The placement, target or opset is unknown.
    """
    written: list[Path] = []
    reports: dict[str, ExportReport | None] = {}
    not_written: dict[str, str] = {}
    for name in formats:
        result = _exported(name, results, tensors, request)
        if isinstance(result, ExportError):
            logger.warning("no %s file is written: %s", "QDQ" if name == "qdq" else name, result)
            not_written[name] = str(result)
        else:
            content = result if isinstance(result, bytes) else result.model
            written += add_file(group, request.where.file(file_name(name)), content, file_name(name))
            reports[name] = report_of(result)
    return written, reports, not_written


def _exported(
    name: str, results: Results, tensors: Mapping[str, TensorFactors], request: SaveRequest
) -> Exported | ExportError:
    options, opset = request.options, request.opset if request.opset is not None else DEFAULT_OPSET
    try:
        if name != "qdq":
            net = build_net(results.float_model())
            return other_format(name, net, results.record, tensors, options=options, opset=opset)
        net = build_net(results.float_model(rounded=types_with_ready_integers(options.placement, options.target)))
        return quantized_onnx(
            net,
            results.record,
            tensors,
            placement=options.placement,
            target=options.target,
            opset=opset,
            float_tensors=options.float_tensors,
            keep_weights=True,
        )
    except ExportError as error:
        return error


def onnx_subject(results: Results, content: SavedContent, request: SaveRequest) -> Subject:
    """The float and the simulated ONNX model with which the ONNX files are compared."""
    assert content.reference is not None
    tensors = content.tensors or {}

    def export(name: str, left_float: Collection[str] = ()) -> ExportedModel:
        options = replace(request.options, float_tensors=request.options.float_tensors.union(left_float))
        found = _exported(name, results, tensors, replace(request, options=options))
        if not isinstance(found, ExportedModel):
            raise found if isinstance(found, ExportError) else ExportError(f"format {name} is no ONNX model")
        return found

    opset, kept = request.opset if request.opset is not None else DEFAULT_OPSET, KeptWeights()
    return Subject(
        reference=content.reference,
        original=float_onnx(build_net(results.float_model()), opset=opset, kept=kept).model,
        kept=kept,
        simulate=lambda: export("fake_quant"),
        export_qdq=lambda left: export("qdq", left),
        tensors=tensors,
    )
