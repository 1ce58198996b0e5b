"""How long small Caffe nets take beside the same nets written in bare torch, and beside OpenCV's dnn module.

    python benchmarks/caffe_small.py

LeNet and the three nets of MTCNN from the folder of real models (AMCT_ASSETS, or ../shared/assets beside the project),
one image at a time, one thread. Their kernels take microseconds, so this shows what the engine adds to them. Bare
torch is an ``nn.Module`` with the same weights, in inference mode. All get a NumPy array and return NumPy arrays; they
take turns in one process, and the median CPU time of five rounds counts. The table is printed and written to
``benchmarks/results/caffe_small.json``.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from caffe_engine import ASSETS, ROUNDS, Model, opencv_forward, our_forward, seconds_of
from rich.console import Console
from rich.table import Table
from torch import nn

from amct.caffe import pycaffe as caffe

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results" / "caffe_small.json"
MOST_TIME = 1.3
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Line:
    """The microseconds of a forward of one net."""

    name: str
    bare_torch: float
    all_blobs: float
    lean: float
    opencv: float

    @property
    def ratio(self) -> float:
        """What a net takes as pycaffe makes it, beside bare torch."""
        return self.all_blobs / self.bare_torch

    def row(self) -> dict[str, object]:
        """The line in the table of docs/benchmarks.md."""
        measured = f"{self.all_blobs:.0f} ÷ {self.bare_torch:.0f} µs = {self.ratio:.2f} (OpenCV {self.opencv:.0f} µs)"
        name = f"{self.name}: our time ÷ bare torch's"
        return {"what": name, "measured": measured, "wanted": f"<= {MOST_TIME}", "kept": self.ratio <= MOST_TIME}


def models() -> dict[Model, int]:
    """The nets and the number of channels of their inputs."""
    digits, faces = ASSETS / "caffe_lenet_mnist", ASSETS / "caffe_mtcnn"
    lenet = Model("LeNet", str(digits / "lenet.prototxt"), str(digits / "lenet_iter_10000.caffemodel"), (28, 28))
    found = {lenet: 1}
    for name, size in (("det1", 12), ("det2", 24), ("det3", 48)):
        found[Model(name, str(faces / f"{name}.prototxt"), str(faces / f"{name}.caffemodel"), (size, size))] = 3
    return {model: channels for model, channels in found.items() if Path(model.caffemodel).exists()}


class Bare(nn.Module):
    """A net as one writes it in torch: a trunk, and heads of which the first ends in a softmax."""

    def __init__(self, net: Any) -> None:  # noqa: ANN401  a pycaffe net
        super().__init__()
        trunk: list[nn.Module] = []
        heads: list[nn.Module] = []
        current = trunk
        for layer in net.layers:
            if layer.type == "Split":
                current = heads
            elif layer.type == "InnerProduct" and current is trunk and not _has(trunk, nn.Linear):
                trunk += [nn.Flatten(), _module(layer)]
            elif layer.type not in ("Input", "Softmax", "Dropout"):
                current.append(_module(layer))
        self.trunk, self.heads = nn.Sequential(*trunk), nn.ModuleList(heads)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The outputs, the probabilities first."""
        x = self.trunk(x)
        if not self.heads:
            return [torch.softmax(x, 1)]
        first, *others = [head(x) for head in self.heads]
        return [torch.softmax(first, 1), *others]


def _has(modules: list[nn.Module], kind: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) for module in modules)


def _module(layer: Any) -> nn.Module:  # noqa: ANN401  a layer of the engine
    values = [torch.tensor(blob.data) for blob in layer.blobs]
    if layer.type == "ReLU":
        return nn.ReLU(inplace=True)
    if layer.type == "Pooling":
        return nn.MaxPool2d(layer.window.kernel, layer.window.stride, ceil_mode=True)
    if layer.type == "PReLU":
        module: nn.Module = nn.PReLU(len(values[0]))
    elif layer.type == "Convolution":
        module = nn.Conv2d(values[0].shape[1], len(values[0]), layer.window.kernel)
    else:
        module = nn.Linear(values[0].shape[1], len(values[0]))
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.copy_(value)
    return module


def bare_torch(model: Model, picture: np.ndarray) -> Callable[[], list[np.ndarray]]:  # type: ignore[type-arg]
    """A forward in bare torch."""
    module = Bare(caffe.Net(model.prototxt, caffe.TEST, weights=model.caffemodel)).eval()

    def forward() -> list[np.ndarray]:  # type: ignore[type-arg]
        with torch.inference_mode():
            return [output.numpy() for output in module(torch.from_numpy(picture))]

    return forward


def measure(model: Model, channels: int) -> Line:
    """The median of five rounds in which the engines take turns."""
    picture = np.random.RandomState(0).rand(1, channels, *model.size).astype(np.float32)
    runs: dict[str, Callable[[], Any]] = {
        "bare_torch": bare_torch(model, picture),
        "all_blobs": our_forward(model, picture, "all blobs", 1),
        "lean": our_forward(model, picture, "lean", 1),
        "opencv": opencv_forward(model, picture, 1),
    }
    _check_equal(runs)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, forward in runs.items():
            times[name].append(seconds_of(forward, 1, seconds=0.3))
    return Line(model.name, **{name: MICROSECONDS * statistics.median(each) for name, each in times.items()})


def _check_equal(runs: dict[str, Callable[[], Any]]) -> None:
    """The engines must compute the same, or their times say nothing."""
    torch_outputs, ours = runs["bare_torch"](), runs["all_blobs"]()
    for value in ours.values():
        nearest = min(np.abs(value - other).max() for other in torch_outputs if other.shape == value.shape)
        assert nearest < 1e-5, f"bare torch differs by {nearest}"


def show(lines: list[Line]) -> None:
    """Print the table and write it as JSON."""
    table = Table(title="Microseconds of a forward of one image, one thread")
    for column in (
        "net",
        "bare torch",
        "all blobs",
        "lean",
        "OpenCV",
        "all blobs / bare torch",
        f"wanted <= {MOST_TIME}",
    ):
        table.add_column(column, justify="left" if column == "net" else "right")
    for line in lines:
        cells = [f"{value:.0f}" for value in (line.bare_torch, line.all_blobs, line.lean, line.opencv)]
        table.add_row(line.name, *cells, f"{line.ratio:.2f}", "kept" if line.ratio <= MOST_TIME else "[red]missed")
    Console(width=120).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    report = {"machine": machine, "lines": [asdict(line) for line in lines], "rows": [line.row() for line in lines]}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    """Measure all nets; the exit code tells whether all targets were met."""
    torch.set_num_threads(1)
    lines = [measure(model, channels) for model, channels in models().items()]
    show(lines)
    return 0 if all(line.ratio <= MOST_TIME for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
