"""How fast the Caffe engine runs nets and how much memory that takes, beside OpenCV's dnn module in the same run.

    python benchmarks/caffe_engine.py                 all lines, with one thread and with two
    python benchmarks/caffe_engine.py --rounds 1      quickly
    python benchmarks/caffe_engine.py --threads 1     with one thread, in CPU time: right on a busy machine too
    python benchmarks/caffe_engine.py --only RFB      only nets whose name contains this

SqueezeNet, open_nsfw and RFB-320 are read from the folder of real models (AMCT_ASSETS, or ../shared/assets beside the
project); where it is missing only ResNet-50 runs, with random weights. Every measurement is a process of its own
(so that peak memory is its own), the engines take turns, and the median of all rounds counts; engines without a goal
run in the first round only. The table is printed and written to ``benchmarks/results/caffe_engine.json``. Small nets
are in ``caffe_small.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results" / "caffe_engine.json"
ASSETS = Path(os.environ.get("AMCT_ASSETS", Path(__file__).parents[2] / "shared" / "assets"))
ENGINES = ("OpenCV dnn", "all blobs", "lean", "torch", "onnxruntime")
OURS = ENGINES[2:]  # those that are compared; "lean" nets choose between the other two by themselves
RUNTIMES = ENGINES[3:]
WITH_GOAL = ("OpenCV dnn", "lean")
BATCHES = (1, 8)
WARM_UP, SECONDS, ROUNDS = 4, 1.0, 5
THREADS = (1, 2)
LEAST_RATIO = 1.2
MEGABYTE = 2**20


@dataclass(frozen=True)
class Model:
    """A net and its input."""

    name: str
    prototxt: str
    caffemodel: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Line:
    """One measurement."""

    model: str
    engine: str
    batch: int
    images_per_second: float
    peak_megabytes: float


# ------------------------------------------------------------------ ResNet-50 as a prototxt


def resnet50() -> str:
    """ResNet-50: in-place BatchNorm, Scale and ReLU after every convolution."""
    lines = [
        'name: "ResNet-50"',
        'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 224 dim: 224 } } }',
        *_convolution("conv1", "data", 64, 7, 2, relu=True),
        'layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1" '
        "pooling_param { pool: MAX kernel_size: 3 stride: 2 } }",
    ]
    bottom = "pool1"
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 2):
        for block in range(blocks):
            name = f"res{stage}{chr(ord('a') + block)}"
            lines += _block(name, bottom, width, stride=2 if block == 0 and stage > 2 else 1, widen=block == 0)
            bottom = name
    lines += [
        f'layer {{ name: "pool5" type: "Pooling" bottom: "{bottom}" top: "pool5" '
        "pooling_param { pool: AVE global_pooling: true } }",
        'layer { name: "fc1000" type: "InnerProduct" bottom: "pool5" top: "fc1000" '
        "inner_product_param { num_output: 1000 } }",
        'layer { name: "prob" type: "Softmax" bottom: "fc1000" top: "prob" }',
    ]
    return "\n".join(lines)


def _convolution(name: str, bottom: str, outputs: int, kernel: int, stride: int, *, relu: bool) -> list[str]:
    lines = [
        f'layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{ '
        f"num_output: {outputs} kernel_size: {kernel} stride: {stride} pad: {kernel // 2} bias_term: false "
        'weight_filler { type: "msra" } } }',
        f'layer {{ name: "bn_{name}" type: "BatchNorm" bottom: "{name}" top: "{name}" }}',
        "layer "
        f'{{ name: "scale_{name}" type: "Scale" bottom: "{name}" top: "{name}" scale_param {{ bias_term: true }} }}',
    ]
    if relu:
        lines.append(f'layer {{ name: "{name}_relu" type: "ReLU" bottom: "{name}" top: "{name}" }}')
    return lines


def _block(name: str, bottom: str, width: int, *, stride: int, widen: bool) -> list[str]:
    lines, shortcut = [], bottom
    if widen:
        shortcut = f"{name}_branch1"
        lines += _convolution(shortcut, bottom, 4 * width, 1, stride, relu=False)
    lines += _convolution(f"{name}_branch2a", bottom, width, 1, stride, relu=True)
    lines += _convolution(f"{name}_branch2b", f"{name}_branch2a", width, 3, 1, relu=True)
    lines += _convolution(f"{name}_branch2c", f"{name}_branch2b", 4 * width, 1, 1, relu=False)
    lines += [
        f'layer {{ name: "{name}" type: "Eltwise" bottom: "{shortcut}" bottom: "{name}_branch2c" top: "{name}" }}',
        f'layer {{ name: "{name}_relu" type: "ReLU" bottom: "{name}" top: "{name}" }}',
    ]
    return lines


def write_resnet50(folder: Path) -> Model:
    """Write the prototxt and a caffemodel with random weights."""
    from amct.caffe import pycaffe as caffe

    prototxt = folder / "resnet50.prototxt"
    prototxt.write_text(resnet50())
    caffe.set_random_seed(0)
    net = caffe.Net(str(prototxt), caffe.TEST)
    for name, blobs in net.params.items():
        if name.startswith("bn_"):
            blobs[1].data[...] = 1
            blobs[2].data[...] = 1
    net.save(str(folder / "resnet50.caffemodel"))
    return Model("ResNet-50", str(prototxt), str(folder / "resnet50.caffemodel"), (224, 224))


def models(folder: Path) -> list[Model]:
    """The models that are available on this machine."""
    squeezenet, nsfw, faces = (
        ASSETS / name for name in ("caffe_squeezenet_v1.0_dc", "caffe_open_nsfw", "ultralight_face")
    )
    found = [
        Model(
            "SqueezeNet 1.0",
            str(squeezenet / "SqueezeNet_deploy.prototxt"),
            str(squeezenet / "squeezenet_v1.0_dc.caffemodel"),
            (227, 227),
        ),
        Model("open_nsfw", str(nsfw / "deploy.prototxt"), str(nsfw / "resnet_50_1by2_nsfw.caffemodel"), (224, 224)),
        Model("RFB-320", str(faces / "RFB-320.prototxt"), str(faces / "RFB-320.caffemodel"), (240, 320)),
    ]
    return [*(model for model in found if Path(model.caffemodel).exists()), write_resnet50(folder)]


# ------------------------------------------------------------------ one measurement, in a separate process


def measure(model: Model, engine: str, batch: int, threads: int) -> Line:
    """Images per second, the median of the forwards of ``SECONDS``; and the process's peak memory."""
    pictures = np.random.RandomState(0).randint(0, 256, (batch, 3, *model.size)).astype(np.float32) - 110
    forward = (
        opencv_forward(model, pictures, threads)
        if engine == ENGINES[0]
        else our_forward(model, pictures, engine, threads)
    )
    return Line(model.name, engine, batch, batch / seconds_of(forward, threads), peak_megabytes())


