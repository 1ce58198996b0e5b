"""What Caffe calibration costs beside plain forwards of the same batches, and whether its memory stays the same.

    python benchmarks/ptq_caffe.py              all lines
    python benchmarks/ptq_caffe.py memory       only lines whose name contains this

SqueezeNet and open_nsfw with 32 pictures from the folder of real models (AMCT_ASSETS, or ../shared/assets beside the
project); without it a small net that is made up. Calibration is the forwards of the modified model, from the first
batch to the last record entry; the yardstick is the same forwards of the original model. Both nets free their blobs
(``keep_blobs=False``) and run on one thread; the median CPU time of five turns counts. Memory is the peak of child
processes that go through the whole flow with 1 and 20 batches. The table is printed and written to
``benchmarks/results/ptq_caffe.json``.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import amct_caffe as amct
from amct.caffe.engine.net import Net

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from amct.caffe.ptq.graph import QuantGraph

RESULTS = Path(__file__).resolve().parent / "results" / "ptq_caffe.json"
ASSETS = Path(os.environ.get("AMCT_ASSETS", Path(__file__).resolve().parents[2] / "shared" / "assets"))
MEAN = (104, 117, 123)
BATCH, BATCHES = 4, 8
FEW, MANY = 1, 20
TURNS = 5
MOST_TIME = {"SqueezeNet 1.0": 1.20, "open_nsfw": 1.25, "made-up net": 1.6}
MOST_MEMORY = 1.02

MADE_UP = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 dim: 96 dim: 96 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 32 kernel_size: 3 stride: 2 weight_filler { type: "msra" } } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "conv2" type: "Convolution" bottom: "conv1" top: "conv2"
  convolution_param { num_output: 64 kernel_size: 3 pad: 1 weight_filler { type: "msra" } } }
layer { name: "relu2" type: "ReLU" bottom: "conv2" top: "conv2" }
layer { name: "conv3" type: "Convolution" bottom: "conv2" top: "conv3"
  convolution_param { num_output: 64 kernel_size: 3 pad: 1 weight_filler { type: "msra" } } }
layer { name: "fc" type: "InnerProduct" bottom: "conv3" top: "fc"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
"""


@dataclass(frozen=True)
class Model:
    """A net and the size of its input."""

    name: str
    prototxt: Path
    caffemodel: Path
    size: int


@dataclass(frozen=True)
class Line:
    """One measurement: ours, the reference, their ratio, and the target."""

    name: str
    ours: str
    yardstick: str
    value: float
    promise: str
    kept: bool

    def row(self) -> dict[str, object]:
        """The line in the table of docs/benchmarks.md."""
        measured = f"{self.ours} ÷ {self.yardstick} = {self.value:.3g}" if self.yardstick else self.ours
        kept = self.kept if self.promise else None
        return {"what": self.name, "measured": measured, "wanted": self.promise, "kept": kept}


def models(folder: Path) -> list[Model]:
    """The real nets that are available, or a generated one."""
    squeezenet, nsfw = ASSETS / "caffe_squeezenet_v1.0_dc", ASSETS / "caffe_open_nsfw"
    real = [
        Model(
            "SqueezeNet 1.0",
            squeezenet / "SqueezeNet_deploy.prototxt",
            squeezenet / "squeezenet_v1.0_dc.caffemodel",
            227,
        ),
        Model("open_nsfw", nsfw / "deploy.prototxt", nsfw / "resnet_50_1by2_nsfw.caffemodel", 224),
    ]
    found = [model for model in real if model.caffemodel.exists()]
    if found:
        return found
    files = folder / "net.prototxt", folder / "net.caffemodel"
    files[0].write_text(MADE_UP)
    Net.from_file(files[0]).save_weights(files[1])
    return [Model("made-up net", *files, 96)]


def pictures(size: int, count: int) -> Iterator[NDArray[np.float32]]:
    """Centre crops, BGR, minus the mean; noise if there are no images."""
    labels = ASSETS / "imagenet" / "labels.tsv"
    if not labels.exists():
        random = np.random.default_rng(0)
        yield from (random.normal(0, 60, (3, size, size)).astype(np.float32) for _ in range(count))
        return
    start = (256 - size) // 2
    for row in labels.read_text().splitlines()[:count]:
        path = next((ASSETS / "imagenet").rglob(row.split("\t")[0]))
        colours = np.asarray(Image.open(path).convert("RGB"), np.float32)[start : start + size, start : start + size]
        yield (colours[..., ::-1] - MEAN).transpose(2, 0, 1).astype(np.float32)


def batches(size: int, count: int, batch: int = BATCH) -> Iterator[torch.Tensor]:
    """Batches of images, one in memory at a time."""
    source = pictures(size, count * batch)
    for _ in range(count):
        yield torch.from_numpy(np.stack([next(source) for _ in range(batch)]))


