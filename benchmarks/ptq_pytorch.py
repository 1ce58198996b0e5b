"""Post-training quantization of the CIFAR-10 ResNet-20, beside the same work done by other tools.

    python benchmarks/ptq_pytorch.py                      everything
    python benchmarks/ptq_pytorch.py speed jobs           only these parts: calibration, jobs, adaround, speed

Needs the real models (AMCT_ASSETS, or shared/assets beside the project). All times are CPU seconds of one thread. Every
job runs in a process of its own, which imports its tool before the clock starts; all of them begin with the same
``nn.Module`` and use the same ONNX exporter, whose share is shown apart. The least of several repetitions counts, of
calibration the median of five turns; the slow AdaRound jobs run once. The table is printed, and written to
``benchmarks/results/ptq_pytorch.json``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "pytorch"))

import onnxruntime  # noqa: E402  the networks of the tests are found through the path above
import torch  # noqa: E402
from real_models import cifar_images, cifar_resnet, onnx_top1, torch_top1  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

ASSETS = Path(os.environ.get("AMCT_ASSETS", HERE.parent.parent / "shared" / "assets"))
RESULTS = HERE / "results" / "ptq_pytorch.json"
IMAGES, BATCH = 512, 64
TURNS = 5
REPETITIONS = int(os.environ.get("AMCT_BENCH_REPETITIONS", "2"))  # of a job
OPEN_BATCH = {"x": {0: "batch"}, "y": {0: "batch"}}
PARTS = ("calibration", "jobs", "adaround", "speed")
PEERS = {"onnxruntime MinMax": "onnxruntime", "onnxruntime Percentile": "onnxruntime", "NNCF": "nncf",
         "aimet-onnx": "aimet_onnx"}  # fmt: skip
MOST_OF_FASTEST = 0.8  # of the fastest other tool's CPU time
Values = dict[str, Any]


def batches() -> list[torch.Tensor]:
    """The calibration data of every job."""
    return list(cifar_images(ASSETS, "train_10000", IMAGES)[0].split(BATCH))


# -- jobs: each runs in its own process --------------------------------------------------------------------------------


class Clock:
    """CPU time of the job, and of tracing and export within it."""

    def __init__(self) -> None:
        self.export = 0.0

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Around tracing and export."""
        begin = time.process_time()
        yield
        self.export += time.process_time() - begin

    def timed(self, owner: object, name: str) -> None:
        """Count the calls of a function as tracing and export."""
        function = getattr(owner, name)

        def measured(*args: object, **kwargs: object) -> object:
            with self.exporting():
                return function(*args, **kwargs)

        setattr(owner, name, measured)


if TYPE_CHECKING:
    Job = Callable[[torch.nn.Module, list[torch.Tensor], Path, Clock], Path]


def job_amct() -> Job:
    """Ours, with AMCT's functions: config, quantize, calibrate, save all files."""
    import amct_pytorch
    from amct.pytorch import amct_api as ptq
    from amct.pytorch.preparation import TorchPreparation

    def run(model: torch.nn.Module, data: list[torch.Tensor], folder: Path, clock: Clock) -> Path:
        clock.timed(ptq, "cached_trace")
        clock.timed(TorchPreparation, "float_onnx")
        config, modified, record = (str(folder / name) for name in ("c.json", "m.onnx", "r.txt"))
        amct_pytorch.create_quant_config(config, model, data[0], batch_num=len(data))
        calibrating = amct_pytorch.quantize_model(
            config, modified, record, model, data[0], input_names=["x"], output_names=["y"], dynamic_axes=OPEN_BATCH
        )
        for batch in data:
            calibrating(batch)
        amct_pytorch.save_model(modified, record, str(folder / "net"))
        return folder / "net_qdq_model.onnx"

    return run


def job_ours_adaround(mode: str) -> Job:
    """Ours with 4-bit weights: rounded to the nearest, or AdaRound with 1000 iterations."""
    import amct.pytorch as amct
    from amct.pytorch import door, preparation

    weights = amct.ArqSettings(num_bits=4)
    learned = amct.AdaRoundSettings(num_bits=4, num_iteration=1000)

    def run(model: torch.nn.Module, data: list[torch.Tensor], folder: Path, clock: Clock) -> Path:
        clock.timed(door, "cached_trace")
        clock.timed(preparation, "float_onnx")
        config = amct.QuantConfig(common=amct.LayerConfig(weights=weights if mode == "nearest" else learned))
        io = amct.IoOptions(input_names=["x"], output_names=["y"], dynamic_axes=OPEN_BATCH)
        quantized = amct.quantize(model, data, config, io=io, adaround="plain" if mode == "plain" else "fast")
        quantized.save(folder / "net")
        return folder / "net_qdq_model.onnx"

    return run


