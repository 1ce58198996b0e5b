"""Quantization-aware training of a Caffe model in one call: prepare, train by a solver prototxt, save, report."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct import log
from amct.arguments import input_file, input_files
from amct.atomic import check_writable, read_bytes, write_text
from amct.caffe.comparing import measure_nets
from amct.caffe.engine.layer import TEST
from amct.caffe.engine.net import Net
from amct.caffe.engine.solvers.definition import read_solver
from amct.caffe.engine.solvers.snapshot import snapshot_names
from amct.caffe.engine.solvers.solver import EngineSolver, evaluate
from amct.caffe.model import read_retrained_model
from amct.caffe.qat.insertion import RetrainFiles, write_retrain_config, write_retrain_model
from amct.caffe.qat.save import Trained, save_trained
from amct.caffe.reporting import fused_notes, report_layers
from amct.errors import ArgumentError, ArgumentTypeError, FileError, TrainingError
from amct.export.request import RECORD, SavePath
from amct.log import bar
from amct.report.content import SIMULATION, Figure, TrainedClips, TrainingContent
from amct.report.filling import ReportSubject, note_measurement, report_content, write_report
from amct.schema import format_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from amct.atomic import AnyPath
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.engine.solvers.solver import Action
    from amct.caffe.model import CaffeModel
    from amct.caffe.ptq.save import Inference
    from amct.caffe.qat.save import TrainedResults
    from amct.model.verdict import Verdict

logger = logging.getLogger(__name__)

FORMATS = ("fake_quant", "deploy", "qdq")
REPORT_BATCHES = 2
BEFORE = "Outputs and scores before are those of the float model that was handed in, on the net's own data."
_NETS = ("net", "net_param", "train_net", "train_net_param", "test_net", "test_net_param", "weights")


@log.screen_only()
def prepare_qat(  # noqa: PLR0913 - three files, a config and where the work goes
    model: AnyPath,
    weights: AnyPath,
    solver: AnyPath,
    config: Mapping[str, Any] | AnyPath | None = None,
    *,
    folder: AnyPath = "qat",
    iterations: int | None = None,
    custom_proto: AnyPath | None = None,
    allow_python: bool = False,
) -> CaffeRetraining:
    """Prepare quantization-aware training of a Caffe model.

    >>> retraining = prepare_qat("train_val.prototxt", "net.caffemodel", "solver.prototxt")  # doctest: +SKIP
    >>> retraining.train()                                                                    # doctest: +SKIP
    >>> retraining.save("out/net")                                                            # doctest: +SKIP

    Args:
        model: The prototxt with the layers of both phases.
        weights: The caffemodel of the trained float model.
        solver: The solver prototxt: learning rate, ``max_iter``, ``test_iter``. Its net is replaced.
        config: A simple config (``.cfg``), a full config (``.json``, or its content as a dict); None: 8 bits.
        folder: Where the model that is trained, its snapshots, the record and the solver are written.
        iterations: Training iterations; None: ``max_iter`` of the solver.
        custom_proto: A ``custom.proto`` with messages of your own layers.
        allow_python: Allow Python layers, which execute code.

    Raises:
        ArgumentError, ArgumentTypeError: An argument is invalid.
        FileError, ParseError, ModelError, ConfigError: A file cannot be read or is invalid.
    """
    input_files(model=model, weights=weights, solver=solver)
    where = Path(folder)
    check_writable(where)
    files = RetrainFiles(
        config=where / "config.json",
        record=where / "record.txt",
        model=where / "modified_model.prototxt",
        weights=where / "modified_model.caffemodel",
    )
    _write_config(config, files.config, model, weights, custom_proto)
    write_retrain_model(model, weights, files, custom_proto)
    parameter = _solver_for(read_solver(solver), files.model, where / "retrain", iterations)
    write_text(where / "solver.prototxt", format_text(parameter))
    source = (Path(model), Path(weights))
    return CaffeRetraining(where, parameter, source, custom_proto=custom_proto, allow_python=allow_python)


def _write_config(
    config: Mapping[str, Any] | AnyPath | None,
    target: AnyPath,
    model: AnyPath,
    weights: AnyPath,
    custom_proto: AnyPath | None,
) -> None:
    """Write the JSON config, from any form of a config."""
    if isinstance(config, Mapping):
        write_text(target, json.dumps(config, indent=4))
    elif config is None:
        write_retrain_config(target, model, weights, None, custom_proto)
    elif isinstance(config, (str, os.PathLike)):
        content = read_bytes(input_file(config, "config"))
        if content.lstrip()[:1] == b"{":
            write_text(target, content.decode())
        else:
            write_retrain_config(target, model, weights, config, custom_proto)
    else:
        raise ArgumentTypeError(
            f"config: expected the path of a .cfg or .json, a dict or None, got {type(config).__name__}"
        )


def _solver_for(parameter: ProtoMessage, net: Path, prefix: Path, iterations: int | None) -> ProtoMessage:
    """The solver with the net of retraining; it tests at the end of training and not before it."""
    for name in _NETS:
        parameter.ClearField(name)
    parameter.net, parameter.snapshot_prefix = str(net.absolute()), str(prefix.absolute())
    parameter.test_initialization = False
    if iterations is not None:
        parameter.max_iter = iterations
    if parameter.max_iter < 1:
        raise ArgumentError(f"the solver trains {parameter.max_iter} iterations; set max_iter, or give iterations")
    if parameter.test_interval <= 0 or parameter.max_iter % parameter.test_interval:
        parameter.test_interval = parameter.max_iter
    return parameter


class CaffeRetraining:
    """A Caffe model that is trained for quantization.

    Attributes:
        folder: The folder of its files.
        solver: The SolverParameter.
        losses: The loss of each iteration of ``train``.
        stopped_early: Whether ``train`` ended on a stop request.
        scores_before: The mean outputs of the float model in the TEST phase, by name, once trained.
        scores_after: Those of the fake-quant model, once saved.
        verdict: The judgement beside the float model, once saved; after a report by the accuracy of the TEST phase, if
            it has one.
    """

    def __init__(
        self,
        folder: Path,
        solver: ProtoMessage,
        source: tuple[Path, Path],
        *,
        custom_proto: AnyPath | None = None,
        allow_python: bool = False,
    ) -> None:
        self.folder, self.solver = folder, solver
        self.losses: list[float] = []
        self.stopped_early = False
        self.scores_before: dict[str, float] = {}
        self.scores_after: dict[str, float] = {}
        self.verdict: Verdict | None = None
        self._source = source
        self._custom_proto, self._allow_python = custom_proto, allow_python
        self._first_clips: dict[str, tuple[float, float]] = {}
        self._inputs = 0
        self._trained: TrainedResults | None = None

    @property
    def snapshot(self) -> Path:
        """The caffemodel at the end of training."""
        return Path(snapshot_names(self.solver, self.solver.max_iter)[0])

    @log.screen_only()
    def train(
        self, resume: AnyPath | None = None, *, action_source: Callable[[], Action] | None = None
    ) -> CaffeRetraining:
        """Train to the end, with a snapshot there and where the solver says; returns this object.

        Args:
            resume: A solver state to go on from.
            action_source: Called after every iteration; returns a request to stop or to write a snapshot.

        Raises:
            ConfigError: The solver's settings do not fit.
            TrainingError: The loss became NaN or infinite, or training was stopped.
        """
        if self.solver.test_iter:
            self.scores_before = self._scores(*self._source)
        solver = EngineSolver(self.solver, allow_python=self._allow_python)
        if resume is None:
            solver.net.load_weights(self.folder / "modified_model.caffemodel")
        else:
            solver.restore(resume)
        if action_source is not None:
            solver.action_source = action_source
        self._inputs = sum(layer.type == "RetrainDataQuant" for layer in solver.net.layers)
        with bar("Training", total=self.solver.max_iter - solver.iter) as advance:

            def note() -> None:
                self.losses.append(solver.last_loss)
                self._note_clips(solver.net)
                advance(description=f"Training, loss {solver.last_loss:.4g}")

            solver.add_callback(lambda: None, note)
            solver.solve()
        self.stopped_early = solver.stopped_early
        if solver.stopped_early:
            raise TrainingError(
                f"training was stopped at iteration {solver.iter} of {self.solver.max_iter}; go on with "
                f"{snapshot_names(self.solver, solver.iter)[1]}"
            )
        if not all(abs(loss) < float("inf") for loss in self.losses):
            raise TrainingError("the loss became NaN or infinite; lower base_lr of the solver")
        return self

    def _note_clips(self, net: Net) -> None:
        """Keep the clips with which training started, once they are found."""
        if len(self._first_clips) == self._inputs:
            return
        for layer in net.layers:
            if layer.type == "RetrainDataQuant" and layer.name not in self._first_clips:
                high, low = layer.blobs[2].tensor.tolist()
                if high != low:
                    self._first_clips[layer.name] = (low, high)

    def _scores(self, model: AnyPath, weights: AnyPath) -> dict[str, float]:
        net = Net.from_file(model, phase=TEST, allow_python=self._allow_python, with_gradients=False)
        net.load_weights(weights)
        return {score.name: score.value for score in evaluate(net, self.solver.test_iter[0]).scores}

    @log.screen_only()
    def save(self, path: AnyPath, formats: Sequence[str] = FORMATS) -> list[Path]:
        """Write the trained model: fake-quant and deploy pairs, the form for ATC, QDQ, record and ``quant.json``.

        Args:
            path: Folder and prefix of the files, such as ``out/net``.
            formats: "fake_quant", "deploy" and ONNX formats such as "qdq".

        Raises:
            FileError: A file cannot be written, or there is no snapshot yet.
        """
        trained = Trained.read(self.folder / "modified_model.prototxt", self.snapshot, self._custom_proto)
        where, config, record = SavePath.parse(path), self.folder / "config.json", self.folder / "record.txt"
        formats, handed_in = (*formats, RECORD), self._handed_in()
        self._trained, written = save_trained(trained, config, record, where, formats, handed_in)
        if "fake_quant" in formats:
            pair = where.file("fake_quant_model.prototxt"), where.file("fake_quant_weights.caffemodel")
            self.scores_after = self._scores(*pair)
        self.verdict = written.verdict
        return written.paths

    def _handed_in(self) -> CaffeModel | None:
        """The float model as its files have it; None: they are gone, and the trained weights must do."""
        try:
            return read_retrained_model(*self._source, self._custom_proto)
        except FileError as error:
            logger.warning("%s; the verdict compares with the trained weights without quantizers", error)
            return None

    def report(self, path: AnyPath, files: Iterable[AnyPath] = ()) -> Path:
        """Write an HTML report: scores before and after, the loss curve, the clips, and what each layer lost.

        Raises:
            TrainingError: The model is not saved yet, or has no form without its data layers.
        """
        if self._trained is None or isinstance(self._trained.inference, str):
            raise TrainingError("report: save the trained model first")
        target = Path(path)
        check_writable(target.parent)
        results, notes = self._trained.inference.results, self._trained.notes
        bits = {name: qparams.weight.bits for name, qparams in results.layers.items() if qparams.weights}
        fake = results.fake_quant().model
        subject = ReportSubject(
            model=notes.original.net.name or self._source[0].stem,
            layers=tuple(report_layers(fake.net, results.folded_model.weights, bits)),
            fused=tuple(fused_notes(notes.fusion.folded, ())),
            skipped=tuple(notes.not_quantized),
            config=notes.config,
        )
        data = _own_data(self._trained.results.folded_model, self._trained.inference)
        original, listed = self._trained.handed_in, [Path(file) for file in files]
        before = None if original is None else original.build(())
        measured = measure_nets(results.folded_model, fake, data, statistics=subject.statistics(), before=before)
        content = report_content(subject, measured, files=listed)
        judged = replace(measured, **self._metric())
        self.verdict = judged.verdict(SIMULATION, is_trained=original is not None) or self.verdict
        figures, training = (*self._figures(), *content.figures), self._training(BEFORE if original else "")
        write_report(target, replace(content, verdict=self.verdict, figures=figures, training=training), listed)
        note_measurement(judged, SIMULATION, self.verdict, listed)
        return target

    def _metric(self) -> dict[str, Any]:
        """The first accuracy of the TEST phase as the metric of a measurement; nothing without one."""
        assert self._trained is not None
        layers = self._trained.notes.original.layers
        names = [layer.top[0] for layer in layers if layer.type == "Accuracy" and layer.top]
        known = next((name for name in names if name in self.scores_before and name in self.scores_after), None)
        if known is None:
            return {}
        return {"metric": (self.scores_before[known], self.scores_after[known]), "metric_name": known}

    def _figures(self) -> list[Figure]:
        names = [name for name in self.scores_before if name in self.scores_after]
        return [
            Figure(label=name, before=f"{self.scores_before[name]:.4g}", after=f"{self.scores_after[name]:.4g}")
            for name in names
        ]

    def _training(self, before: str) -> TrainingContent:
        assert self._trained is not None
        model = Trained.read(self.folder / "modified_model.prototxt", self.snapshot, self._custom_proto)
        clips = [
            TrainedClips(
                layer=layer.retrain_data_quant_param.object_layer,
                before=self._first_clips.get(layer.name),
                after=(float(model.clips[layer.name][1]), float(model.clips[layer.name][0])),
            )
            for layer in model.retrained
            if layer.type == "RetrainDataQuant"
        ]
        return TrainingContent(before=before, losses=tuple(self.losses), clips=tuple(clips))


def _own_data(model: CaffeModel, inference: Inference) -> list[dict[str, Any]]:
    """Some batches of the net's own data, by the inputs of its form without data layers."""
    net = model.build()
    names = [blob for layer in inference.results.folded_model.layers if layer.type == "Input" for blob in layer.top]
    batches = []
    for _ in range(REPORT_BATCHES):
        net.forward()
        batches.append({name: net.blob(name).tensor.detach().cpu().numpy().copy() for name in names})
    return batches
