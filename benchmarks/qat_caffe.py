"""What retraining of Caffe nets gives and costs: accuracy of float, PTQ and QAT, and CPU time of an iteration.

    python benchmarks/qat_caffe.py              all lines
    python benchmarks/qat_caffe.py speed        only lines whose name contains this

LeNet on MNIST and CIFAR-10 quick with their published weights, from the folder of real models (AMCT_ASSETS, or
../shared/assets beside the project). QAT starts from the float model and trains 500 iterations with the solver of the
guide; PTQ calibrates with 4 batches. Accuracies are those of the fake-quant files on all test images. An iteration is
one ``step`` of the solver, float and QAT in turns on one thread; the median CPU time counts. Every line with a limit
says whether it is kept. The table is printed and written to ``benchmarks/results/qat_caffe.json``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import amct.caffe as door
import amct_caffe as amct
from amct.caffe.engine.messages import new_message
from amct.caffe.model import read_net
from amct.data.arrays import read_idx
from amct.data.lmdb import write_lmdb
from amct.schema import format_text
from amct_caffe import caffe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

RESULTS = Path(__file__).resolve().parent / "results" / "qat_caffe.json"
ASSETS = Path(os.environ.get("AMCT_ASSETS", Path(__file__).resolve().parents[2] / "shared" / "assets"))
ITERATIONS, BATCH, TEST_BATCH = 500, 64, 100
TURNS = 40
MOST_TIME, MOST_BELOW_FLOAT = 1.6, 0.1

SOLVER = """net: "{net}" base_lr: {rate} momentum: 0.9 weight_decay: 0.0001 lr_policy: "step" stepsize: 200 gamma: 0.3
max_iter: {iterations} random_seed: 1 snapshot_prefix: "{prefix}" snapshot: {snapshot}
test_iter: {tests} test_interval: {iterations} test_initialization: false
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A published net and its data, as the net takes it."""

    name: str
    model: Path
    weights: Path
    rate: float
    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One figure; ``kept`` tells whether it is within its limit."""

    name: str
    value: float
    unit: str
    limit: str = ""
    kept: bool | None = None


def lenet() -> Subject:
    """LeNet on MNIST."""
    folder, data = ASSETS / "caffe_lenet_mnist", ASSETS / "mnist"
    arrays = {
        name: read_idx(data / f"{name}.gz")
        for name in (
            "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
        )
    }  # fmt: skip
    images, labels, tests, truth = arrays.values()
    return Subject(
        name="LeNet",
        model=folder / "lenet.prototxt",
        weights=folder / "lenet_iter_10000.caffemodel",
        rate=0.001,
        images=images[: ITERATIONS * BATCH, None].astype(np.float32) / 256,
        labels=labels[: ITERATIONS * BATCH].astype(np.int64),
        test_images=tests[:, None].astype(np.float32) / 256,
        test_labels=truth.astype(np.int64),
    )


def cifar10_quick() -> Subject:
    """CIFAR-10 quick."""
    folder, data = ASSETS / "caffe_cifar10_quick", ASSETS / "cifar10"
    mean = np.load(data / "train_mean_rgb_chw.npy").astype(np.float32)
    parts = []
    for name in ("train_10000", "test_6000"):
        with np.load(data / f"{name}.npz") as file:
            parts += [file["x"].transpose(0, 3, 1, 2).astype(np.float32) - mean, file["y"].astype(np.int64)]
    return Subject(
        name="CIFAR-10 quick",
        model=folder / "cifar10_quick.prototxt",
        weights=folder / "cifar10_quick_iter_5000.caffemodel",
        rate=0.0001,
        images=parts[0],
        labels=parts[1],
        test_images=parts[2],
        test_labels=parts[3],
    )


