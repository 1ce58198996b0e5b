"""How fast the algorithms of ``amct.numerics`` are and how much memory they take, beside a yardstick of the same run.

    python benchmarks/numerics.py            all lines
    python benchmarks/numerics.py adaround   only lines whose name contains this

Times are the best of several repetitions, ours and the yardstick's taken in turn, so that other load on the machine
hits both. AdaRound is measured in CPU time of one thread. The table is printed, and written with the machine's data to
``benchmarks/results/numerics.json``.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from amct.numerics.adaround.learning import AdaRoundLayer, AdaRoundResult, CachedData, adaround
from amct.numerics.adaround.rounding import Learning
from amct.numerics.arq import WeightKind, arq
from amct.numerics.hfmg import HfmgObserver
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.integer import ConvolutionGeometry
from amct.numerics.snq import snq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RESULTS = Path(__file__).parent / "results" / "numerics.json"
VALUES = 12_800_000
CANDIDATES = 60
BATCHES = 50
GENERATOR_SEED = 0


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


def best_of(functions: list[Callable[[], object]], repetitions: int = 7) -> list[float]:
    """The shortest wall time of each in seconds, measured alternately."""
    best = [float("inf")] * len(functions)
    for function in functions:
        function()
    for _ in range(repetitions):
        for place, function in enumerate(functions):
            begin = time.perf_counter()
            function()
            best[place] = min(best[place], time.perf_counter() - begin)
    return best


def milliseconds(seconds: float) -> str:
    """The row of the table."""
    return f"{seconds * 1e3:.1f} ms"


def activation(count: int = VALUES) -> torch.Tensor:
    """Values with the distribution of a ReLU output."""
    return torch.randn(count, generator=torch.Generator().manual_seed(GENERATOR_SEED)).relu_()


def observing() -> Iterator[Line]:
    """A batch of 12.8 M values: observe and search, with one thread and with two."""
    x = activation()
    scale = float(x.max()) / 127

    def raw_candidate() -> torch.Tensor:
        return (torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127) - x).square_().mean()

    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        observer = IfmrObserver()
        observer.observe(x)
        observe, search, histogram, candidate = best_of(
            [lambda: observer.observe(x), observer.result, lambda: torch.histc(x, 4096), raw_candidate]  # noqa: B023
        )
        name = f"{threads} thread{'s' if threads > 1 else ''}"
        ratio = observe / histogram
        yield Line(
            f"observe 12.8 M values, {name}", milliseconds(observe), f"torch.histc: {milliseconds(histogram)}",
            ratio, "<= 0.4 x", ratio <= 0.4,
        )  # fmt: skip
        speed = CANDIDATES * candidate / (observe + search)
        yield Line(
            f"IFMR of 12.8 M values, {CANDIDATES} candidates, {name}", milliseconds(observe + search),
            f"fused fake-quantize: {milliseconds(CANDIDATES * candidate)}", speed, ">= 20 x faster", speed >= 20,
        )  # fmt: skip
    torch.set_num_threads(before)


def searching() -> Iterator[Line]:
    """The other searches, for information: no target."""
    x = activation(1 << 20)
    for name, observer in (("IFMR exact", IfmrObserver()), ("HFMG exact", HfmgObserver())):
        observer.observe(x)
        (seconds,) = best_of([observer.result], 3)
        yield Line(f"{name} search, 2^20 values", milliseconds(seconds), "", seconds, "", kept=True)


def memory() -> Iterator[Line]:
    """Peak memory of child processes that observe one batch and fifty."""
    for name, count in (("large batches (12.8 M)", VALUES), ("small batches (100 k)", 100_000)):
        peaks = [_child_peak(batches, count) for batches in (1, BATCHES)]
        ratio = peaks[1] / peaks[0]
        yield Line(
            f"peak memory, {BATCHES} {name}", f"{peaks[1] / 1024:.0f} MB", f"one batch: {peaks[0] / 1024:.0f} MB",
            ratio, "<= 1.02 x", ratio <= 1.02,
        )  # fmt: skip


def _child_peak(batches: int, count: int) -> int:
    command = [sys.executable, __file__, "--observe", str(batches), str(count)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def observe_and_report(batches: int, count: int) -> None:
    """Run in the child process: print its peak memory in KB."""
    x = activation(count)
    observer = IfmrObserver()
    for _ in range(batches):
        observer.observe(x)
    observer.result()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def resnet50_weights() -> list[torch.Tensor]:
    """Random weights with the shapes of ResNet-50."""
    shapes = [(64, 3, 7, 7)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                shapes.append((4 * width, inputs, 1, 1))
            inputs = 4 * width
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    return [torch.randn(shape, generator=generator) for shape in (*shapes, (1000, 2048))]


def weights() -> Iterator[Line]:
    """Whole weights at once."""
    tensors = resnet50_weights()

    def all_arq() -> None:
        for tensor in tensors:
            arq(tensor, kind=WeightKind.CONV if tensor.ndim == 4 else WeightKind.LINEAR)

    (seconds,) = best_of([all_arq], 3)
    yield Line("ARQ of ResNet-50's weights", f"{seconds:.2f} s", "", seconds, "< 1 s", seconds < 1)
    large = torch.randn(512, 512, 3, 3, generator=torch.Generator().manual_seed(GENERATOR_SEED))
    (seconds,) = best_of([lambda: snq(large, kind=WeightKind.CONV)], 1)
    yield Line("SNQ per channel, 512x512x3x3", f"{seconds:.2f} s", "", seconds, "< 10 s", seconds < 10)


def adaround_problem() -> tuple[AdaRoundLayer, CachedData]:
    """A 64 -> 64 3x3 convolution with 512 inputs of 16x16, similar to ReLU outputs: smooth, correlated channels."""
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    mix = torch.randn(64, 64, generator=generator) / 8
    noise = torch.randn(512, 64, 16, 16, generator=generator)
    x = functional.avg_pool2d(torch.einsum("oc,nchw->nohw", mix, noise), 3, 1, 1).relu()
    weight = torch.randn(64, 64, 3, 3, generator=generator) * 0.05
    layer = AdaRoundLayer(weight=weight, geometry=ConvolutionGeometry(padding=1))
    return layer, CachedData(x, layer.forward(x, weight))


def _adaround_seconds(
    layer: AdaRoundLayer, data: CachedData, iterations: int, fast: bool
) -> tuple[float, AdaRoundResult]:
    settings = Learning(num_bits=4, num_iteration=iterations, fast=fast)
    begin = time.process_time()
    result = adaround(layer, data, settings, generator=torch.Generator().manual_seed(GENERATOR_SEED))
    return time.process_time() - begin, result


def adaround_lines() -> Iterator[Line]:
    """Both modes on one layer, and the plain layer; one thread, because waiting for a busy core counts as CPU time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    layer, data = adaround_problem()
    for fast in (False, True):
        _adaround_seconds(layer, data, 2, fast)  # compile first
    iteration, bare = _iteration_seconds(layer, data)
    ratio = iteration / bare
    yield Line(
        "AdaRound, one iteration", milliseconds(iteration), f"bare layer: {milliseconds(bare)}",
        ratio, "<= 1.3 x", ratio <= 1.3,
    )  # fmt: skip
    (seconds, plain), (fast_seconds, fast_result) = (
        _adaround_seconds(layer, data, 1000, fast) for fast in (False, True)
    )
    speed = seconds / fast_seconds
    yield Line(
        "AdaRound fast mode, W4, 1000 iterations", f"{fast_seconds:.1f} CPU s", f"plain: {seconds:.1f} CPU s",
        speed, ">= 5 x faster", speed >= 5,
    )  # fmt: skip
    ratio = fast_result.final_loss / plain.final_loss
    yield Line(
        f"AdaRound loss on raw data (nearest {plain.initial_loss:.5f})", f"{fast_result.final_loss:.5f}",
        f"plain: {plain.final_loss:.5f}", ratio, "<= 1 x", ratio <= 1,
    )  # fmt: skip
    torch.set_num_threads(before)