def float_onnx(model: torch.nn.Module, data: list[torch.Tensor], folder: Path, clock: Clock) -> Path:
    """The model as a float file, written by the same exporter."""
    with clock.exporting():
        batch = torch.export.Dim("batch", min=2, max=4096)
        program = torch.onnx.export(
            model, (data[0],), dynamo=True, input_names=["x"], output_names=["y"], dynamic_shapes=({0: batch},),
            verbose=False, external_data=False,
        )  # fmt: skip
        assert program is not None
        path = folder / "float.onnx"
        program.save(path)
    return path


def job_onnxruntime(method: str) -> Job:
    """Onnxruntime's own static quantizer: u8 activations, s8 weights per channel."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # it ships no types
        def __init__(self, data: list[torch.Tensor]) -> None:
            self.feeds = iter([{"x": batch.numpy()} for batch in data])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    def run(model: torch.nn.Module, data: list[torch.Tensor], folder: Path, clock: Clock) -> Path:
        source, path = float_onnx(model, data, folder, clock), folder / "net.onnx"
        quantization.quantize_static(
            str(source), str(path), Reader(data), per_channel=True,
            activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
            calibrate_method=getattr(quantization.CalibrationMethod, method),
        )  # fmt: skip
        return path

    return run


def job_nncf() -> Job:
    """NNCF on the ONNX file, with its defaults."""
    import nncf
    import onnx

    def run(model: torch.nn.Module, data: list[torch.Tensor], folder: Path, clock: Clock) -> Path:
        source, path = onnx.load(float_onnx(model, data, folder, clock)), folder / "net.onnx"
        dataset = nncf.Dataset(data, lambda batch: {"x": batch.numpy()})
        onnx.save(nncf.quantize(source, dataset, subset_size=len(data)), path)
        return path

    return run


def job_aimet() -> Job:
    """aimet-onnx with its defaults, written as QDQ."""
    import onnx
    from aimet_onnx import QuantizationSimModel

    def run(model: torch.nn.Module, data: list[torch.Tensor], folder: Path, clock: Clock) -> Path:
        source, path = onnx.load(float_onnx(model, data, folder, clock)), folder / "net.onnx"
        simulation = QuantizationSimModel(source, providers=["CPUExecutionProvider"])
        simulation.compute_encodings([{"x": batch.numpy()} for batch in data])
        onnx.save(simulation.to_onnx_qdq(), path)
        return path

    return run


JOBS: dict[str, Callable[[], Any]] = {
    "ours": job_amct,
    "onnxruntime MinMax": lambda: job_onnxruntime("MinMax"),
    "onnxruntime Percentile": lambda: job_onnxruntime("Percentile"),
    "NNCF": job_nncf,
    "aimet-onnx": job_aimet,
    "W4A8 nearest": lambda: job_ours_adaround("nearest"),
    "W4A8 AdaRound fast": lambda: job_ours_adaround("fast"),
    "W4A8 AdaRound plain": lambda: job_ours_adaround("plain"),
}


def run_job(name: str, folder: Path) -> None:
    """Run in the child process: do a job and write its cost."""
    torch.set_num_threads(1)
    run, model, data, clock = JOBS[name](), cifar_resnet(ASSETS, 20), batches(), Clock()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    path = run(model, data, folder, clock)
    cost = {
        "cpu": time.process_time() - begin,
        "export": clock.export,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_before": memory / 1024,
        "file": str(path),
    }
    (folder / "cost.json").write_text(json.dumps(cost))


def job(name: str, folder: Path, repetitions: int) -> Values:
    """Run a job several times; returns the least CPU time, and the accuracy of its file in onnxruntime."""
    best: Values = {}
    for _ in range(repetitions):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--job", name, "--folder", str(folder)]
        # AdaRound shows its progress; the output of other tools is only shown if they fail.
        done = subprocess.run(command, stdout=None if "AdaRound" in name else subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, check=False,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        if done.returncode != 0:
            lines = (done.stderr or "").strip().splitlines() or [f"ended with {done.returncode} and no message"]
            return {"failed": lines[-1][:200]}
        cost = json.loads((folder / "cost.json").read_text())
        if not best or cost["cpu"] < best["cpu"]:
            best = cost
    best["accuracy"] = onnx_top1(Path(best["file"]), *cifar_images(ASSETS, "test_6000"))
    return best


# -- parts -------------------------------------------------------------------------------------------------------------


def best_of(functions: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """The least CPU time of each, measured alternately."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(repetitions):
        for name, function in functions.items():
            begin = time.process_time()
            function()
            best[name] = min(best[name], time.process_time() - begin)
    return best