class Work:
    """The files of one net in a folder."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder = subject, folder
        self.tests = len(subject.test_labels) // TEST_BATCH
        for part, images, labels in (
            ("train", subject.images, subject.labels),
            ("test", subject.test_images, subject.test_labels),
        ):
            write_lmdb(folder / part, zip(images, map(int, labels), strict=True))
        self.model = folder / "train.prototxt"
        self.model.write_text(self._training_net())
        self.modified = str(folder / "modified.prototxt"), str(folder / "modified.caffemodel")

    def _training_net(self) -> str:
        """The deploy net with data layers for both phases, a loss and an accuracy."""
        net = read_net(self.subject.model)
        source, *body, softmax = net.layer
        assert (source.type, softmax.type) == ("Input", "Softmax")
        result = new_message("NetParameter", name=net.name)
        for phase, (part, batch) in enumerate((("train", BATCH), ("test", TEST_BATCH))):
            layer = result.layer.add(name="data", type="Data", top=[source.top[0], "label"])
            layer.include.add(phase=phase)
            layer.data_param.source, layer.data_param.batch_size = str(self.folder / part), batch
            layer.data_param.backend = (
                layer.data_param.DESCRIPTOR.enum_types_by_name["DB"].values_by_name["LMDB"].number
            )
        result.layer.extend(body)
        self.scores = softmax.bottom[0]
        scores = [self.scores, "label"]
        result.layer.add(name="accuracy", type="Accuracy", bottom=scores, top=["accuracy"]).include.add(phase=1)
        result.layer.add(name="loss", type="SoftmaxWithLoss", bottom=scores, top=["loss"])
        return format_text(result)

    def solver(self, net: str, **options: object) -> caffe.SGDSolver:
        """A solver for the float net or the net of retraining."""
        path = self.folder / f"solver_{Path(net).stem}.prototxt"
        values: dict[str, object] = {
            "rate": self.subject.rate, "iterations": ITERATIONS, "tests": self.tests,
            "prefix": self.folder / "snapshot", "snapshot": ITERATIONS,
        }  # fmt: skip
        path.write_text(SOLVER.format(net=net, **(values | options)))
        return caffe.SGDSolver(str(path))

    def create(self) -> None:
        """The config and the model of retraining."""
        config = str(self.folder / "config.json")
        weights = str(self.subject.weights)
        amct.create_quant_retrain_config(config, str(self.model), weights)
        record = str(self.folder / "record.txt")
        amct.create_quant_retrain_model(str(self.model), weights, config, *self.modified, record)

    def accuracy(self, model: object, weights: object) -> float:
        """The accuracy of a net with data layers on all test images, in percent."""
        net = caffe.Net(str(model), str(weights), caffe.TEST)
        return 100 * float(np.mean([float(net.forward()["accuracy"]) for _ in range(self.tests)]))


def ptq_accuracy(subject: Subject) -> float:
    """The accuracy of the fake-quant model of post-training quantization, in percent."""
    batches = [subject.images[start : start + BATCH] for start in range(0, 4 * BATCH, BATCH)]
    quantized = door.quantize(subject.model, subject.weights, batches)
    hits = []
    for start in range(0, len(subject.test_labels), TEST_BATCH):
        (scores,) = quantized(subject.test_images[start : start + TEST_BATCH]).values()
        hits.append(scores.reshape(TEST_BATCH, -1).argmax(1) == subject.test_labels[start : start + TEST_BATCH])
    return 100 * float(np.mean(hits))


def accuracy_lines(work: Work) -> Iterator[Line]:
    """Float, PTQ and QAT; fake-quant against deploy."""
    subject = work.subject
    before = work.accuracy(work.model, subject.weights)
    yield Line(name=f"{subject.name} accuracy, float", value=before, unit="%")
    calibrated = ptq_accuracy(subject)
    yield Line(name=f"{subject.name} accuracy, PTQ", value=calibrated, unit="%")
    work.create()
    solver = work.solver(work.modified[0])
    solver.net.copy_from(work.modified[1])
    solver.solve()
    snapshot = work.folder / f"snapshot_iter_{ITERATIONS}.caffemodel"
    prefix = work.folder / "out" / "net"
    amct.save_quant_retrain_model(work.modified[0], str(snapshot), "Both", str(prefix))
    fake, deploy = (
        (f"{prefix}_{kind}_model.prototxt", f"{prefix}_{kind}_weights.caffemodel") for kind in ("fake_quant", "deploy")
    )
    trained = work.accuracy(*fake)
    kept, limit = trained >= calibrated, ">= PTQ"
    if subject.name == "LeNet":
        kept, limit = kept and trained >= before - MOST_BELOW_FLOAT, f">= PTQ, >= float - {MOST_BELOW_FLOAT}"
    yield Line(name=f"{subject.name} accuracy, QAT", value=trained, unit="%", limit=limit, kept=kept)
    nets = [caffe.Net(*files, caffe.TEST) for files in (fake, deploy)]
    different = 0
    for _ in range(work.tests):
        for net in nets:
            net.forward()
        left, right = (net.blobs[work.scores].data for net in nets)
        different += int((left != right).sum())
    yield Line(
        name=f"{subject.name} scores that differ, fake-quant and deploy",
        value=different, unit="", limit="0", kept=different == 0,
    )  # fmt: skip


def speed_lines(work: Work) -> Iterator[Line]:
    """The CPU time of an iteration, float and QAT in turns."""
    work.create()
    solvers = [work.solver(str(work.model)), work.solver(work.modified[0])]
    for solver, weights in zip(solvers, (work.subject.weights, work.modified[1]), strict=True):
        solver.net.copy_from(str(weights))
        solver.step(3)  # the first one finds the clips
    times: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for own, solver in zip(times, solvers, strict=True):
            begin = time.process_time()
            solver.step(1)
            own.append(time.process_time() - begin)
    plain, quantized = (1000 * float(np.median(own)) for own in times)
    name = work.subject.name
    yield Line(name=f"{name} speed, float iteration", value=plain, unit="ms")
    yield Line(name=f"{name} speed, QAT iteration", value=quantized, unit="ms")
    ratio = quantized / plain
    yield Line(
        name=f"{name} speed, QAT / float", value=ratio, unit="x", limit=f"<= {MOST_TIME}", kept=ratio <= MOST_TIME
    )


def resume_lines(work: Work) -> Iterator[Line]:
    """Training that goes on from a snapshot against training without a break; the data starts anew with a snapshot."""
    half = len(work.subject.images) // BATCH // 10
    whole, epoch = 2 * half, work.folder / "epoch"
    write_lmdb(epoch, zip(work.subject.images[: half * BATCH], map(int, work.subject.labels), strict=False))
    work.model.write_text(work.model.read_text().replace(str(work.folder / "train"), str(epoch)))
    work.create()
    options = {"iterations": whole, "tests": 1, "snapshot": half, "prefix": work.folder / "resumed"}
    first = work.solver(work.modified[0], **options)
    first.net.copy_from(work.modified[1])
    first.step(whole)
    second = work.solver(work.modified[0], **options)
    second.restore(str(work.folder / f"resumed_iter_{half}.solverstate"))
    second.step(half)
    different = sum(
        int((ours.data != theirs.data).sum())
        for name in first.net.params
        for ours, theirs in zip(first.net.params[name], second.net.params[name], strict=True)
    )
    name = f"{work.subject.name} resume: parameters that differ"
    yield Line(name=name, value=different, unit="", limit="0", kept=different == 0)


def main() -> int:
    """Measure, print and write the lines."""
    os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    parts = {"accuracy": accuracy_lines, "speed": speed_lines, "resume": resume_lines}
    lines: list[Line] = []
    for make in (lenet, cifar10_quick):
        subject = make()
        for part, measure in parts.items():
            if wanted not in f"{subject.name} {part}":
                continue
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                lines += measure(Work(subject, Path(folder)))
                os.chdir(RESULTS.parents[2])
    table = Table("", "value", "limit", "kept")
    for line in lines:
        kept = "" if line.kept is None else ("yes" if line.kept else "NO")
        table.add_row(line.name, f"{line.value:.4g} {line.unit}", line.limit, kept)
    Console(width=120).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    rows = [
        {
            "what": line.name,
            "measured": f"{line.value:.4g} {line.unit}".strip(),
            "wanted": line.limit,
            "kept": line.kept,
        }
        for line in lines
    ]
    RESULTS.write_text(json.dumps({"lines": [asdict(line) for line in lines], "rows": rows}, indent=1))
    return 0 if all(line.kept is not False for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
