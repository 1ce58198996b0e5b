"""Pruning and 2:4 sparsity of the CIFAR-10 ResNet-20: accuracy, operations and speed.

    python benchmarks/prune_pytorch.py                 everything
    python benchmarks/prune_pytorch.py inner sparse    only these rows: inner, all, latency, sparse, combined

Needs the real models (AMCT_ASSETS, or shared/assets beside the project). Training: 10 000 pictures, flip and crop, SGD
with momentum 0.9, cosine from 0.01 over the epochs of the row, batch 64; with a teacher, the loss is the
Kullback-Leibler divergence to the float model's answers. One thread. The
accuracies of AMCT_BENCH_SEEDS seeds (3) are printed, and written to ``benchmarks/results/prune_pytorch.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "pytorch"))

import torch  # noqa: E402  the networks of the tests are found through the path above
from real_models import cifar_images, cifar_resnet, onnx_top1, torch_top1  # noqa: E402
from torch.nn import functional  # noqa: E402

import amct.pytorch  # noqa: E402
from amct.export.formats import save_model  # noqa: E402
from amct.numerics.pruning import two_of_four_mask  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

ASSETS = Path(os.environ.get("AMCT_ASSETS", HERE.parent.parent / "shared" / "assets"))
RESULTS = HERE / "results" / "prune_pytorch.json"
SEEDS = int(os.environ.get("AMCT_BENCH_SEEDS", "3"))
BATCH, RATE, TEMPERATURE, STATISTICS = 64, 0.01, 4.0, 2048
INNER = """prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }
regular_prune_skip_layers: "conv1"
"""
ANY_BATCH = amct.pytorch.IoOptions(input_names=["x"], dynamic_axes={"x": {0: "n"}})
Values = dict[str, Any]


def augmented(pictures: Tensor, random: torch.Generator) -> Tensor:
    """Flipped with probability one half, and shifted by up to four pixels."""
    flips = torch.rand(len(pictures), generator=random) < 0.5
    pictures = torch.where(flips[:, None, None, None], pictures.flip(3), pictures)
    padded = functional.pad(pictures, (4, 4, 4, 4))
    rows, columns = torch.randint(0, 9, (2, len(pictures)), generator=random)
    return torch.stack(
        [padded[n, :, y : y + 32, x : x + 32] for n, (y, x) in enumerate(zip(rows, columns, strict=True))]
    )


def train(model: nn.Module, epochs: int, seed: int, teacher: nn.Module | None = None) -> float:
    """Train in place; returns the seconds."""
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    pictures, labels = cifar_images(ASSETS, "train_10000")
    steps = epochs * (len(pictures) // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train().to(memory_format=torch.channels_last)  # the same sums in less time on CPUs
    start = time.perf_counter()
    for _ in range(epochs):
        for chosen in torch.randperm(len(pictures), generator=random)[: len(pictures) // BATCH * BATCH].split(BATCH):
            inputs = augmented(pictures[chosen], random).contiguous(memory_format=torch.channels_last)
            outputs = model(inputs)
            loss = (
                functional.cross_entropy(outputs, labels[chosen])
                if teacher is None
                else distilled(outputs, teacher, inputs)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    return time.perf_counter() - start


def distilled(outputs: Tensor, teacher: nn.Module, inputs: Tensor) -> Tensor:
    """The distance of answers from those of the float model."""
    with torch.no_grad():
        wanted = functional.log_softmax(teacher(inputs) / TEMPERATURE, dim=1)
    answers = functional.log_softmax(outputs / TEMPERATURE, dim=1)
    return TEMPERATURE**2 * functional.kl_div(answers, wanted, reduction="batchmean", log_target=True)


class Setting:
    """The network and its data."""

    def __init__(self) -> None:
        self.net = cifar_resnet(ASSETS, 20)
        self.test = cifar_images(ASSETS, "test_6000")
        self.statistics = list(cifar_images(ASSETS, "train_10000", STATISTICS)[0].split(128))
        self.example = self.statistics[0][:1]

    def top1(self, model: nn.Module) -> float:
        """Accuracy on the test pictures, in percent."""
        return torch_top1(copy.deepcopy(model).eval(), *self.test)

    def pruned(self, **settings: Any) -> amct.pytorch.PrunedModel:  # noqa: ANN401  those of prune
        """The pruned network, with its statistics measured."""
        return amct.pytorch.prune(self.net, self.example, batches=self.statistics, **settings)

    def trained(self, model: nn.Module, epochs: int, *, teacher: bool) -> list[float]:
        """The accuracy after training copies of a model, for each seed."""
        found = []
        for seed in range(SEEDS):
            duplicate = copy.deepcopy(model)
            train(duplicate, epochs, seed, self.net if teacher else None)
            found.append(self.top1(duplicate))
        return found


def inner(setting: Setting) -> Values:
    """Half of the inner channels, before and after two epochs."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "inner.cfg"
        config.write_text(INNER)
        pruned = setting.pruned(config=config, align=1)
    return {
        "MMAC": [pruned.before.macs / 1e6, pruned.after.macs / 1e6],
        "before": setting.top1(pruned.model),
        "after 2 epochs": setting.trained(pruned.model, 2, teacher=False),
        "after 2 epochs with teacher": setting.trained(pruned.model, 2, teacher=True),
    }


