"""Quantizes more than a hundred networks with the defaults, and compares files, simulation and onnxruntime's quantizer.

    python benchmarks/zoo.py                              everything that has no result yet
    python benchmarks/zoo.py --only timm/ resnet          names that contain one of these words
    python benchmarks/zoo.py --again --only gpt2          measure again
    python benchmarks/zoo.py --list                       the names
    python benchmarks/zoo.py --table docs/zoo.md          write the table of the results so far into the page
    python benchmarks/zoo.py --remedies                   what each remedy gains; prints the table of all results so far

Needs ``pip install -e .[zoo]``; what is not installed is a row that says so. Each network runs in a process of its own,
with a time limit, on one thread. Results are lines of ``benchmarks/results/zoo.jsonl``: a run that was stopped goes on
where it stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo_networks.network import Network

HERE = Path(__file__).parent
RESULTS, REMEDY_RESULTS = HERE / "results" / "zoo.jsonl", HERE / "results" / "remedies.jsonl"
sys.path.insert(0, str(HERE))
Row = dict[str, Any]
PRELOADED = [
    "torch",
    "onnxruntime.quantization",
    "amct.pytorch",
    "amct.onnx_model",
    "amct_caffe",
    "zoo_networks.preload",
]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="words, one of which a name contains")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--brief", action="store_true", help="without speed and onnxruntime's quantizer")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one network")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time; speeds are best measured with one")
    parser.add_argument("--remedies", action="store_true", help="measure the remedies instead of the defaults")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", type=Path, help="write the table into this page, measure nothing")
    arguments = parser.parse_args()
    arguments.results = arguments.results or (REMEDY_RESULTS if arguments.remedies else RESULTS)
    os.environ.update(OMP_NUM_THREADS="1", AMCT_LOG_LEVEL="WARNING", HF_HUB_OFFLINE="1")
    # The process that preloads modules finds them by this: before Python 3.13 it does not get sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    if arguments.table:
        from zoo_networks.table import write_page

        write_page(arguments.table, list(read(arguments.results).values()))
        return
    from zoo_networks.registry import all_networks

    chosen = [network for network in all_networks() if any(word in network.name for word in arguments.only)]
    done = {} if arguments.again else read(arguments.results)
    if arguments.list:
        print(*(network.name for network in chosen), sep="\n")
        return
    left = [network for network in chosen if network.name not in done]
    with ThreadPoolExecutor(arguments.jobs) as threads:  # each waits for one process at a time
        jobs = [threads.submit(result, network, arguments) for network in left]
        for job in as_completed(jobs):
            append(arguments.results, job.result())
            print(line(job.result()), flush=True)
    if arguments.remedies:
        from zoo_networks.remedies import remedy_table

        print(*remedy_table(read(arguments.results).values()), sep="\n")


def result(network: Network, arguments: argparse.Namespace) -> Row:
    """The row of a network."""
    if not network.is_installed:
        return {"name": network.name, "outcome": "not installed"}
    return run(network.name, arguments.limit, brief=arguments.brief, remedies=arguments.remedies)


def read(path: Path) -> dict[str, Row]:
    """The last result of each network."""
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = (json.loads(text) for text in lines)
    return {row["name"]: row for row in rows}


def append(path: Path, row: Row) -> None:
    """Add a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def run(name: str, limit: float, *, brief: bool, remedies: bool = False) -> Row:
    """Measure one network in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="zoo_") as folder:
        process = context.Process(target=child, args=(name, folder, brief, remedies))
        process.start()
        process.join(limit)
        late = process.is_alive()
        if late and process.pid:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        path = Path(folder, "row.json")
        row: Row = json.loads(path.read_text()) if path.is_file() else {"name": name, "outcome": "failed"}
        ended = f"time limit of {limit:g} s" if late else f"the process ended with {process.exitcode}"
        if (late or process.exitcode) and row["outcome"] == "quantized":
            row["peer_error"] = f"{row['step']}: {ended}"
        elif late or process.exitcode:
            row["error"] = f"{row.get('step')}: {ended}"
        output = Path(folder, "output.txt")
        row["stderr"] = output.read_text(errors="replace")[-3000:] if output.is_file() else ""
    row["wall_seconds"] = time.perf_counter() - begin
    return row


def child(name: str, folder: str, brief: bool, remedies: bool) -> None:
    """Run in the child process: its own group, so that the time limit also ends what it started."""
    os.setsid()
    output = os.open(f"{folder}/output.txt", os.O_CREAT | os.O_WRONLY, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(folder)
    import torch

    torch.set_num_threads(1)
    from zoo_networks.measuring import measure
    from zoo_networks.registry import all_networks

    network = next(network for network in all_networks() if network.name == name)
    if remedies:
        from zoo_networks.remedies import measure_remedies

        measure_remedies(network, Path(folder))
    else:
        measure(network, Path(folder), brief=brief)


def line(row: Row) -> str:
    """A row for the screen."""
    if row["outcome"] == "measured":
        gains = {name: each.get("gain") for name, each in row["remedies"].items()}
        shown = ", ".join(f"{name} {'-' if gain is None else f'{gain:+.1f}'}" for name, gain in gains.items())
        return f"{row['name']:40} {shown}"
    if row["outcome"] != "quantized":
        return f"{row['name']:40} {row['outcome']}: {row.get('error', '').splitlines()[0:1]}"
    text = f"{row['name']:40} {row['quantized']:4} layers  SQNR "
    text += " ".join(f"{row.get(f'{kind}_sqnr') or 0:6.1f}" for kind in ("simulation", "file", "peer"))
    if "ours_ms" in row:
        text += f"  {row['float_ms']:7.2f} ms  {ratio(row, 'ours_ms'):5.2f}x ({ratio(row, 'peer_ms'):.2f}x)"
    return f"{text}  job {row['job_seconds']:5.1f} s, {row['wall_seconds']:.1f} s"


def ratio(row: Row, key: str) -> float:
    """How much faster than float."""
    return row["float_ms"] / row[key] if key in row else float("nan")


if __name__ == "__main__":
    main()
