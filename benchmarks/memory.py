"""The peak memory of quantize and save, in multiples of the float parameters, for each front door.

    python benchmarks/memory.py                 MLP, AlexNet and ResNet-50 through all doors
    python benchmarks/memory.py resnet onnx     only lines whose name contains each of these words
    python benchmarks/memory.py vgg             VGG-16, which takes minutes; "bert": an encoder, PyTorch only

A line is the peak of a process that reads a network, quantizes it with two samples and saves it in the default formats,
checked, minus the peak of a process that does the same with a toy network of the same input, divided by the bytes of
the parameters. The user's own copy of the model counts too. Networks have the shapes of well-known ones and random
weights. One thread. The toy's job runs once before anything is measured: it compiles loops, which takes memory too.
Above 500 MB of parameters a process of its own loads the files for the check; its peak is told beside the line, and
does not count. The table is printed and written to ``benchmarks/results/memory.json``.
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
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).resolve().parent / "results" / "memory.json"
MOST = 3.5
PICTURE, ROW, WORDS = (3, 224, 224), (784,), (128,)
SAMPLES = 2
CHECKING_MB = 100
"""Smaller children are no checks of ours: torch looks for a compiler."""


@dataclass(frozen=True)
class Line:
    """One measurement: a network through a door."""

    name: str
    parameters_mb: float
    peak_mb: float
    toy_mb: float
    ratio: float
    seconds: float
    kept: bool
    checking_mb: float = 0.0
    """The peak of the processes that the job starts; 0: there are none."""


# -- networks: as prototxt, and as modules -----------------------------------------------------------------------------


class Prototxt:
    """Writes the text of a net, layer by layer; each layer reads the one before unless it is told otherwise."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        dims = " ".join(f"dim: {size}" for size in (1, *shape))
        self.text = f'layer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ {dims} }} }} }}\n'
        self.top = "data"
        self._count = 0

    def layer(self, kind: str, options: str = "", bottoms: tuple[str, ...] = (), *, in_place: bool = False) -> str:
        """Add a layer; returns its top."""
        self._count += 1
        name = f"{kind.lower()}{self._count}"
        read = " ".join(f'bottom: "{blob}"' for blob in bottoms or (self.top,))
        top = self.top if in_place else name
        self.text += f'layer {{ name: "{name}" type: "{kind}" {read} top: "{top}" {options} }}\n'
        self.top = top
        return top

    def convolution(self, outputs: int, kernel: int, stride: int = 1, pad: int = 0, *, bias: bool = True) -> str:
        """Add a convolution."""
        options = (
            f"num_output: {outputs} kernel_size: {kernel} stride: {stride} pad: {pad} bias_term: {str(bias).lower()}"
        )
        return self.layer("Convolution", f'convolution_param {{ {options} weight_filler {{ type: "msra" }} }}')

    def norm(self) -> str:
        """Add a batch norm with its scale."""
        self.layer("BatchNorm", "batch_norm_param { use_global_stats: true }", in_place=True)
        return self.layer("Scale", "scale_param { bias_term: true }", in_place=True)

    def linear(self, outputs: int) -> str:
        """Add an inner product."""
        options = f'num_output: {outputs} weight_filler {{ type: "msra" }}'
        return self.layer("InnerProduct", f"inner_product_param {{ {options} }}")

    def pool(self, kernel: int, stride: int, how: str = "MAX") -> str:
        """Add a pooling."""
        return self.layer("Pooling", f"pooling_param {{ pool: {how} kernel_size: {kernel} stride: {stride} }}")

    def relu(self) -> str:
        """Add a ReLU in place."""
        return self.layer("ReLU", in_place=True)


MLP = (4096, 4096, 10)
ALEXNET = (
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)
VGG = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
BERT_WORDS, BERT_WIDTH, BERT_BLOCKS = 30522, 768, 12
RESNET = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))


def mlp_text() -> str:
    """784-4096-4096-10."""
    net = Prototxt(ROW)
    for place, size in enumerate(MLP):
        net.linear(size)
        if place < len(MLP) - 1:
            net.relu()
    return net.text


def alexnet_text() -> str:
    """AlexNet of one column."""
    net = Prototxt(PICTURE)
    for outputs, kernel, stride, pad, pooled in ALEXNET:
        net.convolution(outputs, kernel, stride, pad)
        net.relu()
        if pooled:
            net.pool(3, 2)
    for size in (4096, 4096):
        net.linear(size)
        net.relu()
    net.linear(1000)
    return net.text


def vgg_text() -> str:
    """VGG-16."""
    net = Prototxt(PICTURE)
    for width, count in VGG:
        for _ in range(count):
            net.convolution(width, 3, 1, 1)
            net.relu()
        net.pool(2, 2)
    for size in (4096, 4096):
        net.linear(size)
        net.relu()
    net.linear(1000)
    return net.text


