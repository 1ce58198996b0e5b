"""A program that calibrates a Caffe model in children that are killed: ``… MODEL WEIGHTS FOLDER MOMENTS``.

A child runs the whole flow in FOLDER. It counts what it does to files (audit events: opening, renaming, removing,
making folders) and kills itself with SIGKILL at the event it was told. The first two children live: the second says how
many events there are, and its files are the ones to compare with. Then, for each of MOMENTS moments spread evenly over
a life: one child is killed there, another one starts again and runs to the end. Printed as one line of JSON: the number
of events, and for each moment the event, what the killed child was doing, and which files differ from the second's.

The children are forked from a process that has run the flow once, elsewhere: everything is imported and compiled then.
Start it with OMP_NUM_THREADS=1: threads do not survive a fork.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from ptq_caffe_flow import Flow, forward

import amct_caffe as amct

COUNTED = ("open", "os.rename", "os.remove", "os.mkdir", "os.link", "shutil.rmtree", "fcntl.flock")
BATCHES = 2


def calibrate(flow: Flow) -> None:
    graph = flow.configure(batch_num=BATCHES).init()
    amct.weights_quantize_model(graph, *map(str, flow.modified))
    amct.activation_quantize_model(graph, *map(str, flow.modified))
    forward(flow.net(*flow.modified), BATCHES)
    amct.save_model(graph, "Both", str(flow.prefix))


def in_child(flow: Flow, die_at: int) -> tuple[int, int, str]:
    """Run the flow in a child: its exit status, the events it counted, and what the last one was."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if event in COUNTED and str(arguments[0]).startswith(str(flow.folder)):
                seen += 1
                os.write(writing, f"{seen} {event} {Path(str(arguments[0])).name}\n".encode())
                if seen == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        calibrate(flow)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        lines = file.read().splitlines()
    _, status = os.waitpid(child, 0)
    last = lines[-1] if lines else "0"
    return status, len(lines), last


def files(flow: Flow) -> dict[str, bytes]:
    return {
        str(path.relative_to(flow.folder)): path.read_bytes()
        for path in sorted(flow.folder.rglob("*"))
        if path.is_file() and path.suffix not in (".log", ".lock")
    }


def main(model: str, weights: str, folder: str, moments: str) -> None:
    flow = Flow(Path(folder), Path(model), Path(weights))
    os.chdir(folder)
    with tempfile.TemporaryDirectory() as elsewhere:
        calibrate(Flow(Path(elsewhere), flow.model, flow.weights))
    for _ in range(2):  # the second life finds the files of the first, as those do that are killed
        status, events, _ = in_child(flow, 0)
        assert status == 0
    wanted = files(flow)
    killed = []
    for number in range(int(moments)):
        die_at = 1 + number * (events - 1) // (int(moments) - 1)
        status, _, doing = in_child(flow, die_at)
        assert os.WIFSIGNALED(status), "the child came to its end"
        assert os.WTERMSIG(status) == signal.SIGKILL
        status, _, _ = in_child(flow, 0)
        found = files(flow)
        different = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
        killed.append({"event": doing, "status": status, "different": different})
    print(json.dumps({"events": events, "files": sorted(wanted), "killed": killed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