def calibration_model(model: Model, batch_num: int, folder: Path) -> tuple[QuantGraph, tuple[Path, Path]]:
    """The guide's flow up to the modified model."""
    config, record = folder / "config.json", folder / "record.txt"
    modified = folder / "modified.prototxt", folder / "modified.caffemodel"
    amct.create_quant_config(config, model.prototxt, model.caffemodel, batch_num)
    graph = amct.init(config, model.prototxt, model.caffemodel, record)
    amct.weights_quantize_model(graph, *modified)
    amct.activation_quantize_model(graph, *modified)
    return graph, modified


def forwards(files: tuple[Path, Path], data: list[torch.Tensor]) -> float:
    """CPU seconds of the forward passes of a new net, without reading it."""
    net = Net.from_file(files[0], keep_blobs=False)
    net.load_weights(files[1])
    net.blob("data").set_tensor(data[0])
    begin = time.process_time()
    for batch in data:
        net.blob("data").set_tensor(batch)
        net.forward()
    return time.process_time() - begin


def speed(folder: Path) -> Iterator[Line]:
    """Calibration compared with plain forward passes."""
    torch.set_num_threads(1)
    for model in models(folder):
        data = list(batches(model.size, BATCHES))
        _, modified = calibration_model(model, BATCHES, folder)
        record = folder / "record.txt"
        fresh = record.read_bytes()
        turns = []
        for _ in range(TURNS + 1):
            one = forwards((model.prototxt, model.caffemodel), data)
            record.write_bytes(fresh)  # start with the weight factors alone
            turns.append((one, forwards(modified, data)))
        plain, calibrating = (median(each) for each in zip(*turns[1:], strict=True))  # the first turn compiles
        ratio = calibrating / plain
        yield Line(
            f"speed: {model.name}, {BATCHES} batches of {BATCH}",
            f"{calibrating:.2f} CPU s",
            f"plain forwards: {plain:.2f} CPU s",
            ratio,
            f"<= {MOST_TIME[model.name]:.2f} x",
            ratio <= MOST_TIME[model.name],
        )


def memory(folder: Path) -> Iterator[Line]:
    """Peak memory of child processes with few batches and with many."""
    for model, batch in product(models(folder), (1, BATCH)):
        few, many = (_child_peak(model, count, batch) for count in (FEW, MANY))
        yield Line(
            f"memory: {model.name}, batch_num {MANY}, batches of {batch}",
            f"{many / 1024:.0f} MB",
            f"batch_num {FEW}: {few / 1024:.0f} MB",
            many / few,
            f"<= {MOST_MEMORY} x",
            many / few <= MOST_MEMORY,
        )


def _child_peak(model: Model, batch_num: int, batch: int) -> int:
    arguments = [str(model.prototxt), str(model.caffemodel), str(model.size), str(batch_num), str(batch)]
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def calibrate_and_report(model: Model, batch_num: int, size: int) -> None:
    """Run in the child process: the whole flow, then print its peak memory in KB."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        graph, modified = calibration_model(model, batch_num, Path(folder))
        net = Net.from_file(modified[0], keep_blobs=False)
        net.load_weights(modified[1])
        for batch in batches(model.size, batch_num, size):
            net.blob("data").set_tensor(batch)
            net.forward()
        amct.save_model(graph, "Both", Path(folder) / "out" / "net")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def show(lines: list[Line]) -> None:
    """Print the table."""
    table = Table(title="Calibration of Caffe models")
    for column in ("what", "ours", "yardstick", "ratio", "promise", ""):
        table.add_column(column, justify="right" if column in ("ours", "ratio") else "left")
    for line in lines:
        mark = "[green]kept" if line.kept else "[red]missed"
        table.add_row(line.name, line.ours, line.yardstick, f"{line.value:.3g}", line.promise, mark)
    Console(width=150).print(table)


def main() -> int:
    """Run the chosen lines; the exit code tells whether all targets were met."""
    os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")
    if sys.argv[1:2] == ["--child"]:
        prototxt, caffemodel, *numbers = sys.argv[2:]
        size, batch_num, batch = map(int, numbers)
        calibrate_and_report(Model("", Path(prototxt), Path(caffemodel), size), batch_num, batch)
        return 0
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    # Memory first: a child inherits its parent's memory as its peak.
    parts: dict[str, Callable[[Path], Iterator[Line]]] = {"memory": memory, "speed": speed}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # for the log
        lines = [line for name, part in parts.items() if wanted in name for line in part(Path(folder))]
    show(lines)
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "threads": 1, "lines": [asdict(line) for line in lines],
              "rows": [line.row() for line in lines]}  # fmt: skip
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(line.kept for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
