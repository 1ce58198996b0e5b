"""Checks the files of a Caffe save: the written pairs run in our engine, the ONNX files in onnxruntime."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.caffe.comparing import ModelSide, QuantizedFiles, compared_nets
from amct.caffe.engine.messages import new_message
from amct.caffe.proto_merge import CustomSchema
from amct.caffe.ptq.qdq import onnx_subject
from amct.caffe.running import build_net, run_net
from amct.errors import AmctError
from amct.export.check.batch import CALIBRATION, RANDOM, batch_path, read_batch, seeded_batch
from amct.export.check.checking import OnnxCheck
from amct.export.check.outcome import ComparedBatch, UnusableFileError, compared, is_worse, say_checked, warn_worse
from amct.export.check.reference import WORSE, Reference
from amct.export.formats import file_name
from amct.export.saving import check_file
from amct.ptq.compare import measure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from amct.atomic import FileGroup
    from amct.caffe.engine.net import Net
    from amct.caffe.ptq.deploy import Results
    from amct.export.exported import ExportReport
    from amct.export.save_path import SavePath
    from amct.export.saving import SavedContent, SaveRequest
    from amct.model.quant_json import FileCheck

logger = logging.getLogger(__name__)


def reference_beside(record_file: Path, results: Results) -> Reference | None:
    """Run the float net and the fake-quant net on the batch kept beside a record, or on random inputs.

    Returns:
        The outputs; None if the net does not run on random inputs, such as one that selects boxes. The log says so.
    """
    net = build_net(results.folded_model, keep_blobs=())
    shapes = {net.graph.blob_names[index]: net.graph.blobs[index].shape for index in net.graph.inputs}
    found = read_batch(record_file)
    if not isinstance(found, str) and set(found) != set(shapes):
        found = f"{batch_path(record_file).name} does not fit the inputs of the net"
    if isinstance(found, str):
        if shapes:
            logger.info("the files are checked on random inputs, not on calibration data: %s", found)
        inputs, origin = seeded_batch({name: (shape, np.dtype(np.float32)) for name, shape in shapes.items()}), RANDOM
    else:
        logger.info("the files are checked on the calibration batch in %s", batch_path(record_file))
        inputs, origin = found, CALIBRATION
    return reference_on(results, inputs, origin if shapes else "the data of the net's own layers", net)


def reference_on(
    results: Results, inputs: Mapping[str, NDArray[Any]], origin: str, net: Net | None = None
) -> Reference | None:
    """Run the float net and the fake-quant net on a batch; None if they do not run, and the log says so.

    ``net`` is the float net, if it is built already.
    """
    net = net or build_net(results.folded_model, keep_blobs=())
    try:
        return Reference(
            inputs=inputs,
            origin=origin,
            expected=list(run_net(net, inputs).items()),
            simulated=list(run_net(build_net(results.fake_quant().model, keep_blobs=()), inputs).items()),
        )
    except AmctError as error:
        logger.warning("the saved files are not checked: the net does not run on %s: %s", origin, error)
        return None


def pair_of(where: SavePath, kind: str) -> tuple[Path, Path]:
    """The prototxt and the caffemodel of a kind of net."""
    return where.file(f"{kind}_model.prototxt"), where.file(f"{kind}_weights.caffemodel")


def check_save(
    group: FileGroup,
    results: Results,
    request: SaveRequest,
    content: SavedContent,
    pairs: Sequence[str],
) -> dict[Path, FileCheck]:
    """Run the Caffe pairs of a group, which have their temporary names.

    Args:
        group: The files.
        results: The quantized model.
        request: The formats and the save path.
        content: The factors, and what the files are compared with.
        pairs: The kinds of Caffe nets.

    Returns:
        The results by path of the prototxt.

    Raises:
        ExportError: A file cannot be used.
    """
    if content.reference is None:
        return {}
    check = PairCheck(content.reference, results)
    return {files[0]: check.check(group, *files) for files in (pair_of(request.where, kind) for kind in pairs)}


def check_onnx(
    group: FileGroup,
    results: Results,
    request: SaveRequest,
    content: SavedContent,
    reports: dict[str, ExportReport | None],
) -> dict[Path, FileCheck]:
    """Run the ONNX files of a group, whose reports are given by format; a repaired file is replaced.

    Returns:
        The results by path.

    Raises:
        ExportError: A file cannot be used.
    """
    models = {name: report for name, report in reports.items() if report is not None}
    if content.reference is None or not models:
        return {}
    check, found = OnnxCheck(onnx_subject(results, content, request)), {}
    for name, report in models.items():
        found[request.where.file(file_name(name))], reports[name] = check_file(
            check, group, request.where, name, report
        )
    return found


class PairCheck:
    """Runs written pairs of prototxt and caffemodel and compares them with the float net.

    Args:
        reference: The batch, and the outputs of the float net and of the simulation.
        results: The quantized model.
    """

    def __init__(self, reference: Reference, results: Results) -> None:
        self._reference = reference
        self._results = results
        net = results.folded_model.net
        self._schema = None if isinstance(net, type(new_message("NetParameter"))) else CustomSchema.of(net)
        outputs = [dict(each or ()) for each in (reference.expected, reference.simulated)]
        self._batch = ComparedBatch(inputs=reference.inputs, expected=outputs[0], simulated=outputs[1])

    def check(self, group: FileGroup, prototxt: Path, caffemodel: Path) -> FileCheck:
        """Run one pair of a group.

        Raises:
            ExportError: The pair cannot be read or run.
        """
        try:
            files = QuantizedFiles(group.temporary(prototxt), group.temporary(caffemodel), self._schema)
            outputs = run_net(files.build(()), self._reference.inputs)
        except AmctError as error:
            raise UnusableFileError(prototxt, self._reference.origin, error) from error
        result = compared(prototxt, self._reference.origin, [self._batch], [outputs])
        if is_worse(result):
            result = replace(result, differs_at=self._first_layer(files))
            warn_worse(prototxt, result)
        say_checked(prototxt, result)
        return result

    def _first_layer(self, files: QuantizedFiles) -> str:
        """The first layer whose output is worse in the files than in the simulation; "" if none is."""
        original = ModelSide(self._results.folded_model)
        simulated, written = (
            measure(*compared_nets(original, side), [(self._reference.inputs, self._reference.inputs)]).layers
            for side in (ModelSide(self._results.fake_quant().model), files)
        )
        worse = (name for name in simulated if name in written and simulated[name].sqnr - written[name].sqnr > WORSE)
        return next(worse, "")
