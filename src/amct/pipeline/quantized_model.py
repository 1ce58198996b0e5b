"""The result of quantization, for every front door: run it, compare it, report on it, save it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amct import atomic
from amct.calibration import all_ranks
from amct.config.plan import config_text
from amct.errors import AmctError, ArgumentError, ExportError
from amct.export.check.batch import KeptBatches
from amct.export.formats import ExportedModel
from amct.export.onnx.float_weights import large_float_weights, not_said
from amct.export.onnx.kept_weights import owner_of
from amct.export.request import DEFAULT_FORMATS, ExportOptions, Placement, SavePath, SaveRequest, Target
from amct.export.saving import save_files
from amct.memory import free_unused_models
from amct.model.quant_json import (
    QUANT_JSON,
    add_search,
    documents_among,
    integer_tensors,
)
from amct.model.verdict import NOT_JUDGED, worst_of
from amct.pipeline.compare import FileLayers, WrittenFile, measure, qdq_file, reference
from amct.pipeline.sensitivity import LayerSensitivity, layer_sensitivity
from amct.report.content import SIMULATION
from amct.report.filling import ReportSubject, note_measurement, report_content, write_report
from amct.report.measuring import MeasuredReport, check_metric
from amct.report.summary import rounding_text, summary_html, summary_text

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from amct.config.plan import Plan
    from amct.model import Skip
    from amct.model.calibration_data import CalibrationData
    from amct.model.certificate import Certificate, Point
    from amct.model.verdict import Verdict
    from amct.numerics.qparams import LayerQParams, Observed
    from amct.numerics.similarity import LayerComparison
    from amct.pipeline.batches import BatchInputs
    from amct.pipeline.door import ModelOutput, PreparedModel
    from amct.pipeline.weights import QuantizedWeights
    from amct.record import AnyRecord
    from amct.report.content import ReportContent, TrainingContent
    from amct.report.measuring import Measured, Metric

logger = logging.getLogger(__name__)

QUICK = 500_000_000  # bytes of weights times layers up to which a report quantizes each layer alone without being asked


class QuantizedModel:
    """A quantized model: its parameters, its simulation, and its way into files.

    Attributes:
        prepared: The folded model with quantized weights.
        qparams: The quantization parameters of every layer.
        calibration: How much of which data was used; None where nothing was calibrated.
        history: What a search has tried to find these settings; empty without one.
        certificate: What was measured of the result of a search on samples that it has not used.
        handed_in: After training: what the float model that was handed in returned for the first example, to judge by.

    Args:
        prepared: As the attribute.
        layers: The quantization parameters of every layer.
        tensors: Those of tensors between the layers.
        examples: Calibration batches, on which files are checked.
        seconds: The CPU time of the quantization, which limits that of the check.
        weight_bytes: The bytes of the model's weights.
        calibration: The data of the calibration.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        layers: Mapping[str, LayerQParams],
        tensors: Mapping[str, Observed] | None,
        examples: Sequence[Any],
        seconds: float = math.inf,
        weight_bytes: int = 0,
        calibration: CalibrationData | None = None,
    ) -> None:
        self.prepared = prepared
        self.qparams = layers
        self._tensors = tensors
        self._examples = examples
        self._seconds = seconds
        self._weight_bytes = weight_bytes
        self.calibration = calibration
        self.history: tuple[Point, ...] = ()
        self.certificate: Certificate | None = None
        self.handed_in: Callable[[Any], ModelOutput] | None = None
        self._verdict: Verdict | None = None
        self._sensitivity: Sequence[LayerSensitivity] = ()

    @cached_property
    def record(self) -> AnyRecord:
        """The parameters of every layer as AMCT's record has them."""
        return self.prepared.record_of(self.qparams)

    @cached_property
    def model(self) -> Any:  # noqa: ANN401  the door's kind of model
        """The quantized model simulated in its own framework.

        PyTorch: an ordinary ``nn.Module`` in eval mode; with ``part`` the whole model, in which this part is quantized.
        ONNX: a ``ModelProto`` of standard operators. Caffe: a net of our engine.
        """
        return self.prepared.simulation(self.qparams)

    def variant(self, plan: Plan, learned: Mapping[str, QuantizedWeights] = MappingProxyType({})) -> QuantizedModel:
        """The same calibrated model with other layers quantized, or with other weights; nothing is calibrated again.

        Args:
            plan: What is done to each layer; it can switch off layers of this model, and none on.
            learned: Weights whose rounding is learned, for the layers that ask for it.
        """
        prepared, layers = self.prepared.variant(plan, self.qparams, learned)
        known = (self._tensors, self._examples, self._seconds, self._weight_bytes, self.calibration)
        return QuantizedModel(prepared, layers, *known)

    @property
    def examples(self) -> Sequence[Any]:
        """The first calibration batches, as arguments of the model."""
        return self._examples

    def exported(self, placement: str = Placement.FAST.value) -> ExportedModel | ExportError:
        """The QDQ file in memory with its weights, or why there is none."""
        options = ExportOptions(placement=placement)
        request = SaveRequest(where=SavePath.parse(""), formats=("qdq",), options=options)
        try:
            found = self.prepared.files(request, self.qparams, self._tensors, None).export("qdq")
        except ExportError as error:
            return error
        assert isinstance(found, ExportedModel)
        return replace(found, kept=owner_of(found.model))

    @cached_property
    def _run(self) -> Callable[[Any], Any]:
        return self.prepared.runner(self.model)

    @cached_property
    def _run_deploy(self) -> Callable[[Any], Any]:
        return self.prepared.runner(self.prepared.simulation(self.qparams, deploy=True))

    def __call__(self, batch: object, *, inputs: BatchInputs | None = None, deploy: bool = False) -> Any:  # noqa: ANN401  the door's outputs
        """Run the simulated model on one batch.

        Args:
            batch: One batch, in any form that ``quantize`` takes.
            inputs: As for ``quantize``.
            deploy: Run the deploy model in integers (Caffe).

        Returns:
            PyTorch: what the module returns. ONNX and Caffe: the outputs by name.
        """
        arguments = self.prepared.simulation_batches([batch], inputs).first()
        return self._run_deploy(arguments) if deploy else self._run(arguments)

    @property
    def layers(self) -> tuple[str, ...]:
        """The quantized layers, in execution order."""
        return self.prepared.layers

    @cached_property
    def skipped(self) -> tuple[Skip, ...]:
        """Every layer and every other large weight that stays float, every batch norm not folded, with the reason."""
        said = self.prepared.skips
        try:
            model = self.prepared.float_model(None)
        except ExportError:  # there is no graph to look at; saving says why
            return said
        layers = {node.name for node in model.graph.node if node.name.partition("@")[0] in self.prepared.layers}
        return (*said, *not_said(large_float_weights(model, layers), said))

    @property
    def verdict(self) -> Verdict | None:
        """Good, Acceptable, Poor or Broken, and why; None if nothing can be compared.

        Of what was measured last: by a report, by the check of a save (its worst file), or, before both, of the
        simulation on the first calibration batches.
        """
        if self._verdict is None:
            batches = ((example, example) for example in self._examples)
            measured = measure(*self.prepared.compared_models(self.qparams), batches, before=self.handed_in)
            self._verdict = measured.verdict(SIMULATION, is_trained=self.handed_in is not None)
        return self._verdict

    def summary(self) -> str:
        """What was quantized, what was folded, what stays float and why, and the verdict, as text."""
        text = summary_text(self.prepared.name, self.record, self._folded_count, self.skipped)
        lines = [line for line in (text, rounding_text(self.qparams.values())) if line]
        lines += [] if self.calibration is None else [f"calibrated on {self.calibration}"]
        lines += [] if self.certificate is None else [f"certificate {self.certificate}"]
        return "\n".join([*lines, f"verdict {self.verdict or NOT_JUDGED}"])

    def __repr__(self) -> str:
        text = summary_text(self.prepared.name, self.record, self._folded_count, self.skipped)
        return f"<{text.splitlines()[0]}>"

    def _repr_html_(self) -> str:
        """The summary in a notebook."""
        return summary_html(self.prepared.name, self.record, self._folded_count, self.skipped)

    @property
    def _folded_count(self) -> int:
        return sum(len(names) for names in self.prepared.folded_layers.values())

    def save(
        self,
        path: str | os.PathLike[str],
        formats: Iterable[str] = DEFAULT_FORMATS,
        *,
        placement: str = Placement.FAST.value,
        target: str = Target.PORTABLE.value,
        opset: int | None = None,
        batch_size: int | None = None,
        check: bool = True,
    ) -> list[Path]:
        """Write the quantized model as ``<path>_qdq_model.onnx``, ``<path>_quant.json`` and so on.

        Before the files get their names each is run on a calibration batch and compared with the float model; the
        numbers are in ``quant.json``. A file that is worse than the simulation or slower than the float model is
        reported in the log.

        Args:
            path: ``folder/prefix``.
            formats: Of "qdq" (ONNX for onnxruntime's integer kernels), "deploy" (for the chip: Ascend ONNX, or a Caffe
                pair of a Caffe model), "fake_quant" (simulation by standard operators, or a Caffe pair), "record" (the
                factors), and the names of registered exporters.
            placement: Of the QDQ file: "fast" also quantizes tensors between the layers, "exact" only what the record
                says, "auto" takes the fastest of both and float for each part of the model, as timed on this machine.
            target: Of the QDQ file: "portable" (neighbouring weights bounded, right on every CPU), "vnni" or "exact8".
            opset: 16 to 21; None: that of the model, or the door's default.
            batch_size: The only one that the ONNX files take, for programs that ask for fixed sizes; None: files take
                batches of any size where the model can.
            check: Whether the written files are run; without, a file that cannot be used is not noticed.

        Returns:
            The files written. Of several processes that calibrated together only that of rank 0 writes; the others
            write nothing and return an empty list at once.

        Raises:
            ArgumentError: An unknown format, placement, target or opset, an impossible path, or a batch size that the
                model cannot take.
            ExportError: The model cannot be exported, or a written file cannot be used; nothing was saved.
            FileError: A file cannot be written; nothing was.
        """
        options = ExportOptions(placement=placement, target=target)
        request = SaveRequest.checked(path, formats, options=options, opset=opset)
        if batch_size is not None:
            self._check_batch_size(batch_size)
        is_judged = self.certificate is not None
        request = replace(request, calibration=self.calibration, batch_size=batch_size, is_judged=is_judged)
        if not all_ranks().is_first:
            return []
        compared = None
        if check and request.models:
            size = batch_size if self.prepared.any_batch_size else None
            job = (self.prepared, self.qparams, self._examples, self._seconds)
            compared = reference(*job, batch_size=size, handed_in=self.handed_in)
            free_unused_models(self._weight_bytes)
        saved = save_files(self.prepared.files(request, self.qparams, self._tensors, compared))
        self._verdict = saved.verdict or self._verdict
        certificate = self.certificate
        if certificate is not None and options != ExportOptions():
            certificate = certificate.remarked(f"measured with {ExportOptions()}, saved with {options}")
        if self.history or certificate is not None:
            for file in saved.paths:
                if file.name.endswith(QUANT_JSON):
                    add_search(file, certificate, self.history)
        return saved.paths

    def _check_batch_size(self, size: int) -> None:
        """Check that the files can have this batch size, and can be run with it."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"batch_size: expected at least 1, got {size!r}")
        if self.prepared.any_batch_size:
            return
        own = len(next(iter(self.prepared.onnx_inputs(self._examples[0]).values())))
        if own != size:
            raise ArgumentError(
                f"batch_size={size}: this model cannot be run with other batches than those of the calibration, which "
                f"have {own}; calibrate with batches of {size}"
            )

    def compare(
        self, data: object, inputs: BatchInputs | None = None, *, deploy: bool = False
    ) -> list[LayerComparison]:
        """Run the float and the quantized model on data, and compare the output of every quantized layer.

        Args:
            data: As ``calibration_data`` of ``quantize``.
            inputs: As for ``quantize``.
            deploy: Compare the deploy model in integers instead of the simulation in float (Caffe).
        """
        batches = self.prepared.batches(data, inputs).with_originals()
        models = self.prepared.compared_models(self.qparams, deploy=deploy)
        measured = measure(*models, batches)
        return [measured.layers[name] for name in self.layers if name in measured.layers]

    def sensitivity(self, data: object = None, inputs: BatchInputs | None = None) -> list[LayerSensitivity]:
        """How much each layer alone harms the outputs, the worst first: the cause, where ``compare`` shows the victims.

        One layer at a time is quantized in the float model; nothing is calibrated again, and no labels are needed.

        Args:
            data: As ``calibration_data`` of ``quantize``, of which the first samples are taken (16, or one batch);
                None: those of the calibration.
            inputs: As for ``quantize``.

        Raises:
            ExportError: The model has no ONNX form.
        """
        prepared, examples = self.prepared, self._examples
        if data is not None:
            kept = KeptBatches()
            for batch in prepared.batches(data, inputs):
                kept.notice(batch)
                if kept.is_full:
                    break
            examples = kept.kept
        found = layer_sensitivity(
            self.layers,
            lambda names: prepared.with_only(self.qparams, names),
            [prepared.onnx_inputs(example) for example in examples],
        )
        if data is None:
            self._sensitivity = found
        return found

    def report(
        self,
        path: str | os.PathLike[str],
        data: object = None,
        metric: Metric | None = None,
        *,
        inputs: BatchInputs | None = None,
        files: Iterable[str | os.PathLike[str]] = (),
        training: TrainingContent | None = None,
        before: Callable[[Any], ModelOutput] | float | None = None,
    ) -> Path:
        """Run the float and the quantized model on data, and write what was found as one HTML file.

        Args:
            path: Of the HTML file.
            data: As ``calibration_data``, best with labels; None: the first calibration batch.
            metric: ``metric(output, batch) -> float``, the mean over one batch, which is as the data gives it. It is
                called for both models; batches count as much as they have samples. Its name is shown. The output is
                what the module returns (PyTorch), an array or a dict of arrays (ONNX), a dict of arrays (Caffe).
            inputs: As for ``quantize``.
            files: Files whose sizes are shown, such as those that ``save`` returned. Outputs and metric are measured of
                a QDQ file among them, without one of a Caffe deploy model, else of the simulation. A ``quant.json``
                among them gets the report's SHA-256 and what was measured.
            training: What quantization-aware training did.
            before: Runs the model whose outputs and metric are compared with, or is its metric; None: the float model.

        Returns:
            The path.

        Raises:
            ArgumentTypeError: The data has no known form, or the metric returns no number.
            ArgumentError: A metric without data.
            CalibrationError: There is no data.
            FileError: The file cannot be written, or one of ``files`` cannot be read.
        """
        where = Path(path)
        atomic.check_writable(where.parent)
        listed = [Path(file) for file in files]
        found = self._measured_report(data, metric, inputs, listed, before)
        write_report(where, replace(found.content, training=training), listed)
        self._verdict = found.content.verdict or self._verdict
        note_measurement(found.measured, found.content.layers_of, self._verdict, listed)
        return where

    def file_to_measure(self, files: Iterable[Path]) -> Path | None:
        """The file of a save whose numbers count: the QDQ file, without one the deploy file if it can be computed."""
        listed, name = list(files), self.prepared.deploy_file
        return qdq_file(listed) or next((file for file in listed if name and file.name.endswith(name)), None)

    def measure_file(self, data: object, files: Iterable[Path], page: Path | None = None) -> Measured | None:
        """Compare a file of a save with the float model, layer by layer, and write a report of the same runs.

        Args:
            data: As ``calibration_data``.
            files: The files of the save; a ``quant.json`` among them gets what was measured.
            page: The HTML file of the report, in which all numbers are those of the file; None: no report.

        Returns:
            None, with nothing written, if there is no ``file_to_measure`` or it does not show the output of every
            layer. Else the verdict is of what was measured, unless another file is worse.

        Raises:
            CalibrationError: There is no data.
            FileError: A file cannot be read or written.
        """
        listed = list(files)
        file = self.file_to_measure(listed)
        if file is None:
            return None
        expected, shown = self.prepared.compared_models(self.qparams, deploy=file != qdq_file(listed))
        if file == qdq_file(listed):
            shown = FileLayers(self.prepared, file, self.prepared.output_tensors(self.qparams))
            if not shown.shows_all(self._examples[0]):
                return None
        subject = self._report_subject(listed) if page is not None else None
        measured = measure(
            expected,
            shown,
            self.prepared.batches(data).with_originals(),
            statistics=subject.statistics() if subject is not None else None,
        )
        if page is not None and subject is not None:
            of = {"outputs_of": file.name, "layers_of": file.name}
            write_report(page, report_content(subject, measured, files=listed, **of), listed)
        known = None if self._verdict is None or self._verdict.of == file.name else self._verdict
        self._verdict = worst_of(filter(None, (measured.verdict(file.name), known))) or self._verdict
        note_measurement(measured, file.name, self._verdict, listed)
        return measured

    def report_content(
        self,
        data: object = None,
        metric: Metric | None = None,
        *,
        inputs: BatchInputs | None = None,
        files: Iterable[str | os.PathLike[str]] = (),
    ) -> ReportContent:
        """What ``report`` writes, as plain data; arguments and errors are the same."""
        return self._measured_report(data, metric, inputs, [Path(file) for file in files]).content

    def _measured_report(
        self,
        data: object,
        metric: Metric | None,
        inputs: BatchInputs | None,
        listed: list[Path],
        before: Callable[[Any], ModelOutput] | float | None = None,
    ) -> MeasuredReport:
        check_metric(metric, data)
        prepared, subject = self.prepared, self._report_subject(listed)
        first = self._examples[0]
        batches = iter([(first, first)]) if data is None else prepared.batches(data, inputs).with_originals()
        file, deploy = qdq_file(listed), self.file_to_measure(listed)
        written = WrittenFile(prepared, file) if file is not None else None
        if written is not None and not written.fits(first):
            file = written = None
        deploy = None if qdq_file(listed) is not None else deploy
        runs_before = self.handed_in if data is None else before if callable(before) else None
        measured = measure(
            *prepared.compared_models(self.qparams, deploy=deploy is not None),
            batches,
            statistics=subject.statistics(),
            metric=metric,
            sample_count=prepared.sample_count,
            written=written.run if written is not None else None,
            before=runs_before,
        )
        if isinstance(before, float) and measured.metric is not None:
            measured = replace(measured, metric=(before, measured.metric[1]))
        on = "the first calibration batch" if data is None else None
        layers_of = deploy.name if deploy is not None else SIMULATION
        of = file.name if file is not None else layers_of
        content = report_content(subject, measured, files=listed, measured_on=on, outputs_of=of, layers_of=layers_of)
        by_kept = self.handed_in is not None and runs_before is None and metric is None
        verdict = self.verdict if by_kept else measured.verdict(of, is_trained=runs_before is not None)
        content = replace(content, verdict=verdict)
        return MeasuredReport(content=content, measured=measured)

    def _report_subject(self, listed: list[Path]) -> ReportSubject:
        prepared = self.prepared
        return ReportSubject(
            model=prepared.name,
            layers=tuple(prepared.report_layers(self.qparams)),
            fused=prepared.fused_notes,
            skipped=self.skipped,
            config=config_text(prepared.plan),
            network=prepared.network(integer_tensors(listed)),
            proposals=tuple(text for document in documents_among(listed).values() for text in document.proposals),
            certificate=self.certificate,
            curve=tuple(sorted(self.history, key=lambda each: each.cost)),
            alone={each.layer: each.sqnr for each in self._causes()},
        )

    def _causes(self) -> Sequence[LayerSensitivity]:
        """What is known of each layer alone; measured now if that is quick, because the model is small."""
        if not self._sensitivity and len(self.layers) * self._weight_bytes <= QUICK:
            try:
                self.sensitivity()
            except AmctError as error:
                logger.info("no layer is quantized alone: %s", error)
        return self._sensitivity
