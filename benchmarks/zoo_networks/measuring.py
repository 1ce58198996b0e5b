"""What is measured of a network: layers, SQNR of simulation and files, speed, cost of the job."""

from __future__ import annotations

import json
import logging
import resource
import time
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime

from amct.errors import AmctError, ExportError
from amct.export.check.integers import standard_model
from amct.export.formats import save_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zoo_networks.network import Network, Subject

ROUNDS, SPEED_SECONDS = 40, 1.0
# Reasons of what is not a layer that could be quantized by default.
NO_LAYER = ("not folded", "is not quantizable", "cannot be quantized", "is off by default")
Row = dict[str, Any]


class Warnings(logging.Handler):
    """Keeps what the package warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.texts.append(record.getMessage()[:600])


class Progress:
    """The row so far, on disk after each step, so that it survives a crash of the next one."""

    def __init__(self, name: str, path: Path) -> None:
        self.row: Row = {"name": name, "outcome": "failed", "step": "build"}
        self._path = path
        self.write()

    def write(self, **values: object) -> None:
        """Add values."""
        self.row.update(values)
        self._path.write_text(json.dumps(self.row))


def measure(network: Network, folder: Path, *, brief: bool) -> None:
    """Measure a network, briefly without speed and peer; the row is ``row.json`` in the folder."""
    onnxruntime.set_default_logger_severity(4)
    warnings = Warnings()
    logging.getLogger("amct").addHandler(warnings)
    progress = Progress(network.name, folder / "row.json")
    try:
        _measure(network.build(folder), folder, progress, warnings, brief=brief)
    except AmctError as error:
        progress.write(outcome="refused", error=f"{type(error).__name__}: {error}"[:2000])
    except Exception as error:  # noqa: BLE001  any error of any network is a row of the table
        lines = "".join(traceback.format_exception(error))
        progress.write(outcome="failed", error=f"{type(error).__name__}: {error}"[:2000], traceback=lines[-6000:])
    progress.write(warnings=warnings.texts)


def _measure(subject: Subject, folder: Path, progress: Progress, warnings: Warnings, *, brief: bool) -> None:
    begin = time.process_time()
    progress.write(step="quantize")
    quantized = subject.quantize()
    left = [str(skip) for skip in quantized.skipped if not any(words in skip.reason for words in NO_LAYER)]
    progress.write(step="save", quantized=len(quantized.layers), left=len(left), left_reasons=left[:20])
    quantized.save(folder / "net")
    progress.write(
        job_seconds=time.process_time() - begin, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    )
    progress.write(step="run")
    files = {"float": folder / "float.onnx", "ours": folder / "net_qdq_model.onnx"}
    if not files["ours"].is_file():  # a Caffe net with a layer that ONNX lacks has its other files
        progress.write(outcome="refused", error=next(text for text in warnings.texts if "no QDQ file" in text))
        return
    names = [value.name for value in session(files["ours"]).get_outputs()]
    wanted = [subject.file_reference(batch, names) for batch in subject.test]
    simulated = [subject.simulated_outputs(quantized, batch, names) for batch in subject.test]
    progress.write(simulation_sqnr=sqnr(wanted, simulated))
    save_model(files["float"], subject.float_onnx(quantized))
    progress.write(file_sqnr=file_sqnr(files["ours"], subject))
    progress.write(deploy_sqnr=deploy_sqnr(folder / "net_deploy_model.onnx", subject))
    progress.write(outcome="quantized")
    if not brief:
        progress.write(step="speed")
        progress.write(**speeds(files, subject))
        progress.write(step="peer")
        _measure_peer(files["float"], folder, subject, progress)
    progress.write(step="done")


def _measure_peer(source: Path, folder: Path, subject: Subject, progress: Progress) -> None:
    path = folder / "peer.onnx"
    try:
        seconds = peer(source, path, subject)
        value = file_sqnr(path, subject)
        measured = speeds({"float": source, "peer": path}, subject)
        progress.write(peer_sqnr=value, peer_ms=measured["peer_ms"] * progress.row["float_ms"] / measured["float_ms"])
        progress.write(peer_seconds=seconds)
    except Exception as error:  # noqa: BLE001  the other quantizer may fail in any way
        progress.write(peer_error=f"{type(error).__name__}: {error}"[:300])


def peer(source: Path, path: Path, subject: Subject) -> float:
    """Quantize with onnxruntime's static quantizer: QDQ, u8 activations, s8 weights per channel, MinMax."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    begin = time.process_time()
    names = [value.name for value in onnxruntime.InferenceSession(source).get_inputs()]

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # it ships no types
        def __init__(self) -> None:
            self.left = iter([subject.feeds(batch, names) for batch in subject.calibration])

        def get_next(self) -> Any:  # noqa: ANN401
            return next(self.left, None)

    prepared = path.with_name("prepared.onnx")
    try:
        quant_pre_process(str(source), str(prepared))
    except Exception:  # noqa: BLE001  its shape inference fails on some models; it is optional
        prepared = source
    quantization.quantize_static(
        str(prepared), str(path), Reader(), per_channel=True, reduce_range=True,
        activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip
    return time.process_time() - begin


def session(path: Path) -> onnxruntime.InferenceSession:
    """A file in onnxruntime, one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def file_sqnr(path: Path, subject: Subject) -> float | None:
    """The SQNR of a file against the user's float model."""
    running = session(path)
    outputs = [value.name for value in running.get_outputs()]
    names = [value.name for value in running.get_inputs()]
    given = [running.run(outputs, subject.feeds(batch, names)) for batch in subject.test]
    return sqnr([subject.file_reference(batch, outputs) for batch in subject.test], given)


def deploy_sqnr(path: Path, subject: Subject) -> float | None:
    """The SQNR of a file for the chip, computed in integers; None where it is a Caffe pair or has an LSTM or GRU."""
    if not path.is_file():
        return None
    try:
        integers = standard_model(onnx.load(path))
    except ExportError:
        return None
    runnable = path.with_name("deploy_here.onnx")
    save_model(runnable, integers)
    return file_sqnr(runnable, subject)


def sqnr(wanted: Sequence[Sequence[np.ndarray]], given: Sequence[Sequence[np.ndarray]]) -> float | None:
    """Signal to noise of all float outputs in dB, each output counting alike; 200 where there is no noise.

    None if an output has as many rows as there are detections, which no two models agree on.
    """
    signal: dict[int, float] = {}
    noise: dict[int, float] = {}
    for one, other in zip(wanted, given, strict=True):
        if [array.shape for array in one] != [array.shape for array in other]:
            if [array.ndim for array in one] == [array.ndim for array in other]:
                return None
            raise ValueError(f"outputs {[a.shape for a in one]} became {[a.shape for a in other]}")
        for index, (exact, rounded) in enumerate(zip(one, other, strict=True)):
            if np.issubdtype(exact.dtype, np.floating):
                finite = np.isfinite(exact)
                reference = np.where(finite, exact, 0).astype(np.float64)
                difference = np.where(finite, rounded, 0) - reference
                signal[index] = signal.get(index, 0.0) + float(np.sum(reference**2))
                noise[index] = noise.get(index, 0.0) + float(np.sum(difference**2))
    ratios = [noise[index] / signal[index] for index in signal if signal[index] > 0]
    if not ratios:
        return 200.0 if not any(noise.values()) else -200.0
    mean = float(np.mean(ratios))
    return float(np.clip(-10 * np.log10(max(mean, 1e-20)), -200, 200)) if np.isfinite(mean) else -200.0


def speeds(files: dict[str, Path], subject: Subject) -> dict[str, float]:
    """CPU milliseconds of one batch in each file: the fastest of many runs, taken in turn."""
    sessions = {name: session(path) for name, path in files.items()}
    inputs = {
        name: subject.feeds(subject.test[0], [value.name for value in running.get_inputs()])
        for name, running in sessions.items()
    }
    for name, running in sessions.items():
        running.run(None, inputs[name])
    best = dict.fromkeys(sessions, float("inf"))
    end = time.perf_counter() + SPEED_SECONDS
    for index in range(ROUNDS):
        if index >= 3 and time.perf_counter() > end:
            break
        for name, running in sessions.items():
            begin = time.thread_time()  # a session with one thread runs on the calling one
            running.run(None, inputs[name])
            best[name] = min(best[name], time.thread_time() - begin)
    return {f"{name}_ms": 1000 * seconds for name, seconds in best.items()}
