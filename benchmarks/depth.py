"""Time and memory of quantize, save and report for each layer, in a network of 200 and one of 2000 layers.

    python benchmarks/depth.py                      both networks, and one layer with 10^6 and 10^7 weights
    python benchmarks/depth.py --layers 100 400     other depths

A chain of Linear layers of 32 channels with ReLUs, random weights. Each network has a process of its own on one thread,
in which a small network runs first. Times are CPU times, also of child processes, so that other work on the machine
counts little; memory is what the process takes at most beyond what it had before the job. The goal: for each layer, and
for each weight of a large one, nothing grows by more than a fifth. The share of onnxruntime in the time of a save, to
open sessions, is measured apart: its graph optimizers take time that grows with the square of the number of nodes. Rows
go to ``benchmarks/results/depth.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "depth.json"
MOST = 1.2
WIDTH, BATCHES, SAMPLES = 32, 8, 4
STEPS = ("quantize", "save", "report")
SIDES = (1000, 3163)
"""Sides of one square layer with 10^6 and with 10^7 weights."""


def main() -> None:
    """Measure, print and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=(200, 2000))
    parser.add_argument("--child", nargs=2, type=int, metavar=("LAYERS", "WIDTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)))
        return
    few, many = ((count, in_process(count, WIDTH)) for count in options.layers)
    rows = [row(few, many, what, "layers", "layer") for what in (*STEPS, "save in onnxruntime", "memory")]
    small, large = ((side * side, in_process(1, side)) for side in SIDES)
    rows += [row(small, large, what, "weights", "weight") for what in (*STEPS, "memory")]
    for each in rows:
        print(f"{each['what']}: {each['measured']}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"rows": rows}, indent=1))


def row(one: tuple[int, Any], other: tuple[int, Any], what: str, things: str, thing: str) -> dict[str, object]:
    """A row of the table: how much more of something each layer or weight takes where there are more of them."""
    (few, before), (many, after) = one, other
    each = before[what] / few, after[what] / many
    growth = each[1] / each[0] if each[0] > 0 else 0.0
    unit, factor = ("kB", 1e-3) if what == "memory" else ("ms", 1e3) if thing == "layer" else ("ns", 1e9)
    if what == "memory" and thing == "weight":
        unit, factor = "bytes", 1.0
    is_ours = "onnxruntime" not in what
    return {
        "what": f"{what} for each {thing}: {few} → {many} {things}",
        "measured": f"{each[0] * factor:.3g} → {each[1] * factor:.3g} {unit}, {growth:.2f}",
        "wanted": f"≤ {MOST}" if is_ours else "",
        "kept": growth <= MOST if is_ours else None,
    }


def in_process(layers: int, width: int) -> Any:  # noqa: ANN401  what measure returns
    """Measure one network in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AMCT_LOG_LEVEL": "error"}
    command = [sys.executable, __file__, "--child", str(layers), str(width)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(layers: int, width: int) -> dict[str, float]:
    """CPU seconds of each step and of onnxruntime's sessions in a save, and the bytes that the job takes at most."""
    import onnxruntime
    import torch
    from torch import nn

    import amct.pytorch

    torch.set_num_threads(1)
    sessions: list[float] = []
    opened = onnxruntime.InferenceSession.__init__

    def timed(self: object, *args: object, **kwargs: object) -> None:
        begin = cpu_seconds()
        opened(self, *args, **kwargs)
        sessions.append(cpu_seconds() - begin)

    onnxruntime.InferenceSession.__init__ = timed

    def job(count: int, size: int, place: Path) -> dict[str, float]:
        model = nn.Sequential(*[each for _ in range(count) for each in (nn.Linear(size, size), nn.ReLU())]).eval()
        with torch.no_grad():
            for layer in model[::2]:
                layer.weight.normal_(0, (2 / size) ** 0.5)
        data = [torch.randn(SAMPLES, size, generator=torch.Generator().manual_seed(n)) for n in range(BATCHES)]
        marks = [cpu_seconds()]
        quantized = amct.pytorch.quantize(model, data)
        marks.append(cpu_seconds())
        sessions.clear()
        quantized.save(place / "net")
        marks.append(cpu_seconds())
        in_sessions = sum(sessions)
        quantized.report(place / "net.html")
        marks.append(cpu_seconds())
        found = {name: end - begin for name, begin, end in zip(STEPS, marks[:-1], marks[1:], strict=True)}
        return {**found, "save": found["save"] - in_sessions, "save in onnxruntime": in_sessions}

    with tempfile.TemporaryDirectory() as folder:
        job(3, 8, Path(folder))
        before = peak_bytes()
        found = job(layers, width, Path(folder))
    return {**found, "memory": peak_bytes() - before}


def cpu_seconds() -> float:
    """The CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def peak_bytes() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


if __name__ == "__main__":
    main()
