"""Calibration in several processes: wall time of the loop on 1 rank divided by that on 2 ranks, and bytes exchanged.

    python benchmarks/scaling.py              64 batches of 64 pictures of 32 x 32, a network of ResNet-20's shape
    python benchmarks/scaling.py --batches 16 --runs 1

One thread for each process. The loop alone is timed: forwards of the calibration model on batches in memory, the
meeting of the processes and the search for the factors; not the start of the processes, nor the capture of the model.
The ratio is the median of some runs, 1 rank and 2 ranks in turn. On a machine with other work it says little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, nn

RESULTS = Path(__file__).resolve().parent / "results" / "scaling.json"
WANTED = 1.8


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def network() -> nn.Module:
    """A network of ResNet-20's shape, with random weights."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU()]
    width = 16
    for stage in (16, 32, 64):
        for number in range(3):
            blocks.append(Block(width, stage, 2 if stage != width and number == 0 else 1))
            width = stage
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()


def measure(batch_count: int) -> dict[str, float]:
    """Calibrate in this process and the others of its group; the seconds of the loop and the bytes of the state."""
    from amct.calibration import ALONE, all_ranks
    from amct.calibration.ranks import pack
    from amct.config.ptq.quant_config import plan_of
    from amct.pytorch.capture.cached_trace import cached_trace
    from amct.pytorch.preparation import prepare

    torch.set_num_threads(1)
    ranks = all_ranks()
    data = [torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    traced = cached_trace(network(), data[0], all_layers=True)
    plan, _ = plan_of(None, traced.config_layers(), batch_count)
    prepared = prepare(traced, plan)
    warm = prepared.start_calibration(ALONE)
    warm.run([((data[0],), {})])
    warm.session.close()
    calibration = prepared.start_calibration(ranks)
    if not ranks.is_alone:
        distributed.barrier()
    begin = time.perf_counter()
    calibration.run(((data[n % len(data)],), {}) for n in range(ranks.rank, batch_count - ranks.size, ranks.size))
    before_last = time.perf_counter()
    state = len(pack(calibration.session.state()))  # not timed
    last = time.perf_counter()
    calibration.run([((data[0],), {})])
    calibration.session.finish()  # if it has not ended by itself
    seconds = time.perf_counter() - last + before_last - begin
    return {"seconds": seconds, "bytes": state, "layers": len(prepared.layers)}


def run(ranks: int, batches: int) -> dict[str, float]:
    """Start the processes; the slowest one counts."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", "--batches", str(batches), "--folder", folder]
        if ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command[1:1] = launcher
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "AMCT_LOG_LEVEL": "error"}
        subprocess.run(command, check=True, env=environment)
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    return max(found, key=lambda each: each["seconds"])


def work(batches: int, folder: str) -> None:
    """One of the processes."""
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    found = measure(batches)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    if distributed.is_initialized():
        distributed.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--folder", default="")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.batches, arguments.folder)
        return
    runs = [(run(1, arguments.batches), run(2, arguments.batches)) for _ in range(arguments.runs)]
    ratio = statistics.median(one["seconds"] / two["seconds"] for one, two in runs)
    one, two = runs[-1]
    table = Table("row", "1 rank", "2 ranks", "ratio", "wanted")
    mark = "kept" if ratio >= WANTED else "MISSED"
    times = [statistics.median(pair[index]["seconds"] for pair in runs) for index in (0, 1)]
    table.add_row(
        "wall time of the loop, s", f"{times[0]:.2f}", f"{times[1]:.2f}", f"{ratio:.2f}", f">= {WANTED} {mark}"
    )
    console = Console(width=100)
    console.print(table)
    console.print(
        f"state of one rank: {two['bytes'] / 2**20:.1f} MiB, {two['bytes'] / two['layers'] / 2**10:.0f} KiB a layer"
    )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"ratio": ratio, "one": one, "two": two, "batches": arguments.batches}, indent=1))


if __name__ == "__main__":
    main()
