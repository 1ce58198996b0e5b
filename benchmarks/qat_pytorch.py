"""Quantization-aware training of the CIFAR-10 ResNet-20: cost of a step, memory, accuracy.

    python benchmarks/qat_pytorch.py                      everything, three seeds
    python benchmarks/qat_pytorch.py step memory          only these parts: step, memory, w4a4, int8, file
    python benchmarks/qat_pytorch.py w4a4 --seeds 1       one seed (or AMCT_BENCH_SEEDS=1)

Needs the real models (AMCT_ASSETS, or shared/assets beside the project). Recipe: 10 000 training images, flip and crop,
SGD with momentum 0.9, cosine from 0.01 over the epochs of the row, batch 64; learned scales per channel, the image and
the first convolution have 8 bits. Times are CPU seconds of one thread, float and quantized steps in turn. Memory is the
growth of the process over its size before the first step, each model in a process of its own. The table is printed, and
written to ``benchmarks/results/qat_pytorch.json``.

At 8 bits one row evaluates the moving average of the weights (torch's, with its default decay of 0.999, statistics of
batch norms averaged too) in place of the last weights, trained with the labels alone. The loss of the row with a
teacher is a sixteenth of ``distillation_loss`` alone, with frozen batch norms: the start is as good as the float
network, which the recipe itself harms (row "float"). Part ``file`` is the default QDQ file: of a normally trained
network, and of one trained for it (``target="portable"``).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "pytorch"))

import onnxruntime  # noqa: E402  the networks of the tests are found through the path above
import torch  # noqa: E402  the networks of the tests are found through the path above
from real_models import cifar_images, cifar_resnet, onnx_top1, torch_top1  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

import amct.pytorch as amct  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

ASSETS = Path(os.environ.get("AMCT_ASSETS", HERE.parent.parent / "shared" / "assets"))
RESULTS = HERE / "results" / "qat_pytorch.json"
BATCH, CALIBRATION = 64, 512
ALL_SEEDS = 3
PARTS = ("step", "memory", "w4a4", "int8", "file")
GENTLE = 1 / 16
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


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture flipped or not, and cropped from a border of four pixels."""
    flips = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(flips[:, None, None, None], images.flip(3), images)
    padded = functional.pad(images, (4, 4, 4, 4))
    places = torch.randint(0, 9, (len(images), 2), generator=generator).tolist()
    return torch.stack([each[:, y : y + 32, x : x + 32] for each, (y, x) in zip(padded, places, strict=True)])


