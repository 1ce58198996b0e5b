"""Quantize a model in one call: our own API, on the same engine as AMCT's functions."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from amct import atomic, log
from amct.calibration.layer_records import complete_record
from amct.config.ptq.quant_config import AnyConfig, plan_of
from amct.config.settings import AdaRoundSettings
from amct.errors import ArgumentError, ArgumentTypeError, ExportError
from amct.export.formats import RECORD
from amct.export.qdq.exporter import Placement
from amct.export.qdq.nodes import Target
from amct.export.qdq.tensor_factors import observed_factors
from amct.export.saving import SaveRequest, save_files
from amct.pytorch.batches import Batches
from amct.pytorch.capture.cached_trace import look
from amct.pytorch.comparing import compare_layers
from amct.pytorch.fake_quant import fake_quant_copy
from amct.pytorch.model_copy import unwrap
from amct.pytorch.onnx.float_onnx import DEFAULT_OPSET, FloatOnnx
from amct.pytorch.onnx.modified_onnx import file_notes
from amct.pytorch.preparation import Preparation, prepare, try_float_onnx
from amct.pytorch.reporting import report_content
from amct.pytorch.watch.balancing import balance_of
from amct.pytorch.watch.calibrating import start_calibration
from amct.pytorch.watch.fast_placement import watch_between
from amct.report.page import write_page
from amct.report.summary import summary_text

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from amct.export.binding import TensorFactors
    from amct.model import Skip
    from amct.pytorch.batches import BatchInputs
    from amct.pytorch.preparation import AdaRoundMode
    from amct.record import Record
    from amct.report.compare import LayerComparison
    from amct.report.measuring import Metric

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class IoOptions:
    """Names and open axes of the exported models, as in ``torch.onnx.export``."""

    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: Mapping[str, Any] | None = None


def quantize(
    model: nn.Module,
    calibration_data: object,
    config: AnyConfig = None,
    *,
    inputs: BatchInputs | None = None,
    io: IoOptions | None = None,
    adaround: AdaRoundMode = "plain",
) -> QuantizedModel:
    """Quantize a model with calibration data: fold batch norms, quantize weights, find the ranges of activations.

    Without a config: IFMR with offset for activations, ARQ per output channel for weights, 8 bits, every layer that can
    be quantized, all the data.

    Args:
        model: any nn.Module; it stays as it is.
        calibration_data: a tensor, an iterable of batches or a DataLoader; see ``Batches``.
        config: a simple config (``.cfg``) or full config (``.json``), the latter as a dict, or a ``QuantConfig``.
        inputs: makes of a batch what the model is called with, where its form does not tell: ``lambda b: b["image"]``.
        io: names and open axes of the exported models.
        adaround: "plain" learns by forwards as AMCT does, "fast" from the Gram matrix of each layer's input.

    Raises:
        AmctError: a subclass says what is wrong: config, model, data or files.
    """
    log.start("amct_pytorch")
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if adaround not in ("plain", "fast"):
        raise ArgumentError(f'adaround: expected "plain" or "fast", got {adaround!r}')
    io = io or IoOptions()
    batches = Batches(unwrap(model), calibration_data, inputs)
    args, kwargs = batches.first()
    traced = look(
        model,
        (*args, kwargs),
        input_names=io.input_names,
        output_names=io.output_names,
        dynamic_axes=io.dynamic_axes,
    )
    plan, open_ended = plan_of(config, traced.config_layers(), batches.length)
    if plan.balanced or any(isinstance(layer.weight, AdaRoundSettings) for layer in plan.enabled):
        batches.keep()
    limit = None if open_ended else plan.batch_num
    preparation = prepare(
        traced,
        plan,
        balance=balance_of(traced, plan, batches.limited(limit)),
        data=lambda: batches.limited(limit),
        adaround=adaround,
    )
    onnx = try_float_onnx(preparation)
    between = watch_between(preparation, onnx) if isinstance(onnx, FloatOnnx) else None
    calibration = start_calibration(preparation, between=between)
    for args, kwargs in batches.limited(limit):
        calibration.model(*args, **kwargs)
    if open_ended:
        calibration.session.finish()
    result = calibration.session.result
    return QuantizedModel(
        preparation,
        complete_record(preparation.record(), result),
        observed_factors(result.tensors) if between is not None else None,
        onnx,
    )


class QuantizedModel:
    """A quantized model: its factors, its simulation in torch, and its way into files.

    Attributes:
        record: The quantization factors of every layer.
    """

    def __init__(
        self,
        preparation: Preparation,
        record: Record,
        tensors: Mapping[str, TensorFactors] | None,
        onnx: FloatOnnx | ExportError,
    ) -> None:
        self.record = record
        self._preparation = preparation
        self._tensors = tensors
        self._onnx = {DEFAULT_OPSET: onnx}

    @cached_property
    def model(self) -> nn.Module:
        """The quantized model simulated in torch, for evaluation; an ordinary module in eval mode."""
        return fake_quant_copy(self._preparation, self.record)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that are quantized, in execution order."""
        return tuple(self._preparation.weights)

    @property
    def float_places(self) -> dict[str, str]:
        """Each quantized layer, and the module of the original model with the same output: itself or its batch norm."""
        return {name: self._preparation.fused.fusions.get(name, name) for name in self.layers}

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """What stays float, and why."""
        return self._preparation.skips

    def summary(self) -> str:
        """What was quantized, what was folded, what stays float and why, as text."""
        name = type(self._preparation.traced.model).__name__
        return summary_text(name, self.record, len(self._preparation.fused.fusions), self.skipped)

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
            opset: 16 to 21.

        Returns:
            The files written.

        Raises:
            ArgumentError: an unknown format, placement, target or opset, or an impossible path.
            ExportError: the model cannot be exported.
            FileError: a file cannot be written; nothing was.
        """
        request = SaveRequest.checked(path, formats, placement=placement, target=target)
        needs_onnx = bool(request.formats)
        model = self._float_onnx(opset if opset is not None else DEFAULT_OPSET).model if needs_onnx else None
        return save_files(request, model, self.record, file_notes(self._preparation), self._tensors)

    def compare(self, data: object, inputs: BatchInputs | None = None) -> list[LayerComparison]:
        """Run the float and the quantized model on data, and compare the output of every quantized layer.

        Args:
            data: as ``calibration_data``.
            inputs: as for ``quantize``.
        """
        batches = Batches(self._preparation.fused.model, data, inputs)
        return compare_layers(self._preparation.fused.model, self.model, {name: name for name in self.layers}, batches)

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
            metric: ``metric(output, batch) -> float``, the mean over one batch, which is as the data gives it. It is
                called for both models; batches count as much as they have samples. Its name is shown.
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
        reference = self._preparation.fused.model
        batches = Batches(reference, data, inputs).with_originals() if data is not None else None
        write_page(where, report_content(self._preparation, self.record, self.model, batches, metric, files))
        return where

    def _float_onnx(self, opset: int) -> FloatOnnx:
        if opset not in self._onnx:
            self._onnx[opset] = self._preparation.float_onnx(opset)
        onnx = self._onnx[opset]
        if isinstance(onnx, ExportError):
            raise onnx
        return onnx