def calibration(_: Path) -> Values:
    """Calibration, from the first batch to the last factor, beside the same forwards of the same folded model."""
    import amct.pytorch as amct
    from amct.config.python_config import plan_of
    from amct.pytorch.calibrating import start_calibration
    from amct.pytorch.capture.cached_trace import cached_trace
    from amct.pytorch.preparation import prepare

    data = batches()
    traced = cached_trace(
        cifar_resnet(ASSETS, 20), data[0], input_names=["x"], output_names=["y"], dynamic_axes=OPEN_BATCH
    )
    plan, _open = plan_of(amct.QuantConfig(batch_num=len(data)), traced.config_layers(), len(data))
    preparation = prepare(traced, plan)
    between = preparation.intermediate_watch(preparation.float_onnx())

    def run(model: torch.nn.Module) -> float:
        begin = time.process_time()
        with torch.no_grad():
            for batch in data:
                model(batch)
        return time.process_time() - begin

    turns = []
    for _ in range(TURNS + 1):
        started = start_calibration(preparation, intermediate=between)
        calibrating = run(started.model)
        assert started.session.done
        turns.append((calibrating, run(started.model)))  # without the hooks, which have gone with the last batch
    calibrating, forwards = (median(each) for each in zip(*turns[1:], strict=True))  # the first turn compiles
    return {"calibration": calibrating, "forwards": forwards, "ratio": calibrating / forwards}


def jobs(folder: Path) -> Values:
    """The whole job of every installed tool."""
    found: Values = {"float accuracy": torch_top1(cifar_resnet(ASSETS, 20), *cifar_images(ASSETS, "test_6000"))}
    for name in ("ours", *PEERS):
        hint = missing(PEERS.get(name, "amct"))
        found[name] = {"failed": f"{name} {hint}"} if hint else job(name, folder / name, REPETITIONS)
    return found


def missing(package: str) -> str:
    """What to do about a package that is not installed; empty if it is."""
    if importlib.util.find_spec(package) is not None:
        return ""
    return f"is not installed (pip install {package.replace('_', '-')})"


def adaround(folder: Path) -> Values:
    """4-bit weights: nearest rounding, AdaRound fast, AdaRound plain."""
    return {name: job(name, folder / name, 1) for name in JOBS if name.startswith("W4A8")}