def seconds_of(forward: Callable[[], object], threads: int, seconds: float = SECONDS) -> float:
    """The median time of a forward: CPU time with one thread, which other jobs on the machine change least."""
    for _ in range(WARM_UP):
        forward()
    clock = time.process_time if threads == 1 else time.perf_counter
    times: list[float] = []
    while sum(times) < seconds:
        before = clock()
        forward()
        times.append(clock() - before)
    return statistics.median(times)


def peak_megabytes() -> float:
    """The peak memory of this process, from /proc (``ru_maxrss`` may be the parent's)."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / MEGABYTE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE


def opencv_forward(model: Model, pictures: np.ndarray, threads: int) -> Callable[[], object]:  # type: ignore[type-arg]
    """A forward of OpenCV, for all outputs."""
    import cv2

    cv2.setNumThreads(threads)
    net = cv2.dnn.readNetFromCaffe(model.prototxt, model.caffemodel)
    outputs = net.getUnconnectedOutLayersNames()

    def forward() -> object:
        net.setInput(pictures)
        return net.forward(outputs)

    return forward


def our_forward(model: Model, pictures: np.ndarray, engine: str, threads: int) -> Callable[[], object]:  # type: ignore[type-arg]
    """A forward of this engine."""
    import torch

    from amct.caffe import pycaffe as caffe

    torch.set_num_threads(threads)
    runtime = engine if engine in RUNTIMES else None
    keep = engine == "all blobs"
    net = caffe.Net(model.prototxt, caffe.TEST, weights=model.caffemodel, keep_blobs=keep, runtime=runtime)
    name = net.inputs[0]
    net.blobs[name].reshape(*pictures.shape)

    def forward() -> object:
        net.blobs[name].data[...] = pictures
        return net.forward()

    return forward


# ------------------------------------------------------------------ the table


def run_all(rounds: int, threads: int, only: str) -> list[Line]:
    """All lines, the engines alternately, the median of all rounds."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for model, batch in product((each for each in models(Path(folder)) if only in each.name), BATCHES):
            measured: dict[str, list[Line]] = {}
            for number, engine in product(range(rounds), ENGINES):
                if number == 0 or engine in WITH_GOAL:
                    measured.setdefault(engine, []).append(_in_a_process(model, engine, batch, threads))
            lines += [sorted(found, key=_speed)[len(found) // 2] for found in measured.values()]
    return lines


def _speed(line: Line) -> float:
    return line.images_per_second


def _in_a_process(model: Model, engine: str, batch: int, threads: int) -> Line:
    task = json.dumps({"model": asdict(model), "engine": engine, "batch": batch, "threads": threads})
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, __file__, "--task", task], capture_output=True, text=True, check=True, env=environment
    )
    return Line(**json.loads(done.stdout.splitlines()[-1]))


