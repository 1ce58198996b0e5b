"""Kills quantization at random moments and checks that the files are the old ones, the new ones, or refused.

Two models of the same shape are saved in turn under the same names. Each kill ends in one of these states:

old, new   every file is as it was before the job, or as the job writes it
noticed    the files are a mixture, and our readers refuse them ("interrupted save, run again")
torn       a file is neither that of the one nor of the other model                      ── a defect
mixed      the files are a mixture, and our readers accept them                          ── a defect
broken     the next run fails, or leaves other files than it should                      ── a defect

A third of the kills come at any moment of the job, by its CPU time, a third while files are being written, a third
while they get their names: right before one of these steps, or a moment after. The kernel or the job itself ends it, so
that other work on the machine changes nothing and nobody has to watch. Every third job has a second writer of the other
model beside it.

Usage: ``python scripts/torture.py --kills 1000 --seed 7``; kills 1000 to 1999 are those of ``--first 1000``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper, save_model
from torch import nn

import amct.caffe
import amct.onnx_model
import amct.pytorch
import amct_caffe.caffe
import amct_pytorch
from amct import atomic
from amct.cli import main as command_line
from amct.errors import AmctError
from amct.model.quant_json import read_quant_json

if TYPE_CHECKING:
    from collections.abc import Callable

PROTOTXT = """\
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc" inner_product_param { num_output: 5 } }
"""
LOSS = """\
layer { name: "target" type: "DummyData" top: "target" dummy_data_param { shape { dim: 2 dim: 5 } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "fc" bottom: "target" top: "loss" }
"""
SOLVER = """\
net: "%s" base_lr: 1e-6 lr_policy: "fixed" max_iter: 4 snapshot: 2 snapshot_prefix: "%s"
test_iter: 1 test_interval: 2 test_initialization: false
"""
SPARSE_INT8 = """\
prune_config { n_out_of_m_pruner { l1_selective_prune { } } }
retrain_data_quant_config { ulq_quantize { } }
retrain_weight_quant_config { arq_retrain { channel_wise: false } }
"""
PREFIX = "net"
STEPS = {"open": "writing", "os.rename": "renaming", "os.remove": "renaming"}
"""The audit events of a save, and what it does there to its hidden files."""
AIMS = ("any moment", "writing", "renaming")
HIDDEN = ".amct-"
PLANNED = (signal.SIGKILL, signal.SIGPROF, signal.SIGALRM)
"""What ends a job that is to be killed: itself, the kernel after so much CPU time, or after a moment."""
STATES = ("old", "new", "noticed", "torn", "mixed", "broken")
DEFECTS = STATES[3:]
SECOND_WRITER_EVERY = 3
NEXT_RUN_EVERY = 4
A_MOMENT = 0.002
"""A step of a save, and what comes between two of them, takes about so many seconds."""
SHARED_RECORD = (
    "pytorch_functions", "pytorch_retraining", "compression_functions", "caffe_functions", "caffe_retraining",
)  # fmt: skip
"""Flows whose steps meet in a record file that the script names: two of them at once need two record files."""
LONGEST_JOB_SECONDS = 600.0
SHOWN_EVERY = 100


class Model:
    """One of the two models, in the forms of the three doors, with its data."""

    def __init__(self, folder: Path, generation: int) -> None:
        self.folder, self.generation = folder / f"model{generation}", generation
        self.folder.mkdir()
        values = np.random.default_rng(generation)
        self.data = values.standard_normal((2, 3, 8, 8)).astype(np.float32)
        self.weights = {
            "conv": [values.standard_normal((4, 3, 3, 3)), values.standard_normal(4)],
            "fc": [values.standard_normal((5, 144)), values.standard_normal(5)],
        }
        np.save(self.folder / "data.npy", self.data)
        self._write_onnx()
        self._write_caffe()

    def torch_module(self) -> nn.Module:
        """The model as a PyTorch module."""
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
        for layer, name in ((model[0], "conv"), (model[3], "fc")):
            layer.load_state_dict(
                {key: torch.tensor(v).float() for key, v in zip(("weight", "bias"), self.weights[name], strict=True)}
            )
        return model

    def torch_data(self) -> torch.Tensor:
        """The data as a tensor."""
        return torch.from_numpy(self.data)

    @property
    def onnx(self) -> Path:
        """The model as an ONNX file."""
        return self.folder / "net.onnx"

    @property
    def caffe(self) -> tuple[Path, Path]:
        """The model as a prototxt and a caffemodel."""
        return self.folder / "net.prototxt", self.folder / "net.caffemodel"

    def _write_onnx(self) -> None:
        tensors = {
            f"{name}.{i}": v.astype(np.float32) for name, blobs in self.weights.items() for i, v in enumerate(blobs)
        }
        graph = helper.make_graph(
            [
                helper.make_node("Conv", ["x", "conv.0", "conv.1"], ["c"], name="conv"),
                helper.make_node("Relu", ["c"], ["r"], name="relu"),
                helper.make_node("Flatten", ["r"], ["f"], name="flatten"),
                helper.make_node("Gemm", ["f", "fc.0", "fc.1"], ["y"], name="fc", transB=1),
            ],
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3, 8, 8))],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 5))],
            [numpy_helper.from_array(value, name) for name, value in tensors.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        save_model(model, str(self.onnx))

    def _write_caffe(self) -> None:
        prototxt, caffemodel = self.caffe
        prototxt.write_text(PROTOTXT)
        (self.folder / "train.prototxt").write_text(PROTOTXT + LOSS)
        net = amct_caffe.caffe.Net(str(prototxt), amct_caffe.caffe.TEST)
        for name, blobs in self.weights.items():
            for blob, value in zip(net.params[name], blobs, strict=True):
                blob.data[...] = value
        net.save(str(caffemodel))


# -- the flows ---------------------------------------------------------------------------------------------------------


def pytorch_call(model: Model, out: Path) -> None:
    """Our own API, PyTorch."""
    amct.pytorch.quantize(model.torch_module(), [model.torch_data()]).save(out / PREFIX)


def pytorch_functions(model: Model, out: Path) -> None:
    """The functions of ``amct_pytorch``."""
    module, data = model.torch_module(), model.torch_data()
    config, modified, record = (str(out / name) for name in ("config.json", "modified.onnx", "record.txt"))
    amct_pytorch.create_quant_config(config, module, data)
    amct_pytorch.quantize_model(config, modified, record, module, data)(data)
    amct_pytorch.save_model(modified, record, str(out / PREFIX))


def pytorch_retraining(model: Model, out: Path) -> None:
    """The functions of ``amct_pytorch`` for retraining, with a checkpoint in between."""
    data = model.torch_data()
    config, record, state = (str(out / name) for name in ("config.json", "record.txt", "state.pth"))
    amct_pytorch.create_quant_retrain_config(config, model.torch_module(), data)
    trained = amct_pytorch.create_quant_retrain_model(config, model.torch_module(), record, data)
    trained.train()(data)
    torch.save(trained.state_dict(), state)
    trained = amct_pytorch.restore_quant_retrain_model(config, model.torch_module(), record, data, state)
    amct_pytorch.save_quant_retrain_model(config, trained, record, str(out / PREFIX), data)


def pruning_call(model: Model, out: Path) -> None:
    """Channel pruning by our own API, PyTorch."""
    amct.pytorch.prune(model.torch_module(), model.torch_data(), ratio=0.5, align=1).save(out / PREFIX)


def compression_functions(model: Model, out: Path) -> None:
    """The functions of ``amct_pytorch`` for 2:4 sparsity with retraining, with a checkpoint in between."""
    data = model.torch_data()
    config, record, state = (str(out / name) for name in ("prune.cfg", "record.txt", "state.pth"))
    atomic.write_text(config, SPARSE_INT8)
    trained = amct_pytorch.create_compressed_retrain_model(model.torch_module(), data, config, record)
    trained.train()(data)
    torch.save(trained.state_dict(), state)
    trained = amct_pytorch.restore_compressed_retrain_model(model.torch_module(), data, config, record, state)
    amct_pytorch.save_compressed_retrain_model(trained, record, str(out / PREFIX), data)


def onnx_call(model: Model, out: Path) -> None:
    """Our own API, ONNX."""
    amct.onnx_model.quantize(str(model.onnx), [model.data]).save(out / PREFIX)


def caffe_call(model: Model, out: Path) -> None:
    """Our own API, Caffe."""
    amct.caffe.quantize(*model.caffe, [model.data]).save(out / PREFIX)


def caffe_functions(model: Model, out: Path) -> None:
    """The functions of ``amct_caffe``."""
    pair = [str(path) for path in model.caffe]
    config, record = str(out / "config.json"), str(out / "record.txt")
    amct_caffe.create_quant_config(config, *pair)
    graph = amct_caffe.init(config, *pair, record)
    modified = str(out / "modified.prototxt"), str(out / "modified.caffemodel")
    amct_caffe.weights_quantize_model(graph, *modified)
    amct_caffe.activation_quantize_model(graph, *modified)
    net = amct_caffe.caffe.Net(*modified, amct_caffe.caffe.TEST)
    net.blobs["data"].data[...] = model.data
    net.forward()
    amct_caffe.save_model(graph, "Both", str(out / PREFIX))


def caffe_retraining(model: Model, out: Path) -> None:
    """The functions of ``amct_caffe`` for retraining, with snapshots in between."""
    train, weights = str(model.folder / "train.prototxt"), str(model.caffe[1])
    config, record, solver_file = (str(out / name) for name in ("config.json", "record.txt", "solver.prototxt"))
    modified = str(out / "modified.prototxt"), str(out / "modified.caffemodel")
    amct_caffe.create_quant_retrain_config(config, train, weights)
    amct_caffe.create_quant_retrain_model(train, weights, config, *modified, record)
    atomic.write_text(solver_file, SOLVER % (modified[0], out / "snapshot"))
    solver = amct_caffe.caffe.SGDSolver(solver_file)
    solver.net.copy_from(modified[1])
    for net in (solver.net, *solver.test_nets):
        net.blobs["data"].data[...] = model.data
    solver.solve()
    amct_caffe.save_quant_retrain_model(modified[0], str(out / "snapshot_iter_4.caffemodel"), "Both", str(out / PREFIX))


def command(*words: str) -> None:
    """Run a command; a failure is an exception."""
    if code := command_line([*words]):
        raise RuntimeError(f"amct {' '.join(words)}: exit code {code}")


def caffe_command(model: Model, out: Path) -> None:
    """``amct quantize`` of a Caffe model, with a report."""
    data = str(model.folder / "data.npy")
    command("quantize", *map(str, model.caffe), "--data", data, "-o", str(out / PREFIX), "--report")


def onnx_command(model: Model, out: Path) -> None:
    """``amct quantize`` of an ONNX model."""
    command("quantize", str(model.onnx), "--data", str(model.folder / "data.npy"), "-o", str(out / PREFIX))


FLOWS: dict[str, Callable[[Model, Path], None]] = {
    each.__name__: each
    for each in (
        pytorch_call,
        pytorch_functions,
        pytorch_retraining,
        pruning_call,
        compression_functions,
        onnx_call,
        caffe_call,
        caffe_functions,
        caffe_retraining,
        caffe_command,
        onnx_command,
    )
}


# -- processes ---------------------------------------------------------------------------------------------------------


def start(action: Callable[[], None]) -> int:
    """Run an action in a child process and return its id; its output is dropped unless it fails."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        kept = os.dup(2)
        os.dup2(null, 1)
        os.dup2(null, 2)
        action()
        code = 0
    except BaseException:  # noqa: BLE001  reported by the parent through the exit code
        os.dup2(kept, 2)
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def wait(pid: int, seconds: float = LONGEST_JOB_SECONDS) -> int | None:
    """Wait for a child: its exit status, or None after the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.005)
    return None


def kill(pid: int) -> None:
    """Kill a child and collect it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def is_killed_or_well(status: int | None) -> bool:
    """Whether a child ended by itself without a failure, or was killed as planned."""
    return status is not None and (status == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in PLANNED))