def speed(folder: Path) -> Values:
    """Our default QDQ file compared with float and onnxruntime's u8 x s8 file, batch 8, one thread."""
    model, data, clock = cifar_resnet(ASSETS, 20), batches(), Clock()
    files = {"float": float_onnx(model, data, folder, clock)}
    for name in ("ours", "onnxruntime MinMax"):
        cost = folder / name / "cost.json"  # the jobs may have run before
        made = json.loads(cost.read_text()) if cost.exists() else job(name, folder / name, 1)
        files[name] = Path(made["file"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    feed = {"x": data[0][:8].numpy()}

    def runner(path: Path) -> Callable[[], None]:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

        def run() -> None:
            for _ in range(10):
                session.run(None, feed)

        return run

    best = best_of({name: runner(path) for name, path in files.items()}, 25)
    return {name: seconds / 10 for name, seconds in best.items()}


# -- the table ---------------------------------------------------------------------------------------------------------


def rows(found: Values) -> Iterator[tuple[str, str, str, bool | None]]:
    """One row: name, measured value, target, whether it was met."""
    if "calibration" in found:
        part = found["calibration"]
        text = f"{part['calibration']:.2f} / {part['forwards']:.2f} CPU s = {part['ratio']:.2f}"
        yield "(a) calibration ÷ the same forwards, 8 × 64", text, "<= 1.20", part["ratio"] <= 1.2
    if "jobs" in found:
        yield from _job_rows(found["jobs"])
    if "adaround" in found:
        yield from _adaround_rows(found["adaround"])
    if "speed" in found:
        part = found["speed"]
        gain, peer = part["float"] / part["ours"], part["float"] / part["onnxruntime MinMax"]
        yield "(d) float file, batch 8", f"{part['float'] * 1e3:.2f} ms", "", None
        yield "(d) our QDQ file", f"{part['ours'] * 1e3:.2f} ms, {gain:.2f} x float", ">= 1.5 x", gain >= 1.5
        text = f"{part['onnxruntime MinMax'] * 1e3:.2f} ms, {peer:.2f} x float"
        yield (
            "(d) onnxruntime's own u8 x s8 file",
            text,
            "ours not slower",
            part["ours"] <= part["onnxruntime MinMax"],
        )


def _cost(part: Values) -> str:
    if "failed" in part:
        return f"left out: {part['failed']}"
    return (
        f"{part['cpu']:.1f} CPU s (tracing and export {part['export']:.1f}), {part['peak']:.0f} MB, "
        f"{part['accuracy']:.2f} %"
    )


def _job_rows(part: Values) -> Iterator[tuple[str, str, str, bool | None]]:
    yield "(e) float in torch", f"{part['float accuracy']:.2f} %", "", None
    peers = [part[name]["cpu"] for name in PEERS if "cpu" in part.get(name, {})]
    kept = bool(peers) and part["ours"]["cpu"] <= MOST_OF_FASTEST * min(peers)
    ratio = f" = {part['ours']['cpu'] / min(peers):.2f} of the fastest" if peers else ""
    yield "(b) whole job: ours", _cost(part["ours"]) + ratio, f"<= {MOST_OF_FASTEST} of the fastest other", kept
    for name in PEERS:
        yield f"(b) whole job: {name}", _cost(part[name]), "", None


def _adaround_rows(part: Values) -> Iterator[tuple[str, str, str, bool | None]]:
    yield "(c) W4A8, rounding to nearest", _cost(part["W4A8 nearest"]), "", None
    fast, plain = part["W4A8 AdaRound fast"], part["W4A8 AdaRound plain"]
    yield "(c) W4A8, AdaRound plain, whole job", _cost(plain), "", None
    kept = (
        "failed" not in fast
        and "failed" not in plain
        and fast["cpu"] <= 20
        and fast["accuracy"] >= plain["accuracy"] - 0.3
    )
    yield "(c) W4A8, AdaRound fast, whole job", _cost(fast), "<= 20 CPU s, within 0.3 of plain", kept


def show(found: Values) -> bool:
    """Print the table; returns whether all targets were met."""
    table = Table("what", "measured", "promise", "kept", title="ResNet-20, 512 calibration images, 6000 test images")
    lines = list(rows(found))
    for what, measured, promise, kept in lines:
        table.add_row(what, measured, promise, "" if kept is None else "yes" if kept else "[red]NO[/red]")
    Console(width=150).print(table)
    return all(kept is not False for *_, kept in lines)


def machine() -> Values:
    """The machine of the measurement."""
    return {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
            "torch": torch.__version__, "onnxruntime": onnxruntime.__version__,
            "load": os.getloadavg()[0], "repetitions": REPETITIONS}  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Post-training quantization of ResNet-20, ours beside other tools")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--job", choices=list(JOBS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        run_job(arguments.job, arguments.folder)
        return
    if not ASSETS.is_dir():
        print(f"left out: the real models are not in {ASSETS} (set AMCT_ASSETS)")
        return
    torch.set_num_threads(1)
    found: Values = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.parts or PARTS:
            found[part] = globals()[part](Path(folder))
    kept = show(found)
    RESULTS.parent.mkdir(exist_ok=True)
    before = json.loads(RESULTS.read_text()) if arguments.parts and RESULTS.exists() else {}
    all_found = {**before, **found}
    table = [dict(zip(("what", "measured", "wanted", "kept"), row, strict=True)) for row in rows(all_found)]
    written = {"machine": machine(), "rows": table, "partial": any(part not in all_found for part in PARTS)}
    RESULTS.write_text(json.dumps({**all_found, **written}, indent=1) + "\n")
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