def show(lines: list[Line], threads: int) -> list[dict[str, object]]:
    """Print the table of one number of threads, and return its rows."""
    table = Table(title=f"Images per second (peak memory in MB), {threads} thread(s)")
    for column in ("net", "batch", *ENGINES, *(f"{engine} / OpenCV" for engine in OURS), f"wanted >= {LEAST_RATIO}"):
        table.add_column(column, justify="left" if column == "net" else "right")
    found = {(line.model, line.batch, line.engine): line for line in lines}
    rows: list[dict[str, object]] = []
    for model, batch in dict.fromkeys((line.model, line.batch) for line in lines):
        speeds = {engine: found[model, batch, engine].images_per_second for engine in ENGINES}
        peer = speeds[ENGINES[0]]
        cells = [f"{speeds[engine]:.1f} ({found[model, batch, engine].peak_megabytes:.0f})" for engine in ENGINES]
        ratios = [speeds[engine] / peer for engine in OURS]
        mark = "kept" if ratios[0] >= LEAST_RATIO else "[red]missed"
        table.add_row(model, str(batch), *cells, *(f"{ratio:.2f}" for ratio in ratios), mark)
        for engine, ratio in zip(OURS, ratios, strict=True):
            is_asked = engine in RUNTIMES  # the goal is for what a user gets who does not ask
            rows.append(
                {
                    "what": f"{model}, batch {batch}, {threads} thread{'s' * (threads > 1)}: our speed ÷ OpenCV's"
                    + f", runtime {engine}" * is_asked,
                    "measured": f"{speeds[engine]:.1f} ÷ {peer:.1f} images/s = {ratio:.2f}",
                    "wanted": "" if is_asked else f">= {LEAST_RATIO}",
                    "kept": None if is_asked else ratio >= LEAST_RATIO,
                }
            )
    Console(width=150).print(table)
    return rows


def write(rows: list[dict[str, object]], *, partial: bool) -> None:
    """Write the rows of all tables as JSON."""
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows, "partial": partial}, indent=1) + "\n")


def main() -> None:
    """Measure everything, or (in a separate process) one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="nets whose name contains this")
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task = json.loads(arguments.task)
        given = {**task["model"], "size": tuple(task["model"]["size"])}
        line = measure(Model(**given), task["engine"], task["batch"], task["threads"])
        print(json.dumps(asdict(line)))
    else:
        rows = []
        for threads in arguments.threads:
            rows += show(run_all(arguments.rounds, threads, arguments.only), threads)
        write(rows, partial=bool(arguments.only) or set(arguments.threads) != set(THREADS))


if __name__ == "__main__":
    main()