def watch_steps(notice: Callable[[str, int], None]) -> None:
    """Have every step of this process's saves noticed: what it does, and how many of that kind there were with it."""
    counts: Counter[str] = Counter()

    def heard(event: str, args: tuple[object, ...]) -> None:
        step = STEPS.get(event)
        if step is not None and isinstance(args[0], (str, os.PathLike)) and HIDDEN in os.fspath(args[0]):
            counts[step] += 1
            notice(step, counts[step])

    sys.addaudithook(heard)


def end_after(seconds: float) -> None:
    """Have the kernel end this process, which cannot do anything about it."""
    if seconds < 1e-6:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def measure(action: Callable[[], None], target: Path) -> None:
    """Run an action and write down its CPU time and how many steps of each kind its saves have."""
    steps: dict[str, int] = {}
    watch_steps(steps.__setitem__)
    action()
    target.write_text(json.dumps([time.process_time(), steps]))


def complete(action: Callable[[], None]) -> bool:
    """Run an action in a child process to its end: whether it succeeded."""
    pid = start(action)
    status = wait(pid)
    if status is None:
        kill(pid)
    return status == 0


# -- one flow ----------------------------------------------------------------------------------------------------------


def is_group_file(path: Path) -> bool:
    """Whether a file belongs to the group of the save; the report is written on its own."""
    return path.name.startswith(f"{PREFIX}_") and path.suffix != ".html"


