"""Checks the files of a Caffe save: the written pairs run in our engine, the ONNX files in onnxruntime."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.caffe.comparing import compared_nets
from amct.caffe.engine.layer import find_layer_class
from amct.caffe.engine.messages import new_message
from amct.caffe.model import read_quantized_model, run_net
from amct.caffe.proto_merge import CustomSchema
from amct.errors import AmctError
from amct.export.check.batch import batch_beside
from amct.export.check.losses import (
    SHARE,
    WORSE,
    ComparedBatch,
    Reference,
    UnusableFileError,
    compared,
    fewest_batches,
    is_worse,
    say_checked,
    say_worse,
)
from amct.memory import give_back_freed
from amct.numerics.similarity import rows_of
from amct.pipeline.compare import first_outputs, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from amct.caffe.engine.net import Net
    from amct.caffe.model import CaffeModel
    from amct.caffe.ptq.deploy import Results
    from amct.export.check.checking import FileToCheck
    from amct.export.check.losses import Outputs
    from amct.model.quant_json import FileCheck

logger = logging.getLogger(__name__)


def reference_beside(record_file: Path, results: Results) -> Reference | None:
    """Run the float net and the fake-quant net on the batch kept beside a record, or on random inputs.

    Returns:
        The outputs; None if the net does not run, such as one that selects boxes on random inputs, or has layers that
        only the user's own Caffe has, which calibrated it. The log says so.
    """
    unknown = sorted({layer.type for layer in results.folded_model.layers if find_layer_class(layer.type) is None})
    if unknown:
        logger.warning(
            "the saved files are not checked: layer types %s are unknown here, so the files run in your own Caffe "
            "only; classes given to amct.extend.register_caffe_layer run them here too",
            ", ".join(unknown),
        )
        return None
    try:
        net = results.folded_model.build(())
        inputs, origin = net_batch_beside(record_file, net)
    except AmctError as error:
        logger.warning("the saved files are not checked: the net does not run: %s", error)
        return None
    return reference_on(results, inputs, origin if inputs else "the data of the net's own layers", net)


def net_batch_beside(record_file: Path, net: Net) -> tuple[dict[str, NDArray[Any]], str]:
    """The inputs that a net is run on after its calibration, and what they are; a net takes other sizes too."""
    wanted = {name: (net.blob(name).shape, np.dtype(np.float32)) for name in net.inputs}
    return batch_beside(record_file, wanted, any_size=True)


def reference_on(
    results: Results, inputs: Mapping[str, NDArray[Any]], origin: str, net: Net | None = None
) -> Reference | None:
    """Run the float net and the fake-quant net on a batch; None if they do not run, and the log says so.

    ``net`` is the float net, if it is built already.
    """
    net = net or results.folded_model.build(())
    try:
        expected = list(run_net(net, inputs).items())
        del net
        give_back_freed()
        simulated = list(run_net(results.fake_quant().model.build(()), inputs).items())
        return Reference(inputs=inputs, origin=origin, expected=expected, simulated=simulated)
    except AmctError as error:
        logger.warning("the saved files are not checked: the net does not run on %s: %s", origin, error)
        return None


def content_digest(model: CaffeModel) -> bytes:
    """A digest of all that decides what a net computes: its layers and their blobs."""
    digest = hashlib.sha256(model.net.SerializeToString(deterministic=True))
    for layer in model.layers:
        for tensor in model.weights.get(layer.name, ()):
            digest.update(f"{layer.name} {tensor.dtype} {tensor.numel()} ".encode())
            digest.update(tensor.detach().cpu().reshape(-1).numpy().data)
    return digest.digest()


def _with_simulation(reference: Reference, run: Callable[[Mapping[str, NDArray[Any]]], Outputs]) -> Reference:
    """The reference with the outputs of the simulation on as many batches as a check needs."""
    inputs = [batch.inputs for batch in reference.batches]
    found = first_outputs(run, inputs, fewest_batches(reference.inputs), SHARE * reference.seconds)
    first, *further = (
        replace(batch, simulated=outputs) for batch, outputs in zip(reference.batches, found, strict=False)
    )
    return replace(first, further=tuple(further))


class PairCheck:
    """Runs written pairs of prototxt and caffemodel and compares them with the float net.

    Args:
        reference: The batch, and the outputs of the float net and of the simulation. Without the latter, the simulation
            is run, or the pair that holds just the same net and runs anyway.
        results: The quantized model.
    """

    def __init__(self, reference: Reference, results: Results) -> None:
        self._reference = reference
        self._results = results
        net = results.folded_model.net
        self._schema = None if isinstance(net, type(new_message("NetParameter"))) else CustomSchema.of(net)

    def simulated(self) -> Reference:
        """The reference with the outputs of the simulation."""
        if self._reference.simulated is None:
            net = self._results.fake_quant().model.build(())
            self._reference = _with_simulation(self._reference, lambda inputs: list(run_net(net, inputs).items()))
        return self._reference

    def check(self, file: FileToCheck, simulation: bytes | None = None) -> FileCheck:
        """Run one pair; ``simulation`` is the digest of the simulation, if the pair should hold it.

        Raises:
            ExportError: The pair cannot be read or run.
        """
        give_back_freed()  # blobs of the net before: they are as large as the weights, or larger
        weights = next(path for name, path in file.beside.items() if name.endswith(".caffemodel"))
        try:
            files = read_quantized_model(file.path, weights, self._schema)
            outputs = self._run(files, simulation)
        except AmctError as error:
            raise UnusableFileError(file.target, self._reference.origin, error) from error
        batches = [
            ComparedBatch(inputs=each.inputs, expected=dict(each.expected or ()), simulated=dict(each.simulated or ()))
            for each in self.simulated().batches[: len(outputs)]
        ]
        origin = self._reference.origin if len(outputs) == 1 else f"{len(outputs)} calibration batches"
        result = compared(file.target, origin, batches, outputs)
        if is_worse(result):
            result = replace(result, differs_at=self._first_layer(files))
            say_worse(file.target, result)
        say_checked(file.target, result)
        return result

    def _run(self, files: CaffeModel, simulation: bytes | None) -> list[dict[str, NDArray[np.float32]]]:
        """The outputs of a pair on the first batch, those of a detector, which may find few boxes there, on all.

        Those of the simulation are known then, if it is the same net.
        """
        net, inputs = files.build(()), self._reference.inputs
        outputs = run_net(net, inputs)
        further = [each.inputs for each in self._reference.further if each.expected is not None]
        every = [outputs, *(run_net(net, batch) for batch in (further if rows_of(outputs) else ()))]

        def run(batch: Mapping[str, NDArray[Any]]) -> Outputs:
            return list((outputs if batch is inputs else run_net(net, batch)).items())

        if simulation is None or self._reference.simulated is not None:
            return every
        if simulation == content_digest(files):
            self._reference = _with_simulation(self._reference, run)
        return every[: len(self.simulated().batches)]

    def _first_layer(self, files: CaffeModel) -> str:
        """The first layer whose output is worse in the files than in the simulation; "" if none is."""
        original = self._results.folded_model
        simulated, written = (
            measure(*compared_nets(original, side), [(self._reference.inputs, self._reference.inputs)]).layers
            for side in (self._results.fake_quant().model, files)
        )
        worse = (name for name in simulated if name in written and simulated[name].sqnr - written[name].sqnr > WORSE)
        return next(worse, "")
