"""Calibration of large data: on 1 rank and on 2, from a folder of pictures, and with a state that is kept for a resume.

    python benchmarks/scaling.py              all parts, about two minutes on an idle machine
    python benchmarks/scaling.py ranks        only these parts: ranks, resume, folder

One thread for each process. ``ranks``: wall time of the loop on 1 rank divided by that on 2 ranks: forwards of the
calibration model on 256 batches of 16 in memory, the meeting of the processes and the search for the factors; not the
start of the processes, nor the capture of the model. Both are measured in turn by the same two processes, one of which
waits while the other works alone; beside it the same ratio of plain forwards, which is what the machine allows. On a
machine with other work it says little. ``resume``: seconds to write the state of the network in the middle of a
calibration, divided by the 30 s between two writes. ``folder``: the time until the first of 10^5 pictures is decoded,
and the memory that a pass over them takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from amct.calibration import Ranks
    from amct.pipeline.door import PreparedModel

RESULTS = Path(__file__).resolve().parent / "results" / "scaling.json"
WANTED_RATIO, MOST_SHARE, MOST_SECONDS, MOST_GROWTH = 1.8, 0.01, 2.0, 16.0
PARTS = ("ranks", "resume", "folder")
BATCHES, BATCH, PICTURES = 256, 16, 100_000
LINKS = 10_000  # a file system may allow no more than some 65 000 of one file


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


def prepared_network() -> tuple[PreparedModel, list[torch.Tensor]]:
    """The network with quantized weights, and the batches that are used in turn."""
    from amct.config.python_config import plan_of
    from amct.pytorch.capture.cached_trace import cached_trace
    from amct.pytorch.preparation import prepare

    data = [torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    traced = cached_trace(network(), data[0], all_layers=True)
    plan, _ = plan_of(None, traced.config_layers(), BATCHES)
    return prepare(traced, plan), data


# -- ranks: runs under torchrun ----------------------------------------------------------------------------------------


def calibrate(prepared: PreparedModel, data: list[torch.Tensor], ranks: Ranks) -> float:
    """Seconds of the loop, from the first batch to the factors."""
    calibration = prepared.start_calibration(ranks)
    meet(ranks)
    begin = time.perf_counter()
    calibration.run(((data[n % len(data)],), {}) for n in range(ranks.rank, BATCHES, ranks.size))
    calibration.session.finish()  # if it has not ended by itself
    return time.perf_counter() - begin


def run_plain(model: nn.Module, data: list[torch.Tensor], ranks: Ranks) -> float:
    """Seconds of a quarter of these forwards without calibration."""
    meet(ranks)
    begin = time.perf_counter()
    with torch.no_grad():
        for number in range(ranks.rank, BATCHES // 4, ranks.size):
            model(data[number % len(data)])
    meet(ranks)
    return time.perf_counter() - begin


def meet(ranks: Ranks) -> None:
    """Wait for the other process, if there is one."""
    if not ranks.is_alone:
        distributed.barrier()


def work(folder: str, runs: int) -> None:
    """One of two processes: calibrate in turn alone (the first one) and together; the slower one counts."""
    from amct.calibration import ALONE, all_ranks

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    ranks = all_ranks()
    prepared, data = prepared_network()
    model = network()
    found: list[dict[str, float]] = []
    parts = {"loop": lambda who: calibrate(prepared, data, who), "plain": lambda who: run_plain(model, data, who)}
    warm = prepared.start_calibration(ALONE)
    warm.run([((data[0],), {})])
    warm.session.close()
    for _ in range(runs):
        for name, measure in parts.items():
            alone = measure(ALONE) if ranks.is_first else 0.0
            distributed.barrier()
            seconds = torch.tensor([measure(ranks)])
            distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
            found.append({f"{name} 1": alone, f"{name} 2": float(seconds)})
    if ranks.is_first:
        Path(folder, "found.json").write_text(json.dumps({"runs": found}))
    distributed.destroy_process_group()


def measure_ranks(runs: int) -> list[dict[str, Any]]:
    """The rows of 1 rank and 2."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
        command = [sys.executable, *launcher, __file__, "--worker", folder, "--runs", str(runs)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "AMCT_LOG_LEVEL": "error"}
        subprocess.run(command, check=True, env=environment)
        found = json.loads(Path(folder, "found.json").read_text())
    ratio = {
        name: statistics.median(run[f"{name} 1"] / run[f"{name} 2"] for run in found["runs"] if f"{name} 1" in run)
        for name in ("loop", "plain")
    }
    seconds = [statistics.median(run[key] for run in found["runs"] if key in run) for key in ("loop 1", "loop 2")]
    return [
        row(
            f"wall time of calibration on 1 rank ÷ on 2 ranks, {BATCHES} batches of {BATCH}",
            f"{ratio['loop']:.2f} ({seconds[0]:.2f} s, {seconds[1]:.2f} s)",
            f"≥ {WANTED_RATIO}",
            ratio["loop"] >= WANTED_RATIO,
        ),
        row("the same of plain forwards, which need no meeting", f"{ratio['plain']:.2f}"),
    ]


