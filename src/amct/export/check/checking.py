"""Checks the ONNX files of one save before they get their names: each is loaded, run and compared with the float model.

A file that cannot be loaded or run is an error, so that nothing is saved. A file that is worse than the simulation is
reported with the first tensor that is; the fast QDQ file is repaired, if its further tensors are the cause.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import onnx
from onnx import ModelProto, TensorProto, defs

from amct.errors import AmctError, ExportError, ModelError
from amct.export.check.batch import LARGEST_BATCH
from amct.export.check.causes import first_difference
from amct.export.check.child import LARGE, OutOfTimeError, measured_in_child, similarity_of
from amct.export.check.integers import standard_model
from amct.export.check.losses import (
    ENOUGH,
    SHARE,
    WORSE,
    ComparedBatch,
    UnusableFileError,
    by_name,
    compared,
    expected_loss,
    fewest_batches,
    is_worse,
    judged_by,
    lost,
    needs_action,
    outcome,
    output_similarity,
    say_checked,
    say_different,
    say_slow,
    say_worse,
    sure_loss,
)
from amct.export.check.repair import CHEAP, GOOD_COST, MOST_COST, Repair
from amct.export.check.running import BUDGET, LoadedModel, Speed, outputs_in_parts, speed_apart, speed_of, timed_inputs
from amct.export.onnx.kept_weights import KeptWeights, read_parts
from amct.export.onnx.messages import parameter_bytes
from amct.export.request import FLOAT
from amct.memory import LARGE_MODEL
from amct.model.quant_json import FileCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from amct.export.check.losses import Reference
    from amct.export.formats import ExportedModel, ExportReport
    from amct.numerics.qparams import Observed

logger = logging.getLogger(__name__)

OWN_FORMATS = ("qdq", "deploy", "fake_quant", FLOAT)
_KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
_PACKED_BITS = 4
FEW_BYTES = 16_000_000
"""Parameters of a model that may be loaded twice."""
REPAIRED = 0.75
"""Decibels by which a QDQ file must be worse than the simulation to be repaired: on other data it may be ``WORSE``."""
WELL_ABOVE = 10.0
"""By how many dB the float ONNX model must be nearer to the front door's model than the simulation is."""
_FLOAT_TYPES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


@dataclass(frozen=True, kw_only=True, eq=False)
class FileToCheck:
    """A file to check.

    Attributes:
        format: The name of its format.
        path: The file as written, still under its temporary name.
        target: The path that it will have.
        report: What its exporter did.
        beside: Its other files (of large tensors; the caffemodel of a prototxt) under their temporary names, by the
            names that they will have.
        is_model: Whether it is an ONNX model.
    """

    format: str
    path: Path
    target: Path
    report: ExportReport
    beside: Mapping[str, Path] = field(default_factory=dict)
    is_model: bool = True

    def model(self) -> ModelProto:
        """The content of the file, without that of the files beside it."""
        return onnx.load_model(self.path, load_external_data=False)


