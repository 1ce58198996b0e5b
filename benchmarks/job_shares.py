"""The shares of a job: of the check of written files in quantize and save, and of the report in all three.

    python benchmarks/job_shares.py                       all networks
    python benchmarks/job_shares.py Caffe lenet           only names that contain one of these words
    python benchmarks/job_shares.py "amct quantize"       only the commands

**Commands**: ``python -m amct quantize``, with ``--no-check`` and with ``--report``, as processes with one thread: what
a user waits for. The CPU time of the process from its start counts, the median of three turns; the check is what the
command takes longer than with ``--no-check``, the report what it takes longer with ``--report``.

**Functions** in a process that has everything imported, on 8 small batches: the hardest reading. The networks are small
ones of ``benchmarks/zoo.py`` that need no other package, and the real models (AMCT_ASSETS, or shared/assets beside the
project); the ONNX door gets the float files of the torch networks. Defaults, all formats. The check is what a save
takes longer than the same one without, of quantize and save; the report is what ``amct quantize --report`` does beside
the comparison that the command prints anyway, of all of these. CPU seconds of one thread: each job runs once before it
is timed, then its turns alternate with those of the others; the median counts.

The table is printed and written to ``benchmarks/results/job_shares.json``.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "pytorch")]
os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")

import numpy as np  # noqa: E402  the networks are found through the path above
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from zoo_networks import own, prototxts  # noqa: E402

import amct.caffe  # noqa: E402
import amct.onnx_model  # noqa: E402
import amct.pytorch  # noqa: E402
from amct.export.formats import save_model  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amct.pipeline.quantized_model import QuantizedModel

    Job = tuple[Callable[[], QuantizedModel], list[Any]]
    Build = Callable[[Path], Job]

ASSETS = Path(os.environ.get("AMCT_ASSETS", HERE.parent.parent / "shared" / "assets"))
RESULTS = HERE / "results" / "job_shares.json"
TURNS = 3
MOST_CHECK, MOST_REPORT = 0.20, 0.25
BATCHES = 8
TORCH = ("mlp", "lenet", "cifar_resnet", "unet", "attention", "keyword_spotter")
CAFFE = ("mobilenet", "squeezenet", "resnet", "mtcnn_pnet")
MNIST = "mnist/t10k-images-idx3-ubyte.gz"
REAL_CAFFE = {
    "LeNet": ("caffe_lenet_mnist/lenet.prototxt", "caffe_lenet_mnist/lenet_iter_10000.caffemodel", (1, 28, 28)),
    "CIFAR-10 quick": ("caffe_cifar10_quick/cifar10_quick.prototxt",
                       "caffe_cifar10_quick/cifar10_quick_iter_5000.caffemodel", (3, 32, 32)),
    "MTCNN det2": ("caffe_mtcnn/det2.prototxt", "caffe_mtcnn/det2.caffemodel", (3, 24, 24)),
    "SqueezeNet": ("caffe_squeezenet_v1.0_dc/SqueezeNet_deploy.prototxt",
                   "caffe_squeezenet_v1.0_dc/squeezenet_v1.0_dc.caffemodel", (3, 227, 227)),
    "open_nsfw": ("caffe_open_nsfw/deploy.prototxt", "caffe_open_nsfw/resnet_50_1by2_nsfw.caffemodel", (3, 224, 224)),
}  # fmt: skip


def zoo_job(build: Callable[[Path], Any], folder: Path) -> Job:
    """A network of the zoo and its batches, made anew: a model that was seen before is not captured again."""
    subject = build(folder)
    return subject.quantize, subject.calibration


def onnx_job(build: Callable[[Path], Any], folder: Path) -> Job:
    """The same network as an ONNX file."""
    subject, path = build(folder), folder / "float.onnx"
    quantized = subject.quantize()
    model = subject.float_onnx(quantized)
    save_model(path, model)
    names = [value.name for value in model.graph.input]
    batches = [subject.feeds(batch, names) for batch in subject.calibration]
    return lambda: amct.onnx_model.quantize(path, batches), batches


def caffe_job(prototxt: Path, caffemodel: Path, shape: tuple[int, ...], _: Path) -> Job:
    """A real Caffe net, with batches of four as in ``ptq_caffe.py``, of random pixels."""
    rng = np.random.default_rng(0)
    batches = [{"data": rng.uniform(-1, 1, (4, *shape)).astype(np.float32)} for _ in range(BATCHES)]
    return lambda: amct.caffe.quantize(prototxt, caffemodel, batches), batches


def resnet20_job(_: Path) -> Job:
    """The trained ResNet-20."""
    from real_models import cifar_images, cifar_resnet

    model, data = cifar_resnet(ASSETS, 20), list(cifar_images(ASSETS, "train_10000", 8 * BATCHES)[0].split(8))
    return lambda: amct.pytorch.quantize(model, data), data


def jobs() -> Iterator[tuple[str, Build]]:
    """All jobs by name."""
    zoo = {network.name.partition("/")[2]: network.build for network in own.networks()}
    for name in TORCH:
        yield f"PyTorch: {name}", partial(zoo_job, zoo[name])
    for name in TORCH:
        yield f"ONNX: {name}", partial(onnx_job, zoo[name])
    zoo = {network.name.partition("/")[2]: network.build for network in prototxts.networks()}
    for name in CAFFE:
        yield f"Caffe: {name}", partial(zoo_job, zoo[name])
    if not ASSETS.is_dir():
        print(f"left out: the real models are not in {ASSETS} (set AMCT_ASSETS)")
        return
    yield "PyTorch: ResNet-20, batches of 8", resnet20_job
    for name, (prototxt, caffemodel, shape) in REAL_CAFFE.items():
        yield f"Caffe: {name}", partial(caffe_job, ASSETS / prototxt, ASSETS / caffemodel, shape)


def commands() -> Iterator[tuple[str, Callable[[Path], list[str]]]]:
    """The commands by name, as functions that get a folder for what they need and return the arguments."""
    if not ASSETS.is_dir():
        return
    for name in ("LeNet", "SqueezeNet", "open_nsfw"):
        prototxt, caffemodel, shape = REAL_CAFFE[name]
        data = [str(ASSETS / "imagenet"), "--mean", "104,117,123", "--size", str(shape[1]), "--batch-size", "4"]
        if name == "LeNet":
            data = [str(ASSETS / MNIST), "--scale", "0.00390625", "--batch-size", "64"]
        given = [str(ASSETS / prototxt), str(ASSETS / caffemodel), "--data", *data, "--batches", str(BATCHES)]
        yield f"Caffe: {name}, {BATCHES} batches of {data[-1]}", lambda _, given=given: given  # type: ignore[misc]
    yield f"ONNX: ResNet-20, {BATCHES} batches of 64", resnet20_command


def resnet20_command(folder: Path) -> list[str]:
    """The trained ResNet-20 as an ONNX file, with pictures as an array."""
    from real_models import cifar_images, cifar_resnet

    images = cifar_images(ASSETS, "train_10000", 64 * BATCHES)[0]
    np.save(folder / "images.npy", images.numpy())
    quantized = amct.pytorch.quantize(cifar_resnet(ASSETS, 20), [images[:64]])
    save_model(folder / "net.onnx", quantized.prepared.float_model(None))
    return [str(folder / "net.onnx"), "--data", str(folder / "images.npy"), "--batch-size", "64"]


def command_seconds(arguments: list[str]) -> float:
    """CPU seconds of an ``amct quantize`` with these arguments, as a process of its own with one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "amct", "quantize", *arguments, "-o", f"{folder}/out/net"]
        threads = {"OMP_NUM_THREADS": "1", "AMCT_LOG_LEVEL": "ERROR"}
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **threads})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def command_turns(make: Callable[[Path], list[str]]) -> list[dict[str, float]]:
    """CPU seconds of a command, of the check in it and of the report with it, turn by turn."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = make(Path(folder))
        for number in range(TURNS + 1):
            plain, unchecked, reported = (
                command_seconds([*arguments, *options]) for options in ((), ("--no-check",), ("--report",))
            )
            if number:  # the first fills the caches of the files
                found.append({"job": plain, "check": plain - unchecked, "report": reported - plain, "compared": 0.0})
    return found


def seconds(function: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def turn(build: Build) -> dict[str, float]:
    """CPU seconds of one job: quantize and save, the check in it, the comparison that is printed, and the report."""
    with tempfile.TemporaryDirectory() as text:
        (quantize, batches), path = build(Path(text)), Path(text) / "net"
        begin = time.process_time()
        quantized = quantize()
        quantized.save(path, check=False)
        whole = time.process_time() - begin
        check = seconds(lambda: quantized.save(path)) - seconds(lambda: quantized.save(path, check=False))
        files = sorted(Path(text).glob("net*"))
        compared = seconds(lambda: measured(quantized, batches, files))
        report = seconds(lambda: measured(quantized, batches, files, Path(text) / "net_report.html")) - compared
        return {"job": whole + check, "check": check, "compared": compared, "report": report}


def measured(quantized: QuantizedModel, batches: list[Any], files: list[Path], page: Path | None = None) -> None:
    """What the command measures of its files, with or without a report."""
    if quantized.measure_file(batches, files, page) is None:
        raise RuntimeError(f"{files[0].name}: the QDQ file does not show every layer")


def row(name: str, part: float, whole: float, most: float) -> dict[str, Any]:
    """A line of the table."""
    text = f"{part:.2f} of {whole:.2f} CPU s = {part / whole:.0%}"
    return {"what": name, "measured": text, "wanted": f"<= {most:.0%}", "kept": part <= most * whole}


def rows_of(name: str, turns: list[dict[str, float]]) -> Iterator[dict[str, Any]]:
    """The lines of one network."""
    job, check, compared, report = (
        median(each[part] for each in turns) for part in ("job", "check", "compared", "report")
    )
    yield row(f"{name}: check", check, job, MOST_CHECK)
    yield row(f"{name}: report", report, job + compared + report, MOST_REPORT)


def is_asked_for(name: str, words: list[str]) -> bool:
    """Whether a name contains one of the words, if there are any."""
    return not words or any(word in name for word in words)


def main() -> None:
    """Measure, print, write."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    words = sys.argv[1:]
    chosen = {name: build for name, build in jobs() if is_asked_for(name, words)}
    asked = {f"amct quantize, {name}": make for name, make in commands()}
    found = {name: command_turns(make) for name, make in asked.items() if is_asked_for(name, words)}
    found |= {name: [] for name in chosen}
    for number in range(TURNS + 1):
        for name, build in chosen.items():
            measured = turn(build)
            if number:  # what is loaded on first use belongs to no network
                found[name].append(measured)
    rows = [each for name, turns in found.items() for each in rows_of(name, turns)]
    table = Table("what", "measured", "wanted", "kept", title="shares of the check and of the report")
    for each in rows:
        table.add_row(each["what"], each["measured"], each["wanted"], "yes" if each["kept"] else "[red]NO[/red]")
    Console(width=120).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"rows": rows, "partial": bool(words)}, indent=1) + "\n")
    sys.exit(0 if all(each["kept"] for each in rows) else 1)


if __name__ == "__main__":
    main()