# -- resume ------------------------------------------------------------------------------------------------------------


def measure_resume(runs: int) -> list[dict[str, Any]]:
    """The row of writing a state."""
    from amct.calibration import ALONE
    from amct.pipeline import flow

    torch.set_num_threads(1)
    prepared, data = prepared_network()
    calibration = prepared.start_calibration(ALONE)
    calibration.run(((data[n % len(data)],), {}) for n in range(BATCHES - 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.calibration.npz")
        kept = flow.Interim(flow.CalibrationFile(path=path, read=False), ALONE, lambda: {"model": "x"})
        seconds = []
        for _ in range(2 * runs + 1):
            begin = time.perf_counter()
            kept._due = 0.0
            kept.note("calibration", calibration.session, BATCHES - 1)
            seconds.append(time.perf_counter() - begin)
        size = path.stat().st_size
    calibration.session.close()
    took = statistics.median(seconds)
    return [
        row(
            "state of ResNet-20, which a rank sends once",
            f"{size / 2**20:.1f} MiB, {size / len(prepared.layers) / 2**10:.0f} KiB a layer",
        ),
        row(
            f"time to keep a state for --resume ({size / 2**20:.1f} MiB) ÷ the {flow.SECONDS:g} s between two",
            f"{took / flow.SECONDS:.2%} ({took * 1000:.0f} ms)",
            f"< {MOST_SHARE:.0%}",
            took / flow.SECONDS < MOST_SHARE,
        ),
    ]


# -- a folder of pictures ----------------------------------------------------------------------------------------------


def measure_folder(runs: int) -> list[dict[str, Any]]:
    """The rows of a large folder: its pictures are links to a few, so that only its size is that of a large one."""
    del runs
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "pictures")
        place.mkdir()
        for number in range(PICTURES):
            original = Path(folder, f"{number // LINKS}.jpg")
            if number % LINKS == 0:
                Image.effect_noise((64, 64), 80).convert("RGB").save(original)
            os.link(original, place / f"{number:06}.jpg")
        done = subprocess.run(
            [sys.executable, __file__, "--pictures", str(place)], check=True, capture_output=True, text=True
        )
        shutil.rmtree(place)
    found = json.loads(done.stdout)
    return [
        row(
            f"seconds until the first batch of {PICTURES} pictures is there, with their number",
            f"{found['first']:.2f}",
            f"≤ {MOST_SECONDS:g}",
            found["first"] <= MOST_SECONDS,
        ),
        row(
            f"memory that a pass over {found['read']} of them adds to its first 100 batches, MiB",
            f"{found['growth']:.1f}",
            f"≤ {MOST_GROWTH:g}",
            found["growth"] <= MOST_GROWTH,
        ),
    ]


def read_pictures(place: str) -> None:
    """Read a folder as the command does; print what it took."""
    from amct.data import StoredBatches
    from amct.memory import process_bytes
    from amct.pipeline.batches import Batches

    begin = time.perf_counter()
    data = StoredBatches(place, 8)
    batches = Batches(data, lambda batch: batch)
    batches.first()
    length = len(data)
    first = time.perf_counter() - begin
    before = read = 0
    for number, batch in enumerate(batches.limited(min(length, 2_500))):
        read += len(batch)
        if number == 100:
            before = process_bytes()
    sys.stdout.write(json.dumps({"first": first, "read": read, "growth": (process_bytes() - before) / 2**20}))


# -- all rows ----------------------------------------------------------------------------------------------------------


def row(what: str, measured: str, wanted: str = "", kept: bool | None = None) -> dict[str, Any]:
    """A row of the table."""
    return {"what": what, "measured": measured, "wanted": wanted, "kept": kept}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="part", help=", ".join(PARTS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--pictures", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.runs)
        return 0
    if arguments.pictures:
        read_pictures(arguments.pictures)
        return 0
    measures: dict[str, Callable[[int], list[dict[str, Any]]]] = {
        "ranks": measure_ranks, "resume": measure_resume, "folder": measure_folder,
    }  # fmt: skip
    rows = [each for part in PARTS if part in arguments.parts for each in measures[part](arguments.runs)]
    table = Table("row", "measured", "wanted", "")
    for each in rows:
        table.add_row(
            each["what"], each["measured"], each["wanted"], {True: "kept", False: "MISSED", None: ""}[each["kept"]]
        )
    Console(width=130).print(table)
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    RESULTS.parent.mkdir(exist_ok=True)
    written = {"machine": machine, "rows": rows, "partial": set(arguments.parts) != set(PARTS)}
    RESULTS.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if any(each["kept"] is False for each in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
