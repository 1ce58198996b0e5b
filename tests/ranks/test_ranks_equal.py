"""Calibration in several processes under torchrun gives the files of one process, byte for byte."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rank_cases import CASES

HERE = Path(__file__).parent
WITH_THREE = ("ifmr", "counted", "hfmg", "min_max", "dmq", "kv_cache", "caffe_batch_norms", "torch_one_batch")


def torchrun(folder, processes, *arguments):
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "AMCT_LOG_LEVEL": "error", "AMCT_RANK_TIMEOUT": "300"}
    return subprocess.run(
        [sys.executable, *command, "--nproc-per-node", str(processes), *map(str, arguments)],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize(
    ("processes", "names"), [(2, [case.__name__ for case in CASES]), (3, WITH_THREE)], ids=["2 ranks", "3 ranks"]
)
def test_the_files_are_those_of_one_process(tmp_path, processes, names):
    done = torchrun(tmp_path, processes, HERE / "rank_cases.py", tmp_path / "work", *names)
    assert done.returncode == 0, done.stderr[-6000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("equal: ")] == [f"equal: {n}" for n in names]


def test_the_command_line(tmp_path):
    """Only the first process prints and writes; the record is that of the command alone."""
    made = subprocess.run(
        [sys.executable, HERE / "command_files.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    arguments = ["quantize", "net.onnx", "--data", "images.npy", "--batch-size", "2", "--formats", "record"]
    alone = subprocess.run(
        [sys.executable, "-m", "amct", *arguments, "-o", "alone/net"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    done = torchrun(tmp_path, 2, "-m", "amct", *arguments, "-o", "together/net")
    assert done.returncode == 0, done.stderr[-3000:]
    # the verdict is of each process's own first batches: the first process has others here than the command alone
    together, figure = done.stdout.replace("together", "alone"), re.compile(r"SQNR is [0-9.]+ dB")
    assert figure.sub("", together) == figure.sub("", alone.stdout)
    assert len(figure.findall(together)) == 1
    files = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (tmp_path / "together").iterdir()} == files
    (record,) = [name for name in files if name.endswith(".txt")]
    assert (tmp_path / "together" / record).read_bytes() == (tmp_path / "alone" / record).read_bytes()


def test_an_error_of_the_command_names_the_process(tmp_path):
    done = torchrun(tmp_path, 2, "-m", "amct", "quantize", "missing.onnx", "--data", "x.npy", "-o", "out/net")
    assert done.returncode != 0
    # torchrun ends the other process as soon as one has failed: either of them tells
    assert re.search(r'^(rank 1: )?error: "missing\.onnx" does not exist', done.stderr, re.MULTILINE)
    assert not (tmp_path / "out").exists()
    variables = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "amct", "quantize", "missing.onnx", "--data", "x.npy", "-o", "out/net"]
    second = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert second.stderr.startswith('rank 1: error: "missing.onnx" does not exist')
