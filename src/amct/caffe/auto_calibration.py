"""AMCT's accuracy-based calibration of Caffe models: layers are rolled back until the user's evaluator is content.

The evaluator gets files: those of the float model, the calibration model, and a fake-quant model for each probe.
The model is calibrated once; every probe is the same calibrated model with other layers left float.
"""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from amct import atomic
from amct.arguments import input_file, output_file
from amct.atomic import FileGroup, read_bytes
from amct.caffe.amct_api import activation_quantize_model, init, weights_quantize_model
from amct.caffe.door import CaffePreparation
from amct.caffe.model import equal_draws, feed, write_model
from amct.caffe.prototxt import caffe_function
from amct.caffe.ptq.checking import net_batch_beside
from amct.caffe.ptq.save import prefix_of, results_of
from amct.errors import ConfigError
from amct.pipeline.quantized_model import QuantizedModel
from amct.record import write_record
from amct.search.roll_back import AccuracyBasedAutoCalibrationBase, EvaluatorCalls, compared

if TYPE_CHECKING:
    from amct.atomic import AnyPath
    from amct.caffe.engine.messages import ProtoMessage
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
        batch, _ = net_batch_beside(graph.calibration_record, results.folded_model.build(()))
        prepared, layers = CaffePreparation(graph).variant(graph.plan, results.layers)
        return QuantizedModel(prepared, layers, None, [batch])

    def evaluated(self, evaluator: EvaluatorCalls, quantized: QuantizedModel) -> tuple[bool, float]:
        """Of the fake-quant pair."""
        files = self.folder / "probe_fake_quant_model.prototxt", self.folder / "probe_fake_quant_weights.caffemodel"
        with FileGroup() as group:
            write_model(group, _prepared(quantized).caffe_model(quantized.qparams), *files)
        return evaluator.of(*map(str, files))

    def ranking(self, base: QuantizedModel) -> dict[str, float]:
        """Layer by layer, each on the inputs that it gets in the float net."""
        prepared = _prepared(base)
        simulated = prepared.caffe_model(base.qparams)
        net, rounded = prepared.graph.model.build(), simulated.build()
        found: dict[str, list[float]] = {name: [] for name in base.layers}
        for batch in base.examples:
            feed(net, batch)
            with equal_draws():
                net.forward()
            for name, values in found.items():
                quants = [each for each in simulated.layers if each.quant_param.object_layer == name]
                for layer in (*quants, simulated.layer(name)):
                    _take_bottoms(rounded, layer, net)
                start, end = (rounded.layer_names.index(each) for each in (quants[0].name, name))
                rounded.forward(start, end)
                top = simulated.layer(name).top[0]
                values.append(compared(self.sensitivity, net.blob(top).tensor.clone(), rounded.blob(top).tensor))
        return {name: float(np.mean(values)) for name, values in found.items()}


def _prepared(quantized: QuantizedModel) -> CaffePreparation:
    assert isinstance(quantized.prepared, CaffePreparation)
    return quantized.prepared


def _take_bottoms(net: Net, layer: ProtoMessage, other: Net) -> None:
    """Give a layer of a net the bottoms that another net has, too."""
    known = other.named_blobs()
    own = net.layers[net.layer_names.index(layer.name)]
    for name, blob in zip(layer.bottom, own.bottom_blobs, strict=True):
        if name in known:
            blob.set_tensor(known[name].tensor)
