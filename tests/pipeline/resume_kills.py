"""Kills ``amct quantize`` at random moments, resumes it, and compares the files with those of an uninterrupted run.

Usage: resume_kills.py FOLDER DOOR KILLS SEED; prints a line of JSON.

Every run but the first is a child of this process, forked when all is imported. Its pictures take some milliseconds
each, and its state is written after every batch. Most kills come when there is a state, a few at any moment.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime  # noqa: F401  imported once, before the forks
import torch
from PIL import Image
from three_doors import caffe_pair, onnx_file, torch_network

import amct.caffe
import amct.onnx_model
import amct.pytorch  # noqa: F401  as above
from amct.cli import main
from amct.data import samples
from amct.pipeline import flow

PICTURES, BATCH, PAUSE = 40, 4, 0.004
MODELS = {
    "torch": ["my_net:build"],
    "onnx": ["net.onnx"],
    "caffe": ["net.prototxt", "net.caffemodel"],
}
FACTORY = """
import torch
from three_doors import Network
def build():
    model = Network().eval()
    model.load_state_dict(torch.load("weights.pth", weights_only=True))
    return model
"""


def make_files(folder):
    model = torch_network()
    torch.save(model.state_dict(), folder / "weights.pth")
    (folder / "my_net.py").write_text(FACTORY)
    onnx_file(model, folder)
    caffe_pair(model, folder)
    (folder / "quant.cfg").write_text(f"batch_num: {PICTURES // BATCH}\n")
    (folder / "pictures").mkdir()
    generator = np.random.default_rng(0)
    for number in range(PICTURES):
        values = generator.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(values).save(folder / "pictures" / f"{number:02}.png")


def child(arguments):
    """Run the command in a child; returns its process number."""
    process = os.fork()
    if process:
        return process
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 99
    try:
        code = main(arguments)
    finally:
        os._exit(code)


def command(door, name, *more):
    options = ["--data", "pictures", "--batch-size", str(BATCH), "--scale", "0.01", "--size", "8"]
    options += ["--formats", "record,qdq", "--no-check", "--config", "quant.cfg"]
    return ["quantize", *MODELS[door], *options, "-o", f"{name}/net", *more]


def files_of(name):
    """The files of a run, without that with the times."""
    return {path.name: path.read_bytes() for path in Path(name).iterdir() if path.name != "net_quant.json"}


def run_to_the_end(door, name, *more):
    status = os.waitpid(child(command(door, name, *more)), 0)[1]
    assert status == 0, (door, name, os.waitstatus_to_exitcode(status), Path("output.txt").read_text()[-3000:])


def kill_at_a_random_moment(process, state, seconds, chance):
    """Wait for a state, or not, and then for a while; returns whether the process still ran."""
    if chance.random() < 0.8:
        while not state.exists() and os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, PICTURES * PAUSE))
    else:
        time.sleep(chance.uniform(0, seconds))
    os.kill(process, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


def be_slow():
    """Pictures that take their time, and a state after every batch."""
    flow.SECONDS, flow.MOST_SHARE = 0.0, float("inf")
    read = samples.read_image

    def slow(path, **options):
        time.sleep(PAUSE)
        return read(path, **options)

    samples.read_image = slow


def main_loop(folder, door, kills, seed):
    os.chdir(folder)
    make_files(folder)
    chance = random.Random(seed)
    be_slow()
    begin = time.monotonic()
    assert main(command(door, "whole")) == 0
    seconds = time.monotonic() - begin
    wanted = files_of("whole")
    killed = 0
    for number in range(kills):
        name, more = f"killed{number}", []
        for _ in range(chance.choice((1, 1, 2, 3))):
            process = child(command(door, name, *more))
            killed += kill_at_a_random_moment(process, Path(name, "net.calibration.npz"), seconds, chance)
            more = ["--resume"]
        run_to_the_end(door, name, *more)
        found = files_of(name)
        assert found.keys() == wanted.keys(), (door, sorted(found), sorted(wanted))
        for file, content in wanted.items():
            assert found[file] == content, f"{door}, seed {seed}, run {number}: {file} differs"
    resumed = [int(each) for each in re.findall(r"goes on after (\d+) batches", Path("output.txt").read_text())]
    sys.stdout.write("\n")
    print(json.dumps({"killed": killed, "resumed after": resumed, "files": sorted(wanted)}))


if __name__ == "__main__":
    os.environ["AMCT_LOG_LEVEL"] = "INFO"
    main_loop(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
