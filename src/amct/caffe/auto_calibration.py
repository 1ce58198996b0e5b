"""AMCT's accuracy-based calibration of Caffe models: layers are rolled back until the user's evaluator is content.

The evaluator gets files: those of the float model, the calibration model, and a fake-quant model for each probe.
The model is calibrated once; every probe is the same calibrated model with other layers left float.
"""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from amct import atomic
from amct.arguments import input_file, output_file
from amct.atomic import FileGroup, read_bytes
from amct.caffe.amct_api import activation_quantize_model, init, weights_quantize_model
from amct.caffe.door import CaffePreparation
from amct.caffe.engine.messages import new_message
from amct.caffe.model import CaffeModel, equal_draws, feed, write_model
from amct.caffe.prototxt import caffe_function
from amct.caffe.ptq.checking import net_batch_beside
from amct.caffe.ptq.save import prefix_of, results_of
from amct.errors import ConfigError
from amct.pipeline.quantized_model import QuantizedModel
from amct.record import write_record
from amct.search.roll_back import AccuracyBasedAutoCalibrationBase, EvaluatorCalls, compared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.atomic import AnyPath
    from amct.caffe.engine.net import Net
    from amct.caffe.ptq.graph import QuantGraph
    from amct.search.roll_back import AutoCalibrationEvaluatorBase, AutoCalibrationStrategyBase, SensitivityBase

logger = logging.getLogger(__name__)


@caffe_function
def accuracy_based_auto_calibration(  # noqa: PLR0913  AMCT's signature
    model_file: AnyPath,
    weights_file: AnyPath,
    model_evaluator: AutoCalibrationEvaluatorBase,
    config_file: AnyPath,
    record_file: AnyPath,
    save_dir: AnyPath,
    strategy: str | AutoCalibrationStrategyBase = "BinarySearch",
    sensitivity: str | SensitivityBase = "CosineSimilarity",
) -> None:
    """Quantize a model, and leave the most sensitive layers float until an evaluator is content.

    Beside the pairs of ``save_model`` three JSON files are written: the sensitivity of each layer, the final config
    (the config file itself is left alone), and in ``amct_log/`` what was tried.

    Args:
        model_file: The prototxt.
        weights_file: The caffemodel.
        model_evaluator: An object of a class derived from ``AutoCalibrationEvaluatorBase``; ``calibration`` and
            ``evaluate`` get the prototxt and the caffemodel of a model.
        config_file: The JSON config of ``create_quant_config``.
        record_file: Where the quantization factors of the result are written.
        save_dir: ``folder/prefix`` of the models.
        strategy: "BinarySearch", or an object of a class derived from ``AutoCalibrationStrategyBase``.
        sensitivity: "CosineSimilarity", "MseSimilarity", or an object of a class derived from ``SensitivityBase``.

    Raises:
        ArgumentError, ArgumentTypeError, ConfigError: An argument or the config is invalid.
        FileError: A file cannot be read or written.
        EvaluatorError: The evaluator raises, returns no number, or does not accept the float model.
        CalibrationError, RecordError: It does not calibrate with enough batches, or the model cannot be quantized.
    """
    calibration = _CaffeCalibration(model_evaluator, strategy, sensitivity)
    originals = input_file(model_file, "model_file"), input_file(weights_file, "weights_file")
    where, record_path = prefix_of(save_dir), output_file(record_file, "record_file")
    content = read_bytes(input_file(config_file, "config_file"))
    atomic.check_writable(where.folder)
    with TemporaryDirectory(prefix="amct_auto_calibration_") as name:
        folder = Path(name)
        graph = init(config_file, *originals, folder / "record.txt")
        if graph.plan.update_bn is not None:
            raise ConfigError(
                f"{config_file}: update_bn needs two calibrations, which an evaluator has not; call the functions from "
                "init to save_model instead, or leave update_bn out"
            )
        calibration.graph, calibration.folder = graph, folder
        found = calibration.run([*map(str, originals)], content, where.folder)
    if found is not None:
        write_record(found.record, record_path)
        found.save(save_dir, ("deploy", "fake_quant"))


class _CaffeCalibration(AccuracyBasedAutoCalibrationBase):
    """That of a net, whose models are files in a folder for the evaluator."""

    graph: QuantGraph
    folder: Path

    def calibrated(self, evaluator: EvaluatorCalls) -> QuantizedModel:
        """The model calibrated by the user's own loop, on the calibration model in files."""
        graph = self.graph
        files = self.folder / "calibration_model.prototxt", self.folder / "calibration_weights.caffemodel"
        weights_quantize_model(graph, *files)
        activation_quantize_model(graph, *files)
        evaluator.calibrate(*map(str, files))
        results = results_of(graph)
        batch, _ = net_batch_beside(graph.calibration_file(), results.folded_model.build(()))
        prepared, layers = CaffePreparation(graph).variant(graph.plan, results.layers)
        return QuantizedModel(prepared, layers, None, [batch])

    def evaluated(self, evaluator: EvaluatorCalls, quantized: QuantizedModel) -> tuple[bool, float]:
        """Of the fake-quant pair."""
        files = self.folder / "probe_fake_quant_model.prototxt", self.folder / "probe_fake_quant_weights.caffemodel"
        with FileGroup() as group:
            write_model(group, _prepared(quantized).caffe_model(quantized.qparams), *files)
        return evaluator.of(*map(str, files))

    def ranking(self, base: QuantizedModel) -> dict[str, float]:
        """Layer by layer, each in a net of its own."""
        prepared = _prepared(base)
        simulated = prepared.caffe_model(base.qparams)
        net = prepared.graph.model.build()
        found: dict[str, list[float]] = {name: [] for name in base.layers}
        for batch in base.examples:
            feed(net, batch)
            with equal_draws():
                net.forward()
            for name, values in found.items():
                expected = net.blob(prepared.graph.model.layer(name).top[0]).tensor
                values.append(compared(self.sensitivity, expected.clone(), _alone(simulated, name, net)))
        return {name: float(np.mean(values)) for name, values in found.items()}


def _prepared(quantized: QuantizedModel) -> CaffePreparation:
    assert isinstance(quantized.prepared, CaffePreparation)
    return quantized.prepared


def _alone(simulated: CaffeModel, name: str, net: Net) -> Any:  # noqa: ANN401  a tensor of the net's own
    """The first output of one layer of a fake-quant model, on its inputs in a net that has run."""
    layer = simulated.layer(name)
    quants = {each.top[0]: each for each in simulated.layers if each.type == "Quant" and each.top[0] in layer.bottom}
    wanted = list(dict.fromkeys(quants[blob].bottom[0] if blob in quants else blob for blob in layer.bottom))
    inputs: Mapping[str, Any] = {blob: net.blob(blob).data for blob in wanted}
    part = CaffeModel(type(simulated.net)(), dict(simulated.weights))
    heads = []
    for blob, values in inputs.items():
        head = new_message("LayerParameter", name=f"input_{blob}", type="Input", top=[blob])
        head.input_param.shape.add().dim.extend(values.shape)
        heads.append(head)
    part.set_layers([*heads, *quants.values(), layer])
    alone = part.build()
    feed(alone, inputs)
    alone.forward()
    return alone.blob(layer.top[0]).tensor
