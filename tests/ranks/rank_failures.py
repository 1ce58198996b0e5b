"""Processes that calibrate together and fail: each scenario forks them, and prints how each of them ended.

Usage: python rank_failures.py FOLDER SCENARIO [SEED]

The processes are forked from one that has imported everything, which is cheap; nothing but this program watches them,
so that a process ends by itself or not at all.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import distributed

from amct.calibration import CalibrationSession, RecordFiles, Stream, all_ranks
from amct.calibration.ranks import LOCAL, TIMEOUT
from amct.numerics.settings import HfmgSettings, IfmrSettings
from amct.record import LayerRecord, Record

BATCHES = 24
PAUSE = 0.02


def calibrate(folder, *, batches=BATCHES, pause=PAUSE, bad=None, stop=None):
    """A calibration of two layers that writes a record; ``bad``: the batch with NaN, ``stop``: where this rank ends."""
    ranks = all_ranks()
    ranks.need_a_batch_each(batches)
    files = RecordFiles(folder / "record.txt", writes=ranks.is_first)

    def end(result):
        entries = {
            layer: LayerRecord(scale_d=float(found["input"].scale), offset_d=int(found["input"].offset))
            for layer, found in result.layers.items()
        }
        files.complete(Record(entries))

    streams = [
        Stream(layer="a", settings=IfmrSettings(), batch_num=batches),
        Stream(layer="b", settings=HfmgSettings(), batch_num=batches),
    ]
    session = CalibrationSession(streams, on_progress=files.note, on_end=end, ranks=ranks, show_bar=False)
    files.begin(Record(), session.progress)
    for number in range(ranks.rank, batches, ranks.size):
        if number == stop:
            return
        x = torch.randn(400, generator=torch.Generator().manual_seed(number)) * (1 + number)
        if number == bad:
            x[3] = float("nan")
        time.sleep(pause)
        with session.batch():
            session.observe("a", x)
            session.observe("b", x * 2)
    assert session.done


def only_first(folder, rank):
    if rank == 0:
        calibrate(folder)
    else:
        wait_for(folder / "ended0")


def leaves_early(folder, rank):
    """Rank 1 stops in the middle, without an error, and lives on."""
    calibrate(folder, stop=7 if rank == 1 else None)
    if rank == 1:
        wait_for(folder / "ended0")


def bad_data(folder, rank):
    del rank
    calibrate(folder, bad=4)


def other_config(folder, rank):
    calibrate(folder, batches=BATCHES + (rank == 1))


def too_few_batches(folder, rank):
    del rank
    wait_for_all(folder)
    calibrate(folder, batches=2)


def local(folder, rank):
    """The switch: rank 0 calibrates all batches by itself, the others none."""
    wait_for_all(folder)
    if rank == 0:
        os.environ[LOCAL] = "1"
        calibrate(folder, pause=0)


def killed(folder, rank):
    del rank
    calibrate(folder)


SCENARIOS = {each.__name__: each for each in (only_first, leaves_early, bad_data, other_config, too_few_batches, local)}
SIZE = 3


def wait_for_all(folder):
    """Wait until all have joined: one that ends before fails the others."""
    for rank in range(SIZE):
        wait_for(folder / f"began{rank}")


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


def fork(scenario, folder, rank, port):
    process = os.fork()
    if process:
        return process
    code = 1
    with (folder / f"output{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            torch.set_num_threads(1)
            method = f"tcp://127.0.0.1:{port}"
            distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=SIZE)
            (folder / f"began{rank}").touch()
            scenario(folder, rank)
            code = 0
        except BaseException:  # noqa: BLE001  whatever ends the process is shown
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            (folder / f"ended{rank}").touch()
            os._exit(code)
    return process


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(scenario, folder, victim=None, moment=0.0):
    """Run the processes of a scenario; returns the exit code and the output of each, and the record."""
    folder.mkdir(parents=True)
    port = free_port()
    processes = [fork(scenario, folder, rank, port) for rank in range(SIZE)]
    if victim is not None:
        for rank in range(SIZE):
            wait_for(folder / f"began{rank}")
        time.sleep(moment)
        os.kill(processes[victim], signal.SIGKILL)
        (folder / f"ended{victim}").touch()
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    record = folder / "record.txt"
    ours = ("output", "began", "ended")
    return {
        "codes": codes,
        "outputs": [(folder / f"output{rank}").read_text() for rank in range(SIZE)],
        "record": record.read_text() if record.exists() else None,
        "left": sorted(path.name for path in folder.iterdir() if not path.name.startswith(ours)),
        "victim": victim,
    }


def main():
    folder, name = Path(sys.argv[1]), sys.argv[2]
    os.environ[TIMEOUT] = "5"
    (folder / "warm").mkdir(parents=True)
    calibrate(folder / "warm", pause=0)  # loads compiled loops before the processes are forked
    if name != "kills":
        print(json.dumps(run(SCENARIOS[name], folder / name)))
        return
    chance = random.Random(int(sys.argv[3]))
    whole = run(killed, folder / "whole")
    kills = []
    for number in range(4):
        victim, moment = number % SIZE, chance.uniform(0, 1.3 * PAUSE * BATCHES / SIZE)
        kills.append(run(killed, folder / f"kill{number}", victim, moment) | {"moment": moment})
    print(json.dumps({"whole": whole, "kills": kills}))


if __name__ == "__main__":
    main()