def everything(setting: Setting) -> Values:
    """30 % of all layers, through the zero-padded shortcut."""
    pruned = setting.pruned(ratio=0.3, align=1)
    return {
        "MMAC": [pruned.before.macs / 1e6, pruned.after.macs / 1e6],
        "layers pruned": f"{sum(a != b for a, b in pruned.channels.values())} of {len(pruned.channels)}",
        "before": setting.top1(pruned.model),
        "after 2 epochs with teacher": setting.trained(pruned.model, 2, teacher=True),
    }


def latency(setting: Setting) -> Values:
    """Time in onnxruntime after pruning 30 %, as a share of the float model's; the median of five."""
    found = {}
    for align in (1, 8):
        pruned = setting.pruned(ratio=0.3, align=align)
        times = [pruned.latency() for _ in range(5)]
        found[f"align {align}"] = statistics.median(after / before for before, after in times)
        found[f"ms, align {align}"] = [1e3 * statistics.median(each) for each in zip(*times, strict=True)]
    return found


def sparse(setting: Setting) -> Values:
    """2:4 sparsity, before and after one epoch, and the weights that are too many in the saved ones."""
    from amct.pytorch.pruning.saving import plain_copy

    result = amct.pytorch.sparsify(setting.net, setting.example)
    values: Values = {"before": setting.top1(result.model), "weights too many": 0}
    for name, teacher in (("after 1 epoch with teacher", setting.net), ("after 1 epoch", None)):
        values[name] = []
        for seed in range(SEEDS):
            model = copy.deepcopy(result.model)
            train(model, 1, seed, teacher)
            values[name].append(setting.top1(model))
            plain = plain_copy(model)
            weights = [module.weight for module in plain.modules() if getattr(module, "weight", None) is not None]
            values["weights too many"] += sum(
                int((weight != weight * two_of_four_mask(weight, 1)).sum()) for weight in weights if weight.ndim > 1
            )
    return values


def combined(setting: Setting) -> Values:
    """30 % pruned, two epochs, then INT8 training of one epoch: accuracy, operations, bytes and milliseconds."""
    pruned = setting.pruned(ratio=0.3)
    found: Values = {"MMAC": [pruned.before.macs / 1e6, pruned.after.macs / 1e6]}
    tops: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        small = copy.deepcopy(pruned.model)
        train(small, 2, seed, setting.net)
        with tempfile.TemporaryDirectory() as folder:
            files = _exported(setting, small, seed, Path(folder))
            for name, file in files.items():
                tops.setdefault(name, []).append(onnx_top1(file, *setting.test, batch=1))
            if seed == 0:
                sizes = {name: file.stat().st_size / 1e3 for name, file in files.items()}
                times = _milliseconds(files, setting.example)
    return found | {name: {"top-1": tops[name], "kB": sizes[name], "ms": times[name]} for name in tops}


def _exported(setting: Setting, small: nn.Module, seed: int, folder: Path) -> dict[str, Path]:
    """The whole and the pruned model as float files, and both trained with quantizers as INT8 files."""
    files = {}
    for name, model in (("float", setting.net), ("pruned", small)):
        quantized = amct.pytorch.quantize(model, setting.statistics[:1], io=ANY_BATCH)
        files[name] = folder / f"{name}.onnx"
        save_model(files[name], quantized.prepared.float_model(None))
    for name, model in (("INT8", setting.net), ("pruned + INT8", small)):
        trainable = amct.pytorch.prepare_qat(copy.deepcopy(model), setting.statistics[:4], io=ANY_BATCH)
        train(trainable, 1, seed, setting.net)
        trainable.save(folder / name, ["qdq"], data=setting.statistics[:4])
        files[name] = folder / f"{name}_qdq_model.onnx"
    return files


def _milliseconds(files: dict[str, Path], example: Tensor) -> dict[str, float]:
    """The time of one picture in onnxruntime, side by side."""
    from amct.export.check.running import LoadedModel, median_seconds

    loaded = {name: LoadedModel(file) for name, file in files.items()}
    one = {name: {next(iter(model.inputs)): example.numpy()} for name, model in loaded.items()}
    for name, model in loaded.items():
        model.run(one[name])
    times = median_seconds({name: lambda n=name: loaded[n].run(one[n]) for name in loaded}, budget=5)  # type: ignore[misc]
    return {name: 1e3 * seconds for name, seconds in times.items()}


ROWS: dict[str, Callable[[Setting], Values]] = {
    "inner": inner, "all": everything, "latency": latency, "sparse": sparse, "combined": combined,
}  # fmt: skip


def main() -> None:
    """Run the rows that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="row", help=", ".join(ROWS))
    torch.set_num_threads(1)
    setting = Setting()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found["float"] = setting.top1(setting.net)
    for row in parser.parse_args().rows:
        found[row] = ROWS[row](setting)
        print(row, json.dumps(found[row], indent=2), flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
