"""Quantize a float ONNX model in one call."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct import atomic, log
from amct.calibration.layer_records import complete_record
from amct.config.ptq.quant_config import AnyConfig, plan_of
from amct.export.fake_quant import fake_quant_model
from amct.export.formats import RECORD
from amct.export.qdq.exporter import Placement
from amct.export.qdq.nodes import Target
from amct.export.qdq.tensor_factors import observed_factors
from amct.export.saving import SaveRequest, layer_factors, save_files
from amct.export.writer import model_opset
from amct.onnx_model.batches import Batches
from amct.onnx_model.calibrating import balance_factors, calibrate
from amct.onnx_model.comparing import Pair
from amct.onnx_model.layers import find_all_layers
from amct.onnx_model.opset import with_opset
from amct.onnx_model.preparation import Preparation, fold_as_planned, prepare
from amct.onnx_model.reading import read_model
from amct.onnx_model.reporting import Reported, report_content
from amct.onnx_model.runtime import Runner
from amct.report.measuring import Measuring
from amct.report.page import write_page
from amct.report.summary import summary_text

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.export.binding import TensorFactors
    from amct.model import Skip
    from amct.onnx_model.batches import BatchInputs, Feeds
    from amct.onnx_model.reading import AnyModel
    from amct.record import Record
    from amct.report.compare import LayerComparison
    from amct.report.measuring import Metric


def quantize(
    model: AnyModel, calibration_data: object, config: AnyConfig = None, *, inputs: BatchInputs | None = None
) -> QuantizedModel:
    """Quantize a float ONNX model: fold batch norms, quantize weights, find the ranges of activations.

    Without a config: IFMR with offset for activations, ARQ per output channel for weights, 8 bits, every layer that can
    be quantized, all the data. A layer is called by the name of its node; its type in a config is that of the same
    layer in PyTorch ("Conv2d", "Linear", "AvgPool2d", "LSTM", …).

    Args:
        model: the path of a file, its bytes, or a ModelProto, which stays as it is.
        calibration_data: an array, a dict of arrays by input name, or an iterable of batches; see ``Batches``.
        config: a simple config (``.cfg``) or full config (``.json``), the latter as a dict, or a ``QuantConfig``.
        inputs: makes of a batch what the model is fed with, where its form does not tell: ``lambda b: b["image"]``.

    Raises:
        AmctError: a subclass says what is wrong: model, config, data or files.
    """
    log.start("amct_onnx")
    source = read_model(model)
    found = find_all_layers(source.model)
    batches = Batches(source.model, calibration_data, inputs)
    example = batches.first()
    plan, open_ended = plan_of(config, found.config_layers(), batches.length)
    if plan.balanced:
        batches.keep()
    limit = None if open_ended else plan.batch_num
    folded = fold_as_planned(source, plan)
    balance = balance_factors(folded.model, plan, batches.limited(limit))
    preparation = prepare(source, plan, found, folded, balance)
    result = calibrate(preparation, batches.limited(limit), open_ended=open_ended)
    tensors = observed_factors(result.tensors) if preparation.between is not None else None
    return QuantizedModel(preparation, complete_record(preparation.record(), result), tensors, example)


class QuantizedModel:
    """A quantized model: its factors, its simulation, and its way into files.

    Attributes:
        record: The quantization factors of every layer.
    """

    def __init__(
        self,
        preparation: Preparation,
        record: Record,
        tensors: Mapping[str, TensorFactors] | None,
        example: Feeds,
    ) -> None:
        self.record = record
        self._preparation = preparation
        self._tensors = tensors
        self._example = example

    @cached_property
    def model(self) -> ModelProto:
        """The quantized model simulated by standard operators, as ``fake_quant`` files have it."""
        factors = {name: layer_factors(entry) for name, entry in self.record.items()}
        return fake_quant_model(self._preparation.folded.model, self._preparation.bindings, factors).model

    def __call__(self, batch: object, *, inputs: BatchInputs | None = None) -> dict[str, NDArray[Any]]:
        """Run the simulated model on one batch; returns its outputs by name."""
        feeds = Batches(self._preparation.source.model, [batch], inputs).first()
        return self._runner.run(feeds)

    @cached_property
    def _runner(self) -> Runner:
        return Runner(self.model)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that are quantized, in graph order."""
        return tuple(self._preparation.weights)

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """What stays float, and why."""
        return self._preparation.skips

    def summary(self) -> str:
        """What was quantized, what was folded, what stays float and why, as text."""
        folded = len(self._preparation.folded.fusions)
        return summary_text(self._preparation.source.name, self.record, folded, self.skipped)

    def save(
        self,
        path: str | os.PathLike[str],
        formats: Iterable[str] = ("qdq", "deploy", "fake_quant", RECORD),
        *,
        placement: str = Placement.FAST.value,
        target: str = Target.PORTABLE.value,
        opset: int | None = None,
    ) -> list[Path]:
        """Write the quantized model as ``<path>_qdq_model.onnx``, ``<path>_quant.json`` and so on.

        Args:
            path: ``folder/prefix``.
            formats: of "qdq" (onnxruntime's integer kernels), "deploy" (Ascend), "fake_quant" (simulation by standard
                operators) and "record" (``<path>_record.txt``, the factors).
            placement: of the QDQ file: "fast" also quantizes between the layers, "exact" only what the record says.
            target: of the QDQ file: "portable" (7-bit weights, right on every CPU), "vnni" or "exact8".
            opset: 16 to 21; None keeps that of the model, or the nearest of these.

        Returns:
            The files written.

        Raises:
            ArgumentError: an unknown format, placement, target or opset, or an impossible path.
            ModelError: the model cannot be converted to this opset.
            ExportError: the model cannot be exported.
            FileError: a file cannot be written; nothing was.
        """
        request = SaveRequest.checked(path, formats, placement=placement, target=target)
        model = self._preparation.folded.model
        model = with_opset(model, opset if opset is not None else model_opset(model))
        return save_files(request, model, self.record, self._preparation, self._tensors)

    def compare(self, data: object, inputs: BatchInputs | None = None) -> list[LayerComparison]:
        """Run the float and the quantized model on data, and compare the output of every quantized layer.

        Args:
            data: as ``calibration_data``.
            inputs: as for ``quantize``.
        """
        pair = Pair.of(self._preparation.folded.model, self.model)
        measuring = Measuring({})
        for _ in pair.run(Batches(pair.reference, data, inputs), measuring):
            pass
        measured = measuring.result()
        return [measured.layers[name] for name in self.layers if name in measured.layers]

    def report(
        self,
        path: str | os.PathLike[str],
        data: object = None,
        metric: Metric | None = None,
        *,
        inputs: BatchInputs | None = None,
        files: Iterable[str | os.PathLike[str]] = (),
    ) -> Path:
        """Run the float and the quantized model on data, and write what was found as one HTML file.

        Args:
            path: of the HTML file.
            data: as ``calibration_data``, best with labels; None: the first calibration batch.
            metric: ``metric(output, batch) -> float``, the mean over one batch, which is as the data gives it. The
                output is an array, of a model with several outputs a dict of arrays by name.
            inputs: as for ``quantize``.
            files: whose sizes are shown, such as those that ``save`` returned.

        Returns:
            The path.

        Raises:
            ArgumentTypeError: the data is of no known form, or the metric gives no number.
            ArgumentError: a metric without data.
            CalibrationError: there is no data.
            FileError: the file cannot be written, or one of ``files`` cannot be looked at.
        """
        where = Path(path)
        atomic.check_writable(where.parent)
        reported = Reported(
            preparation=self._preparation, record=self.record, simulated=self.model, example=self._example
        )
        batches = Batches(self._preparation.source.model, data, inputs) if data is not None else None
        write_page(where, report_content(reported, batches, metric, files))
        return where