@dataclass(kw_only=True, eq=False)
class OnnxCheck:
    """Checks the files of one save on the batches of a reference; models that several are compared with run once.

    Attributes:
        reference: The batch and the outputs of the front door's own models.
        original: The float ONNX model, folded.
        simulate: Makes the fake-quant form of ``original``.
        export_qdq: Exports the QDQ file without quantizing some of the tensors between the layers; None if the file
            has no such tensors.
        tensors: The factors of those tensors.
        kept: The weights beside ``original``, if nobody else owns them.
    """

    reference: Reference
    original: ModelProto
    simulate: Callable[[], ExportedModel]
    export_qdq: Callable[[Collection[str]], ExportedModel] | None = None
    tensors: Mapping[str, Observed] | None = None
    kept: KeptWeights | None = None

    @property
    def _inputs(self) -> Mapping[str, NDArray[Any]]:
        return self.reference.inputs

    @property
    def _float_outputs(self) -> list[str]:
        types = {value.name: value.type.tensor_type.elem_type for value in self.original.graph.output}
        return [name for name, kind in types.items() if kind in _FLOAT_TYPES]

    @cached_property
    def _is_large(self) -> bool:
        """Whether two models at a time would need too much memory."""
        return parameter_bytes(self.original) > FEW_BYTES

    @cached_property
    def _loaded_original(self) -> LoadedModel:
        return LoadedModel(self.original)

    def _simulate(self) -> ExportedModel:
        """The fake-quant form, made once unless it is large."""
        return self.simulate() if self._is_large else self._simulation

    @cached_property
    def _simulation(self) -> ExportedModel:
        return self.simulate()

    @cached_property
    def _original_outputs(self) -> Mapping[str, NDArray[Any]]:
        return self._loaded_original.run(self._inputs)

    @cached_property
    def _batches(self) -> list[ComparedBatch]:
        """The batches with their outputs by name, of further ones up to ``LARGEST_BATCH`` bytes and a share of the job.

        Where the front door has no outputs of its own, those of the float ONNX model and of its fake-quant form count.
        """
        names, batches = self._float_outputs, self.reference.batches
        expected = [by_name(batch.expected, names) for batch in batches]
        simulated = [by_name(batch.simulated, names) for batch in batches]
        if any(outputs is None for outputs in expected):
            # A large model is loaded again to be timed.
            original = LoadedModel(self.original, lean=True) if self._is_large else self._loaded_original
            expected = list(self._outputs(original, [batch.inputs for batch in batches]))
            del original
        if any(outputs is None for outputs in simulated):
            simulation = self._simulate()
            loaded = LoadedModel(simulation.model, lean=True)
            simulated = list(self._outputs(loaded, [batch.inputs for batch in batches[: len(expected)]]))
        return [
            ComparedBatch(inputs=batch.inputs, expected=exact or {}, simulated=rounded or {})
            for batch, exact, rounded in zip(batches, expected, simulated, strict=False)
        ]

    def _outputs(
        self, model: LoadedModel, batches: Sequence[Mapping[str, NDArray[Any]]]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """The outputs of one of the models that a file is compared with."""
        size, end = 0, time.process_time() + SHARE * self.reference.seconds
        for number, inputs in enumerate(batches):
            late = number >= fewest_batches(inputs) and time.process_time() > end
            if number and (late or size >= LARGEST_BATCH // 2):
                return
            outputs = model.kept_outputs(inputs)
            found = {name: outputs[name] for name in self._float_outputs}
            size += sum(array.nbytes for array in found.values())
            yield found

    @cached_property
    def _float_sqnr(self) -> float | None:
        """How near the float ONNX model is to the front door's own; None where that has no outputs."""
        expected = by_name(self.reference.expected, self._float_outputs)
        if expected is None:
            return None
        large = self._is_large  # it was freed after it was timed, and is not loaded as a whole again
        outputs = outputs_in_parts(self.original, self._inputs) if large else self._original_outputs
        found = output_similarity(expected, outputs)[0]
        return None if found is None else found.sqnr

    def _batches_for(self, file: FileToCheck) -> list[ComparedBatch]:
        """All batches for a QDQ file; the other formats have the integers of the simulation: one batch shows it."""
        return self._batches if file.format == "qdq" else self._batches[:1]

    def check(self, file: FileToCheck) -> tuple[FileCheck, ExportedModel | None]:
        """Run one file.

        Returns:
            What was measured, and the repaired content if the file must be written again.

        Raises:
            ExportError: the file cannot be loaded or run, although the float model can be.
        """
        reason = _foreign_operator(file)
        if reason:
            return self._not_checked(file, reason), None
        if parameter_bytes(self.original) >= LARGE:
            return self._in_child(file), None
        try:
            further = self._batches_for(file)[1:]
            loaded, outputs = self._first_run(file)
        except ExportError as error:
            return self._not_checked(file, str(error)), None
        except AmctError as error:
            return self._unusable(file, error), None
        if loaded is not None:
            outputs += [loaded.kept_outputs(batch.inputs) for batch in further]
        measured = self._compared(file, outputs)
        repaired = self._repaired(file, outputs[: fewest_batches(self._inputs)])
        if repaired is not None:
            exported, left = repaired
            loaded = LoadedModel(exported.model, profile=True)
            again = [loaded.kept_outputs(batch.inputs) for batch in self._batches]
            measured = replace(self._compared(file, again), left_float=left)
            _say_repaired(file, left, measured)
        result = self._timed(file, measured, loaded)
        del loaded  # two models may not fit beside the one that is searched
        result = self._located(file, result, None if repaired is None else repaired[0])
        say_checked(file.target, result)
        return result, None if repaired is None else repaired[0]

    def _first_run(self, file: FileToCheck) -> tuple[LoadedModel | None, list[dict[str, NDArray[Any]]]]:
        """The loaded file and its outputs for the first batch; one that is large and not timed is loaded in parts."""
        kept = KeptWeights()
        model = _runnable(file, kept)
        if file.format != "qdq" and isinstance(model, ModelProto) and parameter_bytes(model) >= LARGE_MODEL:
            return None, [outputs_in_parts(model, self._inputs)]
        loaded = LoadedModel(model, profile=file.format == "qdq", lean=file.format != "qdq")
        return loaded, [loaded.kept_outputs(self._inputs)]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _unusable(self, file: FileToCheck, error: AmctError) -> FileCheck:
        """Not checked, if the float model cannot be run on the batch either; a file nobody can load is never saved."""
        try:
            _ = self._loaded_original
        except AmctError:
            raise UnusableFileError(file.target, self.reference.origin, error) from error
        try:
            _ = self._original_outputs
        except AmctError as other:
            reason = f"the float model cannot be run on {self.reference.origin}: {other}"
            logger.warning("%s may be unusable: %s", file.target.name, reason)
            return FileCheck(batch=self.reference.origin, not_checked=reason)
        raise UnusableFileError(file.target, self.reference.origin, error) from error

    def _not_checked(self, file: FileToCheck, reason: str) -> FileCheck:
        logger.info("%s: not checked: %s", file.target.name, reason)
        return FileCheck(batch=self.reference.origin, not_checked=reason)

    def _compared(self, file: FileToCheck, outputs: Sequence[Mapping[str, NDArray[Any]]]) -> FileCheck:
        origin = self.reference.origin if len(outputs) == 1 else f"{len(outputs)} calibration batches"
        result = compared(file.target, origin, self._batches_for(file), outputs)
        handed_in = [by_name(batch.handed_in, self._float_outputs) for batch in self.reference.batches]
        return judged_by(result, handed_in, outputs)

    def _timed(self, file: FileToCheck, measured: FileCheck, loaded: LoadedModel | None) -> FileCheck:
        """With the speed of a QDQ file; a file slower than float is reported."""
        if loaded is None or file.format != "qdq":
            return measured
        budget = min(BUDGET, SHARE * self.reference.seconds)
        inputs = timed_inputs(loaded, self._inputs, budget)
        if self._is_large:
            speed = speed_apart(loaded, self.original, inputs, budget)
        else:
            speed = speed_of(loaded, self._loaded_original, inputs, budget)
            del self._loaded_original  # no other file is timed
        result = replace(measured, speed=speed.ratio, costliest=speed.nodes)
        if speed.least < 1:
            say_slow(file.target, result, speed)
        return result

    def _in_child(self, file: FileToCheck) -> FileCheck:
        """As ``check`` for a large model: neither located nor repaired."""
        reference = self.reference
        expected = by_name(reference.expected, self._float_outputs)
        simulated = by_name(reference.simulated, self._float_outputs)
        try:
            found = measured_in_child(
                file.path,
                file.beside,
                self.original,
                {"format": file.format, "packed": _packed(file)},
                self._inputs,
                expected,
            )
        except OutOfTimeError as error:
            return self._not_checked(file, str(error))
        if "error" in found:
            raise UnusableFileError(file.target, reference.origin, ModelError(found["error"]))
        if "not_checked" in found:
            return self._not_checked(file, found["not_checked"])
        known = expected is not None and simulated is not None
        near = output_similarity(expected or {}, simulated or {})[0] if known else None
        result = outcome(file.target, reference.origin, (similarity_of(found), found["reasons"]), near)
        if "speed" in found:
            speed = Speed(**found["speed"])
            result = replace(result, speed=speed.ratio, costliest=tuple(speed.nodes))
            if speed.least < 1:
                say_slow(file.target, result, speed)
        if is_worse(result):
            say_worse(file.target, result)
        say_checked(file.target, result)
        return result

    def _located(self, file: FileToCheck, measured: FileCheck, repaired: ExportedModel | None) -> FileCheck:
        if not is_worse(measured):
            return measured
        if lost(measured) <= WORSE:
            say_worse(file.target, measured)
            return measured
        exact = self._float_sqnr
        if exact is not None and measured.simulation_sqnr is not None and exact < measured.simulation_sqnr + WELL_ABOVE:
            say_different(file.target, measured, exact)
            return measured
        outputs = None
        if file.format == "deploy":
            outputs = {report.layer: f"{report.layer}.dequant.output0" for report in file.report.layers}

        kept = KeptWeights()

        def written() -> ModelProto:
            runnable = _runnable(file, kept) if repaired is None else repaired.model
            return runnable if isinstance(runnable, ModelProto) else file.model()

        models = self.original, self._simulate, written
        tensor = first_difference(*models, self._inputs, outputs, more_than=max(WORSE, lost(measured) / 2))
        found = replace(measured, differs_at=tensor or measured.output)
        say_worse(file.target, found)
        return found

    def _repaired(
        self, file: FileToCheck, outputs: Sequence[Mapping[str, NDArray[Any]]]
    ) -> tuple[ExportedModel, tuple[str, ...]] | None:
        """Judged by a number of batches that no time changes: the same model and data give the same file."""
        if file.format != "qdq" or self.export_qdq is None or not file.report.tensors:
            return None
        batches = self._batches[: len(outputs)]
        measured = compared(file.target, self.reference.origin, batches, outputs)
        models = [each.expected for each in batches], [each.simulated for each in batches], outputs
        if measured.sqnr is None or sure_loss(*models, measured.output) <= REPAIRED:
            return None
        allowed = expected_loss(len(file.report.layers), len(file.report.tensors)) + WORSE
        is_useless = min(lost(measured), sure_loss(*models, measured.output)) > allowed and needs_action(measured)
        usual = MOST_COST if needs_action(measured) else GOOD_COST
        share = CHEAP if measured.sqnr >= ENOUGH else math.inf if is_useless else usual
        boxes = {each.output for each in measured.boxes}
        names = [name for name in self._float_outputs if name not in boxes]
        repair = Repair(self.original, self.export_qdq, batches, names)
        try:
            return repair.run(file.model(), file.report, outputs, share)
        except AmctError as error:  # a model that runs with its outputs alone may not run with all its tensors
            logger.debug("%s is not repaired: %s", file.target.name, error)
            return None


def _runnable(file: FileToCheck, kept: KeptWeights) -> ModelProto | Path:
    """The file, its content if it is large and not timed, or the integer form of a deploy file.

    Args:
        file: The file.
        kept: Takes the large weights of a content.

    Raises:
        ExportError: a deploy file has an operator on integers that cannot be computed here.
    """
    if file.format == "deploy":
        return standard_model(read_parts(file.path, kept), packed=_packed(file), kept=kept)
    if file.format in ("fake_quant", FLOAT) and file.path.stat().st_size >= LARGE_MODEL:
        return read_parts(file.path, kept, in_file=True)
    return file.path


def _packed(file: FileToCheck) -> list[str]:
    """The nodes of a deploy file whose weights hold two values per byte."""
    return [report.layer for report in file.report.layers if report.weight_bits == _PACKED_BITS]


def _say_repaired(file: FileToCheck, left: tuple[str, ...], measured: FileCheck) -> None:
    logger.info(
        "%s: %d of the tensors between the layers stay float, because the file would be worse than the simulation: %s; "
        "now %s",
        file.target.name,
        len(left),
        ", ".join(left),
        measured.text(),
    )


def _foreign_operator(file: FileToCheck) -> str:
    """Why onnxruntime cannot know an operator of a registered format; "" if it can."""
    if file.format in OWN_FORMATS:
        return ""
    for node in file.model().graph.node:
        if node.domain not in _KNOWN_DOMAINS or (not node.domain and not defs.has(node.op_type)):
            return f'operator "{node.op_type}" is not one of onnxruntime'
    return ""