def resnet_text() -> str:
    """ResNet-50."""
    net = Prototxt(PICTURE)
    net.convolution(64, 7, 2, 3, bias=False)
    net.norm()
    net.relu()
    net.pool(3, 2)
    for width, count, first_stride in RESNET:
        for place in range(count):
            start, stride = net.top, first_stride if place == 0 else 1
            for outputs, kernel, step in ((width, 1, 1), (width, 3, stride), (4 * width, 1, 1)):
                net.convolution(outputs, kernel, step, kernel // 2, bias=False)
                net.norm()
                if outputs == width:
                    net.relu()
            branch = net.top
            if place == 0:
                net.top = start
                net.convolution(4 * width, 1, stride, bias=False)
                start = net.norm()
            net.layer("Eltwise", bottoms=(branch, start))
            net.relu()
    net.layer("Pooling", "pooling_param { pool: AVE global_pooling: true }")
    net.linear(1000)
    return net.text


def toy_text(shape: tuple[int, ...]) -> str:
    """A net of a few parameters that reads inputs of a shape."""
    net = Prototxt(shape)
    if len(shape) > 1:
        net.convolution(4, 3, 2, bias=False)
        net.norm()
        net.relu()
        net.layer("Pooling", "pooling_param { pool: AVE global_pooling: true }")
    net.linear(10)
    return net.text


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        rows = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        layers: list[nn.Module] = []
        for read, written, kernel, step in rows:
            layers += [nn.Conv2d(read, written, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(written)]
            layers += [nn.ReLU()] if written == width else []
        self.body, self.relu = nn.Sequential(*layers), nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block of one input."""
        return self.relu(self.body(x) + self.shortcut(x))


def mlp_module() -> nn.Module:
    """784-4096-4096-10."""
    sizes = (*ROW, *MLP)
    layers: list[nn.Module] = []
    for read, written in pairwise(sizes):
        layers += [nn.Linear(read, written), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def alexnet_module() -> nn.Module:
    """AlexNet of one column."""
    layers: list[nn.Module] = []
    read = PICTURE[0]
    for written, kernel, stride, pad, pooled in ALEXNET:
        layers += [nn.Conv2d(read, written, kernel, stride, pad), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2)] if pooled else []
        read = written
    head = [nn.Flatten(), nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head)


def vgg_module() -> nn.Module:
    """VGG-16."""
    layers: list[nn.Module] = []
    read = PICTURE[0]
    for width, count in VGG:
        for _ in range(count):
            layers += [nn.Conv2d(read, width, 3, 1, 1), nn.ReLU()]
            read = width
        layers.append(nn.MaxPool2d(2, 2))
    head = [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head)


class Encoder(nn.Module):
    """An encoder of the shape of BERT-base, for sentences of 128 words."""

    def __init__(self, words: int = BERT_WORDS, width: int = BERT_WIDTH, blocks: int = BERT_BLOCKS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(*WORDS, width)
        block = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, activation="gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.pooler = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The pooled first word."""
        places = torch.arange(x.shape[1], device=x.device)
        return torch.tanh(self.pooler(self.blocks(self.words(x) + self.places(places))[:, 0]))


def resnet_module() -> nn.Module:
    """ResNet-50."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2)]
    read = 64
    for width, count, first_stride in RESNET:
        for place in range(count):
            layers.append(Bottleneck(read, width, first_stride if place == 0 else 1))
            read = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(read, 1000))


def toy_module(shape: tuple[int, ...]) -> nn.Module:
    """A net of a few parameters that reads inputs of a shape."""
    if shape == WORDS:
        return Encoder(words=BERT_WORDS // 1000, width=16, blocks=1)
    if len(shape) == 1:
        return nn.Sequential(nn.Linear(shape[0], 10))
    layers = [nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4, 10))


@dataclass(frozen=True)
class Network:
    """A network in its two forms."""

    name: str
    shape: tuple[int, ...]
    module: Callable[[], nn.Module]
    text: Callable[[], str] | None = None
    """None: there is no Caffe net of it, and so no file either."""

    @property
    def data(self) -> np.ndarray:
        """Two samples."""
        random = np.random.default_rng(0)
        if self.shape == WORDS:
            return random.integers(0, BERT_WORDS // 1000, (SAMPLES, *self.shape))
        return random.standard_normal((SAMPLES, *self.shape), np.float32)

    @property
    def parameters(self) -> int:
        """The bytes of its parameters."""
        with torch.device("meta"):
            return sum(each.numel() * each.element_size() for each in self.module().parameters())

    @property
    def toy(self) -> Network:
        """The toy network of the same input."""
        text = None if self.text is None else lambda: toy_text(self.shape)
        return Network("toy", self.shape, lambda: toy_module(self.shape), text)


NETWORKS = {
    network.name: network
    for network in (
        Network("mlp-20m", ROW, mlp_module, mlp_text),
        Network("alexnet", PICTURE, alexnet_module, alexnet_text),
        Network("resnet-50", PICTURE, resnet_module, resnet_text),
        Network("vgg-16", PICTURE, vgg_module, vgg_text),
        Network("bert-base", WORDS, Encoder),
    )
}
BY_NAME_ONLY = ("vgg-16", "bert-base")
DOORS = ("pytorch", "onnx", "caffe")


# -- in a process of its own -------------------------------------------------------------------------------------------


def write_files(network: Network, folder: Path) -> None:
    """Write the network as a Caffe pair and as ONNX."""
    from amct.caffe.engine.net import Net
    from amct.caffe.onnx.graph import float_onnx

    if network.text is None:
        return
    (folder / "net.prototxt").write_text(network.text())
    net = Net.from_file(folder / "net.prototxt")
    for layer in net.layers:
        if layer.type == "BatchNorm":
            for blob in layer.blobs[1:]:  # variance and number of batches
                blob.tensor.fill_(1)
    net.save_weights(folder / "net.caffemodel")
    (folder / "net.onnx").write_bytes(float_onnx(net).model.SerializeToString())


def run_job(network: Network, door: str, folder: Path) -> None:
    """Quantize and save; prints the peak memory in KB, the CPU time in seconds and the peak of its children in KB."""
    torch.manual_seed(0)
    data = network.data
    start = time.process_time()
    if door == "pytorch":
        import amct.pytorch

        quantized = amct.pytorch.quantize(network.module().eval(), torch.from_numpy(data))
    elif door == "onnx":
        import amct.onnx_model

        quantized = amct.onnx_model.quantize(folder / "net.onnx", [data[:1], data[1:]])
    else:
        import amct.caffe

        quantized = amct.caffe.quantize(folder / "net.prototxt", folder / "net.caffemodel", [data[:1], data[1:]])
    quantized.save(folder / "out" / "net")
    seconds = time.process_time() - start
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]), seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def in_child(network: str, task: str, folder: Path) -> list[float]:
    """Run a task in a process of its own; returns the numbers that it prints."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", network, task, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AMCT_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
    return [float(word) for word in done.stdout.split()]


def child(name: str, task: str, folder: Path) -> None:
    """What a process does."""
    torch.set_num_threads(1)
    network = NETWORKS[name.removesuffix(".toy")]
    network = network.toy if name.endswith(".toy") else network
    if task == "files":
        write_files(network, folder)
    else:
        run_job(network, task, folder)


# -- table -------------------------------------------------------------------------------------------------------------


def measure(network: Network, doors: list[str]) -> list[Line]:
    """The peaks of a network through some doors."""
    lines = []
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as toy:
        in_child(network.name, "files", Path(own))
        in_child(f"{network.name}.toy", "files", Path(toy))
        for door in doors:
            in_child(f"{network.name}.toy", door, Path(toy))  # compiles what is not compiled yet
            base, _, _ = in_child(f"{network.name}.toy", door, Path(toy))
            peak, seconds, checking = in_child(network.name, door, Path(own))
            ratio = (peak - base) * 1024 / network.parameters
            megabytes = network.parameters / 1e6, peak * 1024e-6, base * 1024e-6
            line = Line(f"{network.name}, {door}", *megabytes, ratio, seconds, ratio <= MOST, checking * 1024e-6)
            lines.append(line)
    return lines


def show(lines: list[Line]) -> None:
    """Print the table."""
    table = Table(title=f"Peak memory of quantize and save; at most {MOST} times the parameters is wanted")
    for column in ("network, door", "parameters", "peak", "toy", "ratio", "CPU", ""):
        table.add_column(column, justify="left" if column in ("network, door", "") else "right")
    for line in lines:
        mark = "[green]kept" if line.kept else "[red]missed"
        sizes = (f"{size:.0f} MB" for size in (line.parameters_mb, line.peak_mb, line.toy_mb))
        beside = f", and {line.checking_mb:.0f} MB in a process that checks" if line.checking_mb > CHECKING_MB else ""
        table.add_row(line.name, *sizes, f"{line.ratio:.2f}", f"{line.seconds:.1f} s", mark + beside)
    Console(width=120).print(table)


def main() -> int:
    """Run the chosen lines; the exit code tells whether all are within the limit."""
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4], Path(sys.argv[4]))
        return 0
    words = sys.argv[1:]
    chosen: dict[str, list[str]] = {}
    for name, door in product(NETWORKS, DOORS):
        is_asked = name not in BY_NAME_ONLY or any(word in name for word in words)
        is_possible = NETWORKS[name].text is not None or door == "pytorch"
        if is_asked and is_possible and all(word in f"{name}, {door}" for word in words):
            chosen.setdefault(name, []).append(door)
    lines = [line for name, doors in chosen.items() for line in measure(NETWORKS[name], doors)]
    show(lines)
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "threads": 1, "lines": [asdict(line) for line in lines]}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(line.kept for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