def digest(path: Path) -> str:
    """The SHA-256 of a file; of quant.json, which holds measured times, that of the files it lists."""
    if path.name.endswith("quant.json"):
        listed = json.loads(path.read_text())["files"]
        return repr(sorted((name, entry["sha256"]) for name, entry in listed.items()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """The digest of each file of the group."""
    return {path.name: digest(path) for path in sorted(folder.iterdir()) if is_group_file(path)}


class Victim:
    """One flow with its output folder, the expected files of both models, and the time the job takes."""

    def __init__(self, name: str, models: list[Model], folder: Path) -> None:
        self.name, self.models = name, models
        self.out = folder / name
        self.out.mkdir()
        self.expected = []
        for model in models:
            with contextlib.redirect_stdout(io.StringIO()):
                self.job(model)()  # in this process: its caches then serve every child
            self.expected.append(contents(self.out))
        measured = folder / f"{name}.json"
        if not complete(lambda: measure(self.job(models[-1]), measured)):
            raise SystemExit(f"{name}: the flow fails without any kill")
        self.seconds, self.steps = json.loads(measured.read_text())

    def job(self, model: Model) -> Callable[[], None]:
        """The whole flow for one model, as a process does it."""

        def run() -> None:
            os.chdir(self.out)
            torch.set_num_threads(1)
            FLOWS[self.name](model, self.out)

        return run

    def _end(self, rng: random.Random) -> Callable[[], None]:
        """What a job does at first, to be killed at a random moment."""
        aim = rng.choice(AIMS)
        moment, later = rng.random(), rng.random() * rng.randrange(2)
        if not self.steps.get(aim):
            return lambda: signal.setitimer(signal.ITIMER_PROF, max(moment * self.seconds, 1e-4)) and None
        last = int(moment * self.steps[aim]) + 1

        def end_at(step: str, count: int) -> None:
            if (step, count) == (aim, last):
                end_after(later * A_MOMENT)

        return lambda: watch_steps(end_at)

    def round(self, number: int, rng: random.Random) -> str:
        """Kill a job that replaces the files of the one model by those of the other: the state of the files."""
        before = contents(self.out)
        model, other = self.models if before == self.expected[1] else self.models[::-1]
        end = self._end(rng)
        pids = [start(lambda: (end(), self.job(model)()))]
        if number % SECOND_WRITER_EVERY == 0 and self.name not in SHARED_RECORD:
            pids.append(start(self.job(other)))
        well = all(map(is_killed_or_well, list(map(wait, pids))))
        state = self.state(before)
        # A writer that reads its own files again is refused them if the other one was killed while it renamed its own.
        if not well and (len(pids) == 1 or self._readable()):
            return "broken"
        # A job takes most of the time, so that not every harmless state is followed by one.
        due = state not in ("old", "new") or number % NEXT_RUN_EVERY == 0
        return state if not due or self._next_run_is_fine(model) else "broken"

    def state(self, before: dict[str, str]) -> str:
        """Which files are there, compared with those before the job, and whether our readers accept them."""
        try:
            found = contents(self.out)
        except (ValueError, KeyError):
            return "torn"
        if any(value not in (expected.get(name) for expected in self.expected) for name, value in found.items()):
            return "torn"
        if found in self.expected:
            return "old" if found == before else "new"
        return "mixed" if self._readable() else "noticed"

    def _readable(self) -> bool:
        """Whether any reader of the group accepts it."""
        try:
            atomic.check_whole(*(path for path in self.out.iterdir() if is_group_file(path)))
            read_quant_json(self.out / f"{PREFIX}_quant.json")
        except AmctError:
            return False
        return True

    def _next_run_is_fine(self, model: Model) -> bool:
        if not complete(self.job(model)):
            return False
        left = [path.name for path in self.out.iterdir() if path.name.startswith(".amct")]
        return not left and contents(self.out) == self.expected[self.models.index(model)]


def torture(numbers: range, seed: int, names: list[str]) -> Counter[tuple[str, str]]:
    """Kill jobs of all flows in turn: how often each flow ended in each state."""
    states: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        models = [Model(place, generation) for generation in (1, 2)]
        victims = [Victim(name, models, place) for name in names]
        for done, number in enumerate(numbers, 1):
            victim = victims[number % len(victims)]
            state = victim.round(number // len(victims), random.Random(f"{seed} {number}"))
            states[victim.name, state] += 1
            if state in DEFECTS or done % SHOWN_EVERY == 0:
                sys.stderr.write(f"kill {number}, {victim.name}: {state}; {done} of {len(numbers)} kills\n")
    return states


def main() -> int:
    """Print how often each state was found; the exit code is 1 if there was a defect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--flows", default=",".join(FLOWS), help="comma-separated names")
    options = parser.parse_args()
    os.environ["AMCT_LOG_LEVEL"] = "error"
    states = torture(range(options.first, options.first + options.kills), options.seed, options.flows.split(","))
    for (flow, state), count in sorted(states.items()):
        sys.stdout.write(f"{flow:22} {state:10} {count}\n")
    totals = {name: sum(count for (_, state), count in states.items() if state == name) for name in STATES}
    sys.stdout.write(", ".join(f"{count} {name}" for name, count in totals.items()) + "\n")
    defects = sum(totals[name] for name in DEFECTS)
    sys.stdout.write(f"{states.total()} kills, {defects} defects\n")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