def _iteration_seconds(layer: AdaRoundLayer, data: CachedData, iterations: int = 50) -> tuple[float, float]:
    """CPU time of an AdaRound iteration, and of a forward and backward of its layer alone."""
    x, _ = data.batch(torch.arange(32))
    weight = layer.weight.clone().requires_grad_()

    def bare() -> float:
        begin = time.process_time()
        for _ in range(iterations):
            output = layer.forward(x, weight)
            torch.autograd.grad(output, weight, torch.ones_like(output))
        return time.process_time() - begin

    best = [float("inf")] * 3
    for _ in range(5):
        idle, _ = _adaround_seconds(layer, data, 0, fast=False)
        whole, _ = _adaround_seconds(layer, data, iterations, fast=False)
        best = [min(pair) for pair in zip(best, (idle, whole, bare()), strict=True)]
    return (best[1] - best[0]) / iterations, best[2] / iterations


def show(lines: list[Line]) -> None:
    """Print the table."""
    table = Table(title="amct.numerics")
    for column in ("what", "ours", "yardstick", "ratio", "promise", ""):
        table.add_column(column, justify="right" if column in ("ours", "ratio") else "left")
    for line in lines:
        ratio = f"{line.value:.3g}" if line.yardstick else ""
        mark = ("[green]kept" if line.kept else "[red]missed") if line.promise else ""
        table.add_row(line.name, line.ours, line.yardstick, ratio, line.promise, mark)
    Console(width=150).print(table)


def main() -> int:
    """Run the chosen lines; the exit code tells whether all targets were met."""
    if sys.argv[1:2] == ["--observe"]:
        observe_and_report(int(sys.argv[2]), int(sys.argv[3]))
        return 0
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    parts = {
        "memory": memory,  # first: a child inherits its parent's memory as its peak
        "observing": observing,
        "searching": searching,
        "weights": weights,
        "adaround": adaround_lines,
    }
    lines = [line for name, part in parts.items() if wanted in name for line in part()]
    show(lines)
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "threads": torch.get_num_threads(), "lines": [asdict(line) for line in lines],
              "rows": [line.row() for line in lines]}  # fmt: skip
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(line.kept for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