def train(
    model: nn.Module, epochs: int, seed: int, loss_of: Callable[..., Tensor], average: AveragedModel | None = None
) -> None:
    """The recipe; the loss is a function of inputs, outputs and labels."""
    images, labels = cifar_images(ASSETS, "train_10000")
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    _, optimizer = with_optimizer(model)
    model.to(memory_format=torch.channels_last)  # the same sums in less time
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator)[: steps // epochs * BATCH].split(BATCH):
            x = augmented(images[chosen], generator).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            loss_of(x, model(x), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
            if average is not None:
                average.update_parameters(model)
    model.eval()


def own_loss(_: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
    """Without a teacher."""
    return functional.cross_entropy(outputs, labels)


def calibration() -> list[Tensor]:
    """The batches that training starts from."""
    return list(cifar_images(ASSETS, "train_10000", CALIBRATION)[0].split(BATCH))


def prepared(config: amct.QatConfig | None, epochs: int, seed: int, *, loss: str = "labels", target: str = "exact8"):  # noqa: ANN201  a model of a class derived from the network's
    """A trained model; ``loss``: of the labels, of labels and teacher, or of the teacher alone with frozen norms.

    "average" is the moving average of the weights that are trained with the labels.
    """
    original = cifar_resnet(ASSETS, 20)
    io = amct.IoOptions(dynamic_axes={"x": {0: "n"}})
    frozen = loss == "teacher"
    model = amct.prepare_qat(
        original, calibration(), config, teacher=original, target=target, freeze_norms=frozen, io=io
    )
    losses = {
        "labels": own_loss,
        "average": own_loss,
        "both": lambda x, y, labels: 0.1 * own_loss(x, y, labels) + model.distillation_loss(x, y),
        "teacher": lambda x, y, _: GENTLE * model.distillation_loss(x, y),
    }
    average = averaged(model) if loss == "average" else None
    if epochs:
        train(model, epochs, seed, losses[loss], average)
    return (model if average is None else average.module).eval()


def averaged(model: nn.Module) -> AveragedModel:
    """The moving average of a model, with torch's default decay."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(), use_buffers=True)


def accuracies(config: amct.QatConfig | None, epochs: int, seeds: int, *, loss: str = "labels") -> list[float]:
    """Top-1 in percent after training, for each seed."""
    test = cifar_images(ASSETS, "test_6000")
    found = []
    for seed in range(seeds if epochs else 1):
        found.append(torch_top1(prepared(config, epochs, seed, loss=loss), *test))
        print(f"  {epochs} epochs, seed {seed}, loss of {loss}: {found[-1]:.2f}", file=sys.stderr)
    return found


def accuracy_row(what: str, found: list[float], wanted: float) -> Row:
    """The mean over the seeds, and the seeds."""
    mean = statistics.mean(found)
    each = f" ({', '.join(f'{value:.2f}' for value in found)})" if len(found) > 1 else ""
    return what, f"{mean:.2f}{each}", f">= {wanted:.2f}", mean >= wanted


def w4a4(seeds: int) -> Iterator[Row]:
    """Four bits, before and after training."""
    yield accuracy_row("W4A4 before training", accuracies(W4A4, 0, 1), 88.4)
    yield accuracy_row("W4A4 after 1 epoch", accuracies(W4A4, 1, seeds), 89.1)
    yield accuracy_row("W4A4 after 2 epochs", accuracies(W4A4, 2, seeds), 89.8)
    yield accuracy_row("W4A4 after 2 epochs, with teacher", accuracies(W4A4, 2, seeds, loss="both"), 90.2)


def int8(seeds: int) -> Iterator[Row]:
    """Eight bits after one epoch, beside post-training quantization and the float network after the same epoch."""
    test = cifar_images(ASSETS, "test_6000")
    quantized = amct.quantize(cifar_resnet(ASSETS, 20), calibration())
    before = torch_top1(quantized.model, *test)
    yield accuracy_row(
        "INT8 after 1 epoch, with teacher (wanted: PTQ)", accuracies(None, 1, seeds, loss="teacher"), before
    )
    for what, loss in (("INT8 after 1 epoch, averaged weights", "average"), ("INT8 after 1 epoch", "labels")):
        yield accuracy_row(f"{what} (wanted: PTQ)", accuracies(None, 1, seeds, loss=loss), before)
    last, averages = [], []
    for seed in range(seeds):
        model = cifar_resnet(ASSETS, 20)
        average = averaged(model)
        train(model, 1, seed, own_loss, average)
        last.append(torch_top1(model, *test))
        averages.append(torch_top1(average.module.eval(), *test))
    start = torch_top1(cifar_resnet(ASSETS, 20), *test)
    yield accuracy_row("float after 1 epoch, averaged weights (wanted: as before)", averages, start)
    yield accuracy_row("float after 1 epoch (wanted: as before)", last, start)


def default_file() -> Iterator[Row]:
    """The default QDQ file of trained networks in onnxruntime: accuracy, and speed beside that of PTQ's."""
    test = cifar_images(ASSETS, "test_6000")
    options = amct.IoOptions(dynamic_axes={"x": {0: "n"}})
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        amct.quantize(cifar_resnet(ASSETS, 20), calibration(), io=options).save(place / "ptq", formats=["qdq"])
        for target, loss in (("exact8", "teacher"), ("portable", "teacher"), ("exact8", "average")):
            model = prepared(None, 1, 0, loss=loss, target=target)
            own = torch_top1(model, *test)
            name = "average" if loss == "average" else target
            model.save(place / name, formats=["qdq"], data=calibration()[:4])
            found = onnx_top1(place / f"{name}_qdq_model.onnx", *test)
            kind = ", averaged weights" if loss == "average" else ""
            what = f"default file, trained for {target}{kind}: accuracy beside the model's {own:.2f}"
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
    table = Table("what", "measured", "wanted", "kept", title="ResNet-20, 10 000 training images, 6000 test images")
    jobs = {
        "step": step_ratio,
        "memory": memory_ratio,
        "w4a4": lambda: w4a4(arguments.seeds),
        "int8": lambda: int8(arguments.seeds),
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
